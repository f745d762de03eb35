"""Gradients where one rank holds everything: nothing to reduce, nothing to copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_flat import ShardTensor
from shard_fsdp._handout import Handout, check_dense, indices
from shard_fsdp._tensor_parallel import local_grad

if TYPE_CHECKING:
    from shard_fsdp._group import GroupContext


class SoloGrads:
    """Leaves gradients where autograd puts them, and hands them out once per unit and backward.

    Where they are summed in another dtype than they are computed in, each is cast as it appears.

    Args:
        full_params: the group's full parameters, once they are made.
        params: its sharded ones.
        context: what the unit's groups share.
        dtype: dtype of the sum over microbatches.
        casts: gradients appear in another dtype.

    **Memory**: the gradients themselves.
    """

    def __init__(
        self,
        full_params: Sequence[nn.Parameter],
        params: Sequence[ShardTensor],
        *,
        context: GroupContext,
        dtype: torch.dtype,
        casts: bool,
    ) -> None:
        self._full_params = full_params
        self._handout = Handout(params, context)
        self._context = context
        self._dtype = dtype
        self._casts = casts
        self._sums: list[torch.Tensor | None] = [None] * len(params)

    @property
    def arrived(self) -> list[bool]:
        """Which parameters have a gradient that was not handed out yet."""
        if self._casts:
            return [held is not None for held in self._sums]
        return [full.grad is not None for full in self._full_params]

    def hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that notes that parameter ``index`` has a gradient."""

        def note(param: torch.Tensor) -> None:
            self._context.on_arrival()
            if self._casts:
                grad = self._take(index)
                if grad is not None:
                    held = self._sums[index]
                    self._sums[index] = grad.to(self._dtype) if held is None else held.add_(grad)

        return note

    def accumulate(self) -> None:
        """Note that a backward ended without being handed out: its gradients stay. Local."""

    def launch(self) -> None:
        """Hand out what has arrived. Local."""
        arrived = self.arrived
        wanted = self._handout.wanted(arrived)
        divisor = self._handout.divisor
        with torch.no_grad():
            for index in indices(wanted):
                if not arrived[index]:
                    self._handout.keep(index, torch.zeros_like(self._handout.params[index].piece))
                    continue
                held = self._sums[index] if self._casts else self._take(index)
                assert held is not None
                self._sums[index] = None
                piece = held.reshape(-1)
                self._handout.keep(index, piece.div_(divisor) if divisor != 1 else piece)
            self._handout.fire(wanted)

    def finish(self) -> None:
        """Return: nothing is ever in flight. Local."""

    def discard(self) -> None:
        """Forget all gradients that were not handed out. Local."""
        self._sums = [None] * len(self._sums)
        for full in self._full_params:
            full.grad = None

    def _take(self, index: int) -> torch.Tensor | None:
        full = self._full_params[index]
        grad, full.grad = full.grad, None
        if grad is None:
            return None
        grad = local_grad(grad, full, self._context.dp_dims)
        check_dense(self._handout.params[index].spec.name, grad, self._context)
        return grad.detach() if grad.requires_grad else grad
