"""Where a group's full parameters lie while they are gathered, and how they get there."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shard_comm import Comm, SharedArray, Work
from shard_flat import FlatLayout, FullBuffer, Shadow
from shard_fsdp._collectives import all_gather
from shard_fsdp._policy import UnitSettings


class Full(ABC):
    """One group's full array, whose tensors are made once and live as long as the group.

    Attributes:
        data: ``[layout.numel]`` in the compute dtype.
        is_lent: what it holds is taken away again between uses.
    """

    data: torch.Tensor
    is_lent = True

    @abstractmethod
    def fill(
        self, shard: torch.Tensor, part: tuple[Comm, torch.Tensor] | None, *, name: str
    ) -> Work:
        """Start filling the array from all ranks' shards. Collective.

        Args:
            shard: ``[layout.shard_numel]`` of any floating-point dtype.
            part: fewer ranks whose parts, such as this one, make up the whole as well.
            name: what errors call the gather.
        """

    @abstractmethod
    def free(self) -> None:
        """Say that this rank reads it no more; its memory may go, its tensors stay. Local."""

    @abstractmethod
    def spoil(self) -> None:
        """Say that it no longer holds what it was filled with. Local."""


class OwnShard(Full):
    """One rank: the shard is the full array already."""

    is_lent = False

    def __init__(self, shard: torch.Tensor) -> None:
        self.data = shard

    def fill(
        self, shard: torch.Tensor, part: tuple[Comm, torch.Tensor] | None, *, name: str
    ) -> Work:
        """Return: it is full. Local."""
        return Work()

    def free(self) -> None:
        """Leave it. Local."""

    def spoil(self) -> None:
        """Leave it: it is the shard. Local."""


class CopiedFull(Full):
    """A buffer of this rank that a gather copies every rank's shard into.

    It is there only while it is used, so it has no place for an optimizer to write to.

    **Memory**: ``layout.numel`` elements between ``fill`` and ``free``.
    """

    def __init__(
        self, layout: FlatLayout, comm: Comm, dtype: torch.dtype, settings: UnitSettings
    ) -> None:
        self._comm = comm
        self._settings = settings
        self.data = torch.empty(layout.numel, dtype=dtype, device=comm.device)
        self._buffer = FullBuffer(layout, self.data)

    @torch.no_grad()
    def fill(
        self, shard: torch.Tensor, part: tuple[Comm, torch.Tensor] | None, *, name: str
    ) -> Work:
        """Start filling the array from all ranks' shards. Collective."""
        self._buffer.allocate()
        if part is not None:
            comm, kept = part
            return all_gather(comm, self.data, kept, self._settings, name=name)
        if shard.dtype != self.data.dtype or shard.device != self.data.device:
            shard = self._buffer.slice_of(self._comm.rank).copy_(shard, non_blocking=True)
        return all_gather(self._comm, self.data, shard, self._settings, name=name)

    def free(self) -> None:
        """Free the memory. Local."""
        self._buffer.release()

    def spoil(self) -> None:
        """Free the memory; it is gathered anew in any case. Local."""
        self._buffer.release()


class MappedFull(Full):
    """One array for all ranks of a host: each writes its own slice, and nothing is copied out.

    A slice is written again only if the shard has changed, once no rank reads the old one. It is
    the shard's shadow, so an optimizer that knows shadows writes it in its own pass, where all
    ranks have freed the array by then. In the dtype that it is stored in, a shard is the slice
    itself. Then it is the schedule that sees to it that nobody reads when a shard may be written:
    ranks leave forwards and backwards together.

    Args:
        array: the memory.
        shadow: of the shard; None where the slice is the shard.

    Attributes:
        own: this rank's slice.

    **Memory**: ``layout.numel`` elements for all ranks together, as long as the group lives.
    """

    def __init__(self, array: SharedArray, shadow: Shadow | None) -> None:
        self._array = array
        self._shadow = shadow
        self.data = array.data
        self.own = array.own
        if shadow is not None:
            shadow.attach(array.own, array.is_unread)

    @torch.no_grad()
    def fill(
        self, shard: torch.Tensor, part: tuple[Comm, torch.Tensor] | None, *, name: str
    ) -> Work:
        """Write this rank's slice if need be; the work waits for the others. Collective."""
        self._array.release()  # what a graph still held is replaced, by other ranks too
        if self._shadow is not None and not self._shadow.is_current:
            self._array.claim()
            self.own.copy_(shard)
            self._shadow.settle()
        return self._array.publish()

    def free(self) -> None:
        """Let others write their slices again. Local."""
        self._array.release()

    def spoil(self) -> None:
        """Write this rank's slice again the next time, whatever its shard. Local."""
        if self._shadow is not None:
            self._shadow.spoil()
