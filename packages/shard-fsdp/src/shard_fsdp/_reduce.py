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
from shard_fsdp._grad_buffer import GradBuffer
from shard_fsdp._handout import Handout, check_dense, indices
from shard_fsdp._tensor_parallel import local_grad

if TYPE_CHECKING:
    from shard_fsdp._group import GroupContext


@dataclass(frozen=True)
class _Flight:
    """A reduction under way.

    Attributes:
        work: what to wait for.
        buffer: what is reduced.
        out: its result.
        wanted: which parameters get a gradient from it.
        divided: the result is the mean, not the sum.
    """

    work: Work
    buffer: torch.Tensor
    out: torch.Tensor
    wanted: list[bool]
    divided: bool


class GradReducer:
    """Packs a group's gradients as they appear, reduces them once, hands out the pieces.

    Args:
        layout: the group's layout.
        params: the group's sharded parameters.
        context: what the unit's groups share: comms, device, switches.
        dtype: dtype of the sum.
        wire: dtype that gradients appear in.

    **Memory**: ``layout.numel`` elements from a group's first gradient until its
    reduction has ended, and ``layout.shard_numel`` for the gradients that come out. On CPUs both
    are the comm's, which keeps what is given back for the next step: see its ``trim``.
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
        self._buffer = GradBuffer(layout, context=context, dtype=dtype, wire=wire)
        self._pieces = layout.pieces(context.comm.rank)
        self._flight: _Flight | None = None
        self._partial: torch.Tensor | None = None  # reduced here, not yet over replicas
        self._pending = [False] * len(params)  # whose gradients it holds

    @property
    def arrived(self) -> list[bool]:
        """Which parameters have a gradient that was not handed out yet."""
        return self._buffer.arrived

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
        if self._flight is not None:
            self.finish()
        self._buffer.receive(index, grad, scale=self._scale)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Note that a backward ended without a reduction, so that the next one's adds to it.

        **Collective**: local; all ranks alike.
        """
        self._buffer.accumulate()

    @torch.no_grad()
    def launch(self) -> None:
        """Start reducing what has arrived; slots without a gradient count as zero.

        **Collective**: all ranks, also those where nothing arrived.
        """
        wanted = self._handout.wanted(self.arrived)
        self.finish()
        buffer, own = self._buffer.take()
        out = self._empty_shard()
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
            own=own,
            name=self._handout.params[0].spec.name,
        )
        self._flight = _Flight(work, buffer, out, wanted, divided)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduction in flight, if any, and hand out its pieces.

        **Collective**: with replicas, all of them.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.work.wait()
        reduced, wanted, divided = flight.out, flight.wanted, flight.divided
        del flight  # and with it the buffer
        settings = self._context.settings
        if self._partial is not None:
            reduced.add_(self._partial)
            self._partial = None
        wanted = [a or b for a, b in zip(wanted, self._pending, strict=True)]
        if self._context.replicas is not None:
            if not settings.all_reduce_gradients:
                self._partial, self._pending = reduced, wanted
                return
            self._context.replicas.all_reduce(reduced, name=self._handout.params[0].spec.name)
        self._pending = [False] * len(self._pending)
        factor = self._handout.divisor * self._scale
        if factor != 1 and not divided:
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
        self._pending = [False] * len(self._pending)
        self._partial = None
        self._buffer.clear()

    def _empty_shard(self) -> torch.Tensor:
        """Memory for the sum, which becomes the gradients; on a CPU the comm has it at hand.

        A host's memory costs more to get page by page than to fill. What gradients of the last
        step gave back to the comm serves those of this one, and its buffers on their way there.
        """
        numel, device = self._layout.shard_numel, self._comm.device
        if device.type == "cpu":
            return self._comm.empty(numel, self._dtype)
        return torch.empty(numel, dtype=self._dtype, device=device)

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
