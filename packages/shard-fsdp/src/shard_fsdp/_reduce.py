"""From full gradients, one by one, to the shard of their sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shard_comm import Work
from shard_flat import FlatLayout, ShardTensor
from shard_fsdp._collectives import reduce_scatter
from shard_fsdp._handout import Handout, check_dense, indices
from shard_fsdp._tensor_parallel import local_grad

if TYPE_CHECKING:
    from shard_fsdp._group import GroupContext


_KEPT_BYTES = 64 << 10
"""Of the smallest gradients that stay where autograd put them; of others a copy is quicker."""


@dataclass(frozen=True)
class _Flight:
    """A reduction under way.

    Attributes:
        work: what to wait for.
        out: its result.
        wanted: which parameters get a gradient from it.
        divided: the result is the mean, not the sum.
    """

    work: Work
    out: torch.Tensor
    wanted: list[bool]
    divided: bool


class GradReducer:
    """Packs a group's gradients as they appear, reduces them once, hands out the pieces.

    Each gradient is copied into its slot of a buffer and freed; later ones for the same slot are
    added. Between host memories gradients travel in the dtype that they appear in and are added
    in the reduction dtype: the same sum for fewer bytes. Elsewhere, and while microbatches add up
    unsynchronised, the buffer has the reduction dtype.

    Where a transport reads this rank's own contribution in place, large gradients of which this
    rank owns all are not copied: nobody else needs them.

    Args:
        layout: the group's layout.
        params: the group's sharded parameters.
        context: what the unit's groups share: comms, device, switches.
        dtype: dtype of the sum.
        wire: dtype that gradients appear in.

    Attributes:
        arrived: which parameters have a gradient that was not handed out yet.

    **Memory**: ``layout.numel`` elements from a group's first gradient until its
    reduction has ended, and ``layout.shard_numel`` for the gradients that come out.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[ShardTensor],
        *,
        context: GroupContext,
        dtype: torch.dtype,
        wire: torch.dtype,
    ) -> None:
        self._context = context
        self._comm = context.comm
        self._layout = layout
        self._handout = Handout(params, context)
        self._dtype = dtype
        self._wire = wire if torch.promote_types(wire, dtype) == dtype else dtype
        self._accumulates = False  # the buffer holds, or may hold, unsynchronised microbatches
        self._pieces = layout.pieces(context.comm.rank)
        self._gaps = layout.gaps()
        self._buffer: torch.Tensor | None = None
        self._slots: list[torch.Tensor] = []
        self._kept: dict[int, torch.Tensor] = {}  # gradients that were not copied
        self._may_keep = [
            piece.numel == spec.numel and spec.numel * self._wire.itemsize >= _KEPT_BYTES
            for piece, spec in zip(self._pieces, layout.specs, strict=True)
        ]
        self._flight: _Flight | None = None
        self._partial: torch.Tensor | None = None  # reduced here, not yet over replicas
        self._pending = [False] * len(params)  # whose gradients it holds
        self.arrived = [False] * len(params)

    def hook_for(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the hook that takes parameter ``index``'s gradient the moment it is there."""

        def take(param: torch.Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is not None:
                grad = local_grad(grad, param, self._context.dp_dims)
                self._context.on_arrival()
                # A backward that makes a graph of itself runs with gradients on.
                self.receive(index, grad.detach() if grad.requires_grad else grad)

        return take

    def receive(self, index: int, grad: torch.Tensor) -> None:
        """Take one full gradient in the parameter's global shape, without a graph.

        Raises:
            TypeError: the gradient is sparse.

        **Collective**: local, except that a reduction of the same group that is still in flight
        is waited for.
        """
        check_dense(self._handout.params[index].spec.name, grad, self._context)
        self.finish()
        self._make_buffer()
        slot = self._slots[index]
        scale = self._scale
        if index in self._kept:
            self._kept[index] = self._kept[index] + grad  # its memory may be another's as well
        elif self.arrived[index]:
            slot.add_(grad, alpha=scale)
        elif self._may_keep[index] and self._is_direct and grad.is_contiguous():
            self._kept[index] = grad
        elif scale != 1:
            torch.mul(grad, scale, out=slot)
        else:
            slot.copy_(grad)
        self.arrived[index] = True

    @torch.no_grad()
    def accumulate(self) -> None:
        """Note that a backward ended without a reduction, so that the next one's adds to it.

        **Collective**: local; all ranks alike.
        """
        self._accumulates = True
        if self._buffer is not None:
            for index, grad in self._kept.items():
                self._slots[index].copy_(grad)
            self._kept = {}
            if self._buffer.dtype != self._dtype:
                narrow = self._buffer
                self._drop_buffer()
                self._make_buffer().copy_(narrow)

    @torch.no_grad()
    def launch(self) -> None:
        """Start reducing what has arrived; slots without a gradient count as zero.

        **Collective**: all ranks, also those where nothing arrived.
        """
        arrived, self.arrived = self.arrived, [False] * len(self.arrived)
        wanted = self._handout.wanted(arrived)
        self.finish()
        buffer = self._make_buffer()
        self._accumulates = False
        for index, slot in enumerate(self._slots):
            if not arrived[index]:
                slot.zero_()
        for start, stop in self._gaps:
            buffer[start:stop].zero_()
        out = torch.empty(self._layout.shard_numel, dtype=self._dtype, device=self._comm.device)
        settings = self._context.settings
        divided = (
            self._handout.divisor == self._comm.size
            and self._context.replicas is None
            and settings.reduce_scatter is None
            and self._scale == 1
        )
        work = reduce_scatter(
            self._comm,
            out,
            buffer,
            settings,
            op="mean" if divided else "sum",
            own=self._take_own(buffer),
            name=self._handout.params[0].spec.name,
        )
        self._flight = _Flight(work, out, wanted, divided)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction in flight, if any, and hand out its pieces.

        **Collective**: with replicas, all of them.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.work.wait()
        self._drop_buffer()
        reduced = flight.out
        settings = self._context.settings
        if self._partial is not None:
            reduced.add_(self._partial)
            self._partial = None
        wanted = [a or b for a, b in zip(flight.wanted, self._pending, strict=True)]
        if self._context.replicas is not None:
            if not settings.all_reduce_gradients:
                self._partial, self._pending = reduced, wanted
                return
            self._context.replicas.all_reduce(reduced, name=self._handout.params[0].spec.name)
        self._pending = [False] * len(self._pending)
        factor = self._handout.divisor * self._scale
        if factor != 1 and not flight.divided:
            reduced.div_(factor)
        if settings.all_reduce_hook is not None:
            settings.all_reduce_hook(reduced)
        shard = reduced.to(device=self._context.device, dtype=self._layout.dtype)
        for index in indices(wanted):
            piece = self._pieces[index]
            self._handout.keep(index, shard[piece.offset : piece.offset + piece.numel])
        self._handout.fire(wanted)

    def discard(self) -> None:
        """Forget all gradients that were not handed out, after an exception."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.work.wait()
        self.arrived = [False] * len(self.arrived)
        self._pending = [False] * len(self._pending)
        self._partial = None
        self._accumulates = False
        self._kept = {}
        self._drop_buffer()

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by before they are summed.

        Half of the division by n, as the power of two near its root, where the sum of n float16
        numbers could overflow; 1 elsewhere.
        """
        divisor = self._handout.divisor
        if self._dtype != torch.float16 or divisor <= 1:
            return 1.0
        return 2.0 ** -math.ceil(math.log2(divisor) / 2)

    @property
    def _is_narrow(self) -> bool:
        """Whether the next buffer has the dtype that gradients appear in."""
        settings = self._context.settings
        return (
            settings.sync_gradients
            and not self._accumulates
            and settings.reduce_scatter is None
            and self._comm.device.type == "cpu"
        )

    @property
    def _is_direct(self) -> bool:
        """Whether the transport reads this rank's own gradients where they are."""
        comm = self._context.settings.reduce_comm or self._comm
        assert self._buffer is not None
        return comm.reads_own and self._is_narrow and self._buffer.dtype == self._wire

    def _make_buffer(self) -> torch.Tensor:
        if self._buffer is None:
            dtype = self._wire if self._is_narrow else self._dtype
            self._buffer = self._comm.empty(self._layout.numel, dtype)
            self._slots = self._layout.views(self._buffer)
        return self._buffer

    def _take_own(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """This rank's slice of the buffer, the gradients that were not copied in their places."""
        kept, self._kept = self._kept, {}
        numel, start = self._layout.shard_numel, 0
        mine = buffer[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        parts = []
        for index in sorted(kept, key=lambda i: self._pieces[i].offset):
            at, grad = self._pieces[index].offset, kept[index].view(-1)
            parts += [mine[start:at], grad]
            start = at + grad.numel()
        return [*parts, mine[start:]]

    def _drop_buffer(self) -> None:
        self._buffer = None
        self._slots = []
