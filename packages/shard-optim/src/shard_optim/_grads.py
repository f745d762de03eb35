"""Gradients as the kernel wants them: checked, and laid out like their parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shard_flat import ShardTensor
from shard_optim._runs import in_memory_order


def grad_piece(
    param: torch.Tensor, grad: torch.Tensor, name_of: Callable[[torch.Tensor], str]
) -> torch.Tensor:
    """Return this rank's gradient, in the order in which the parameter lies in memory.

    Args:
        param: a parameter.
        grad: its gradient.
        name_of: gives its name, for errors.

    Returns:
        The gradient itself or a view of it; a copy where it lies otherwise than the parameter.

    Raises:
        ValueError: the gradient is sparse, or its dtype, kind or range is not the parameter's.

    **Collective**: local. **Memory**: one gradient, where it is copied, for the step.
    """
    if grad.dtype is not param.dtype or grad.layout is not torch.strided:
        raise ValueError(
            f"{name_of(param)}: expected a dense gradient of {param.dtype}, got {grad.layout} of "
            f"{grad.dtype}"
        )
    if not isinstance(param, ShardTensor):
        if isinstance(grad, ShardTensor):
            raise _other_kind(param, grad, name_of)
        return _like_plain(grad, param)
    if not isinstance(grad, ShardTensor):
        raise _other_kind(param, grad, name_of)
    mine, theirs = param.spec, grad.spec
    if mine is not theirs and (mine.start, mine.stop) != (theirs.start, theirs.stop):
        raise ValueError(
            f"{name_of(param)}: expected a gradient of the range [{mine.start}, {mine.stop}), got "
            f"[{theirs.start}, {theirs.stop}) (rank {param.comm.rank} of {param.comm.size}); make "
            f"it with the parameter's like()"
        )
    return grad.local.contiguous()


def _like_plain(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    if param.is_contiguous():
        return grad.contiguous()
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, memory_format=torch.preserve_format).copy_(grad)
    return in_memory_order(grad)


def _other_kind(
    param: torch.Tensor, grad: torch.Tensor, name_of: Callable[[torch.Tensor], str]
) -> ValueError:
    kinds = ["a ShardTensor" if isinstance(t, ShardTensor) else "plain" for t in (param, grad)]
    return ValueError(
        f"{name_of(param)}: expected a gradient of the parameter's kind ({kinds[0]}), got "
        f"{kinds[1]}; shard both or neither"
    )
