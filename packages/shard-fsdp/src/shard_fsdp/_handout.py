"""From reduced pieces to the gradients of sharded parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shard_flat import ShardTensor

if TYPE_CHECKING:
    from shard_fsdp._group import GroupContext


class Handout:
    """Gives each sharded parameter its piece of the gradient, and runs the user's hooks.

    Args:
        params: the group's sharded parameters.
        context: what the unit's groups share.
    """

    def __init__(self, params: Sequence[ShardTensor], context: GroupContext) -> None:
        self.params = params
        self._context = context

    @property
    def divisor(self) -> float:
        """What sums are divided by: the number of ranks, or what the user set."""
        factor = self._context.settings.divide_factor
        if factor is not None:
            return factor
        replicas = self._context.replicas
        return self._context.comm.size * (1 if replicas is None else replicas.size)

    def wanted(self, arrived: list[bool]) -> list[bool]:
        """Which parameters get a gradient, given those that one arrived for. Local."""
        if self._context.settings.zero_fill_unused:
            return [param.requires_grad for param in self.params]
        return arrived

    def keep(self, index: int, piece: torch.Tensor) -> None:
        """Set a parameter's gradient, or add to the one it has. Local.

        Args:
            index: the parameter's.
            piece: ``[stop - start]``, of any floating-point dtype; it is kept if it fits.
        """
        param = self.params[index]
        local = param.piece
        if piece.dtype != local.dtype or piece.device != local.device:
            piece = piece.to(device=local.device, dtype=local.dtype)
        new = param.like(piece)
        if param._backward_hooks:  # from param.register_hook()
            for hook in list(param._backward_hooks.values()):
                new = _checked(hook(new), new)
        grad = param.grad
        if grad is None:
            param.grad = new
        else:
            assert isinstance(grad, ShardTensor)
            grad.add_(new)

    def fire(self, wanted: Sequence[bool]) -> None:
        """Run the post-accumulate hooks of parameters that got a gradient. Local."""
        for index in indices(wanted):
            param = self.params[index]
            if param._post_accumulate_grad_hooks:
                for hook in list(param._post_accumulate_grad_hooks.values()):
                    hook(param)


def indices(flags: Sequence[bool]) -> Iterator[int]:
    """Yield where the flags are set. Local."""
    return (i for i, flag in enumerate(flags) if flag)


def check_dense(name: str, grad: torch.Tensor, context: GroupContext) -> None:
    """Raise where a gradient has no element for each of the parameter's. Local.

    Raises:
        TypeError: it is sparse.
    """
    if grad.layout is not torch.strided:
        raise TypeError(
            f"{name}: expected a dense gradient, got layout {grad.layout} (rank "
            f"{context.comm.rank} of {context.comm.size}); use sparse=False"
        )


def _checked(found: object, grad: ShardTensor) -> ShardTensor:
    """What a user's hook on a sharded parameter's gradient returned; None keeps it."""
    if found is None:
        return grad
    if not isinstance(found, ShardTensor) or found.spec != grad.spec:
        raise TypeError(
            f"{grad.spec.name}: expected a hook to return None or a ShardTensor like the gradient "
            f"that it was given, got {type(found).__name__}"
        )
    return found
