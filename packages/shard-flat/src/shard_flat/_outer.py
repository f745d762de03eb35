"""The tensor around a tensor: pieces of what is itself the local part of a DTensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from shard_flat._protocol import GatherComm


@dataclass(frozen=True)
class Outer:
    """A DTensor of another mesh, of whose local part ranks hold pieces.

    A 4x6 tensor placed ``Shard(1)`` over two ranks: rank 1 has columns 3 to 5, and its local
    part ``[1, 5)`` is two runs of the whole's 24 elements, [4, 6) and [9, 11)::

        . . . . 1 2
        . . . 3 4 .
        . . . . . .
        . . . . . .

    Attributes:
        shape: of the whole.
        placements: ``Shard`` or ``Replicate``, one per dimension of the DTensor's mesh.
        comms: the ranks along each of these dimensions.
        mesh: what pieces report: the mesh that they are cut over, then the DTensor's.

    Raises:
        ValueError: another placement, a dimension that is not there, or not one comm each.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    comms: tuple[GatherComm, ...]
    mesh: DeviceMesh

    def __post_init__(self) -> None:
        if len(self.comms) != len(self.placements):
            raise ValueError(
                f"expected one comm for each of {self.placements}, got {len(self.comms)}"
            )
        for placement in self.placements:
            if type(placement) is Replicate:
                continue
            if type(placement) is not Shard or not 0 <= placement.dim < len(self.shape):
                raise ValueError(
                    f"expected Replicate() or Shard(dim) of shape {self.shape}, got {placement!r}"
                )

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the whole, then of what each placement in turn leaves to this rank."""
        found = [self.shape]
        for placement, comm in zip(self.placements, self.comms, strict=True):
            shape = list(found[-1])
            if isinstance(placement, Shard):
                start, stop = _chunk(shape[placement.dim], comm.size, comm.rank)
                shape[placement.dim] = stop - start
            found.append(tuple(shape))
        return tuple(found)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the local part begins in the whole, along each dimension."""
        found = [0] * len(self.shape)
        for placement, comm, shape in zip(self.placements, self.comms, self.shapes, strict=False):
            if isinstance(placement, Shard):
                found[placement.dim] += _chunk(shape[placement.dim], comm.size, comm.rank)[0]
        return tuple(found)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local part."""
        return self.shapes[-1]

    @cached_property
    def sharded_comms(self) -> tuple[GatherComm, ...]:
        """The comms over which elements differ."""
        pairs = zip(self.placements, self.comms, strict=True)
        return tuple(c for p, c in pairs if isinstance(p, Shard) and c.size > 1)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a plain whole tensor that is this rank's local part. Local."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Put the whole together from local parts.

        **Collective**: all ranks of ``sharded_comms``. **Memory**: up to three times the whole,
        for the call.
        """
        steps = list(zip(self.placements, self.comms, self.shapes, strict=False))
        for placement, comm, shape in reversed(steps):
            if isinstance(placement, Shard) and comm.size > 1:
                part = _gather_dim(part, placement.dim, shape=shape, comm=comm)
        return part


def _chunk(length: int, size: int, rank: int) -> tuple[int, int]:
    """Which indices ``torch.chunk`` gives ``rank`` of ``size``; the last ones may get none."""
    step = -(-length // size)
    return min(rank * step, length), min((rank + 1) * step, length)


def _gather_dim(
    part: torch.Tensor, dim: int, *, shape: Sequence[int], comm: GatherComm
) -> torch.Tensor:
    chunks = [_chunk(shape[dim], comm.size, rank) for rank in range(comm.size)]
    padded = list(part.shape)
    padded[dim] = chunks[0][1]  # the longest
    send = part.new_zeros(padded)
    send.narrow(dim, 0, part.shape[dim]).copy_(part)
    received = part.new_empty(comm.size * send.numel())
    comm.all_gather(received, send.view(-1))
    rows = received.view(comm.size, *padded)
    return torch.cat(
        [row.narrow(dim, 0, stop - start) for row, (start, stop) in zip(rows, chunks, strict=True)],
        dim,
    )
