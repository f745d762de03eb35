"""Where a group's full gradients lie until they are reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_flat import FlatLayout

if TYPE_CHECKING:
    from shard_fsdp._group import GroupContext

_KEPT_BYTES = 64 << 10
"""Of the smallest gradients that stay where autograd put them; of others a copy is quicker."""


class GradBuffer:
    """One array that gradients are copied into as they appear; later ones are added.

    Between host memories gradients travel in the dtype that they appear in and are added in the
    reduction dtype: the same sum for fewer bytes. Elsewhere, and while microbatches add up
    unsynchronised, the array has the reduction dtype.

    Where a transport reads this rank's own contribution in place, large gradients of which this
    rank owns all are not copied: no other rank needs them. A gradient whose memory somebody else
    holds as well, such as that of another parameter, is copied: who holds it may write to it.

    Args:
        layout: the group's layout.
        context: what the unit's groups share.
        dtype: dtype of the sum.
        wire: dtype that gradients appear in.

    Attributes:
        arrived: which parameters have a gradient that was not taken yet.

    **Memory**: ``layout.numel`` elements from the first gradient until they are taken.
    """

    def __init__(
        self, layout: FlatLayout, *, context: GroupContext, dtype: torch.dtype, wire: torch.dtype
    ) -> None:
        self.arrived = [False] * len(layout.specs)
        self._context = context
        self._layout = layout
        self._dtype = dtype
        self._wire = wire if torch.promote_types(wire, dtype) == dtype else dtype
        self._accumulates = False  # it holds, or may hold, unsynchronised microbatches
        self._pieces = layout.pieces(context.comm.rank)
        self._may_keep = [
            piece.numel == spec.numel and spec.numel * self._wire.itemsize >= _KEPT_BYTES
            for piece, spec in zip(self._pieces, layout.specs, strict=True)
        ]
        self._gaps = layout.gaps()
        self._data: torch.Tensor | None = None
        self._slots: dict[int, torch.Tensor] = {}  # made when they are first written
        self._kept: dict[int, torch.Tensor] = {}  # gradients that were not copied

    def receive(self, index: int, grad: torch.Tensor, *, scale: float) -> None:
        """Take parameter ``index``'s gradient, in its global shape, times ``scale``. Local."""
        if index in self._kept:
            self._kept[index] = self._kept[index] + grad  # a hook may have kept it, too
        elif self.arrived[index]:
            self._slot(index).add_(grad, alpha=scale)
        elif scale != 1:
            torch.mul(grad, scale, out=self._slot(index))
        elif self._may_keep[index] and self._is_read_in_place(grad) and _is_sole(grad):
            self._kept[index] = grad
        else:
            self._slot(index).copy_(grad)
        self.arrived[index] = True

    def accumulate(self) -> None:
        """Note that more is to be added in later backwards. Local."""
        self._accumulates = True
        if self._data is None:
            return
        for index, grad in self._kept.items():
            self._slot(index).copy_(grad)
        self._kept = {}
        if self._data.dtype != self._dtype:
            narrow, self._data = self._data, None
            self._make().copy_(narrow)

    def take(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Give the gradients away; those that did not arrive are zero. Local.

        Returns:
            The array ``[layout.numel]``, and what this rank's slice of it is made up of, which in
            parts may lie elsewhere.
        """
        data, arrived = self._make(), self.arrived
        for index, there in enumerate(arrived):
            if not there:
                self._slot(index).zero_()
        for start, stop in self._gaps:
            data[start:stop].zero_()
        numel, start = self._layout.shard_numel, 0
        mine = data[self._context.comm.rank * numel :][:numel]
        own = []
        for index in sorted(self._kept, key=lambda i: self._pieces[i].offset):
            at, grad = self._pieces[index].offset, self._kept[index].view(-1)
            own += [mine[start:at], grad]
            start = at + grad.numel()
        own.append(mine[start:])
        self.clear()
        return data, own

    def clear(self) -> None:
        """Forget all gradients. Local."""
        self.arrived = [False] * len(self.arrived)
        self._accumulates = False
        self._kept = {}
        self._data = None
        self._slots = {}

    @property
    def _is_narrow(self) -> bool:
        """Whether gradients that come now may travel in the dtype that they appear in."""
        settings = self._context.settings
        return (
            settings.sync_gradients
            and not self._accumulates
            and settings.reduce_scatter is None
            and self._context.comm.device.type == "cpu"
        )

    def _is_read_in_place(self, grad: torch.Tensor) -> bool:
        comm = self._context.settings.reduce_comm or self._context.comm
        alike = grad.dtype == self._make().dtype and grad.is_contiguous()
        return comm.reads_own and self._is_narrow and alike

    def _slot(self, index: int) -> torch.Tensor:
        """Where parameter ``index``'s gradient lies, in its shape."""
        slot = self._slots.get(index)
        if slot is None:
            slot = self._slots[index] = self._layout.view(self._make(), index)
        return slot

    def _make(self) -> torch.Tensor:
        if self._data is None:
            dtype = self._wire if self._is_narrow else self._dtype
            self._data = self._context.comm.empty(self._layout.numel, dtype)
            self._slots = {}
        return self._data


def _is_sole(grad: torch.Tensor) -> bool:
    """Whether a gradient lies in memory that no other tensor holds. Local."""
    storage = grad.untyped_storage()  # counted once more for this object
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)
