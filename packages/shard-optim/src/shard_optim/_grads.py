"""Gradients as the kernel wants them: checked, and laid out like their parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shard_flat import ShardTensor
from shard_optim._runs import in_memory_order, piece_of


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
    if isinstance(grad, ShardTensor) != isinstance(param, ShardTensor):
        kinds = ["a ShardTensor" if isinstance(t, ShardTensor) else "plain" for t in (param, grad)]
        raise ValueError(
            f"{name_of(param)}: expected a gradient of the parameter's kind ({kinds[0]}), got "
            f"{kinds[1]}; shard both or neither"
        )
    own, piece = piece_of(param), piece_of(grad)
    if piece.dtype is not own.dtype or piece.layout is not torch.strided:
        raise ValueError(
            f"{name_of(param)}: expected a dense gradient of {own.dtype}, got {piece.layout} of "
            f"{piece.dtype}"
        )
    if isinstance(param, ShardTensor) and isinstance(grad, ShardTensor):
        _check_range(param, grad, name_of)
    if own.is_contiguous():
        return piece.contiguous()
    if piece.stride() != own.stride():
        piece = torch.empty_like(own, memory_format=torch.preserve_format).copy_(piece)
    return in_memory_order(piece)


def _check_range(
    param: ShardTensor, grad: ShardTensor, name_of: Callable[[torch.Tensor], str]
) -> None:
    mine, theirs = param.spec, grad.spec
    if mine is not theirs and not mine.is_cut_like(theirs, param.comm.size):
        raise ValueError(
            f"{name_of(param)}: expected a gradient of the range [{mine.start}, {mine.stop}), got "
            f"[{theirs.start}, {theirs.stop}) (rank {param.comm.rank} of {param.comm.size}); make "
            f"it with the parameter's like()"
        )
