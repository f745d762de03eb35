"""Which run of a flattened parameter a rank holds, for us and for torch's DTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial

from shard_flat._outer import Outer
from shard_flat._protocol import GatherComm


@dataclass(frozen=True)
class ShardSpec:
    """Name, shape and element range of one piece.

    Attributes:
        name: fully qualified name of the parameter, for errors and checkpoints.
        shape: of the tensor that is cut into pieces: the global shape, unless there is an
            ``outer``.
        start: first element of the flattened parameter held here.
        stop: one past the last.
        origin: where the parameter begins in the group's array, in elements.
        shard_numel: elements of the array per rank; with ``origin`` it gives every rank's range.
        outer: what the tensor that is cut is the local part of; None where it is whole.
        unit: how many elements of the array one element stands for, such as a block's one scale.
            It belongs to the rank that owns the first of them.

    Raises:
        ValueError: the range lies outside of ``[0, numel]``, or ``shape`` is not that of
            ``outer``'s local part.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    origin: int
    shard_numel: int
    outer: Outer | None = None
    unit: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.numel:
            raise ValueError(
                f"{self.name}: expected a range within [0, {self.numel}], "
                f"got [{self.start}, {self.stop})"
            )
        if self.outer is not None and self.outer.local_shape != self.shape:
            raise ValueError(
                f"{self.name}: expected the local shape {self.outer.local_shape}, got {self.shape}"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the tensor that is cut."""
        return math.prod(self.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.shape if self.outer is None else self.outer.shape

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return ``[stop - start]``, this piece of a plain tensor of the global shape. Local.

        It is a view where the tensor's memory allows.
        """
        if self.outer is not None:
            whole = self.outer.part_of(whole)
        return whole.reshape(-1)[self.start : self.stop]

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds. Local."""
        low = rank * self.shard_numel - self.origin
        high = low + self.shard_numel
        start = min(max(-(-low // self.unit), 0), self.numel)
        return start, min(max(-(-high // self.unit), start), self.numel)

    def coarse(self, unit: int, rank: int) -> ShardSpec:
        """Return the spec of a vector with one element for each ``unit`` of these.

        With blocks of 4, the elements ``[6, 11)`` of 11 hold the beginning of block 2 alone, so
        they go with the range ``[2, 3)`` of 3.

        Args:
            unit: elements that one of the vector stands for.
            rank: this rank.

        **Collective**: local.
        """
        shape = (-(-self.numel // unit),)
        whole = replace(self, shape=shape, start=0, stop=0, unit=self.unit * unit)
        start, stop = whole.range_of(rank)
        return replace(whole, start=start, stop=stop)

    def is_cut_like(self, other: ShardSpec, size: int) -> bool:
        """Whether another tensor of this shape has the same range on every one of ``size`` ranks.

        The answer is the same on all ranks, also on those whose own ranges happen to agree. Local.
        """
        if self.shape != other.shape or self.outer != other.outer:
            return False
        mine = self.origin, self.shard_numel, self.unit
        if mine == (other.origin, other.shard_numel, other.unit):
            return True
        return all(self.range_of(rank) == other.range_of(rank) for rank in range(size))


class Ragged(Partial):
    """Placement of a contiguous element range, which may begin in the middle of a row.

    To torch it is a partial sum: a tensor that is zero outside of the range adds up to the whole
    over ranks. That is how torch's own ``distribute_tensor`` and ``DTensor.full_tensor`` can cut
    and gather by it; no zeros are stored or sent. A piece of a DTensor's local part has that
    DTensor's placements beside it, and torch would cut by this one first: then it leaves the
    tensor as it is, and a ShardTensor takes its range when it meets the result.

    Args:
        start: first element of the flattened tensor held here.
        stop: one past the last.
        spec: name, global shape and ranges, for gathering.
        comm: the ranks that hold the other pieces, for gathering.
    """

    def __new__(
        cls,
        start: int,
        stop: int,
        *,
        spec: ShardSpec | None = None,
        comm: GatherComm | None = None,
    ) -> Ragged:
        """Make a partial sum; torch builds placements in ``__new__``."""
        made: Ragged = super().__new__(cls, "sum")  # type: ignore[call-arg]
        return made

    def __init__(
        self,
        start: int,
        stop: int,
        *,
        spec: ShardSpec | None = None,
        comm: GatherComm | None = None,
    ) -> None:
        super().__init__("sum")
        self.start = start
        self.stop = stop
        self._spec = spec
        self._comm = comm

    def _partition_value(
        self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int
    ) -> torch.Tensor:
        if mesh.size(mesh_dim) == 1 or self._is_inner:
            return tensor.clone()  # on one rank torch takes the local tensor for the whole
        return tensor.reshape(-1)[self.start : self.stop].clone()

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        if self._spec is None or self._comm is None:
            raise RuntimeError(
                f"{self!r} was made by hand and does not know the other ranks' ranges; take the "
                f"placements of a ShardTensor"
            )
        return tensor if self._is_inner else gather_pieces(tensor, self._spec, self._comm)

    @property
    def _is_inner(self) -> bool:
        return self._spec is not None and self._spec.outer is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return False
        return (self.start, self.stop) == (other.start, other.stop)

    def __hash__(self) -> int:
        return hash((Ragged, self.start, self.stop))

    def __repr__(self) -> str:
        return f"Ragged({self.start}, {self.stop})"

    __str__ = __repr__


def gather_pieces(local: torch.Tensor, spec: ShardSpec, comm: GatherComm) -> torch.Tensor:
    """Gather every rank's piece into a plain tensor of the global shape.

    Args:
        local: ``[stop - start]``, this rank's piece.
        spec: name, shape and ranges.
        comm: the ranks that hold the other pieces.

    **Collective**: all ranks of ``comm`` and of an outer DTensor's mesh. **Memory**: up to twice
    the full tensor, for the call; three times with an outer DTensor.
    """
    cut = _gather_cut(local, spec, comm)
    return cut if spec.outer is None else spec.outer.gather(cut)


def _gather_cut(local: torch.Tensor, spec: ShardSpec, comm: GatherComm) -> torch.Tensor:
    if comm.size == 1:
        return local.clone().view(spec.shape)
    ranges = [spec.range_of(rank) for rank in range(comm.size)]
    longest = max(stop - start for start, stop in ranges)
    if longest == 0:
        return local.new_empty(spec.shape)
    send = local.new_zeros(longest)
    send[: local.numel()].copy_(local)
    received = local.new_empty(comm.size * longest)
    comm.all_gather(received, send)
    rows = received.view(comm.size, longest)
    return torch.cat(
        [rows[rank, : stop - start] for rank, (start, stop) in enumerate(ranges)]
    ).view(spec.shape)
