"""Which run of a flattened parameter a rank holds, for us and for torch's DTensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class ShardSpec:
    """Name, global shape and element range of one piece.

    Attributes:
        name: fully qualified name of the parameter, for errors and checkpoints.
        shape: global shape.
        start: first element of the flattened parameter held here.
        stop: one past the last.
        origin: where the parameter begins in the group's array, in elements.
        shard_numel: elements of the array per rank; with ``origin`` it gives every rank's range.

    Raises:
        ValueError: the range lies outside of ``[0, numel]``.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    origin: int
    shard_numel: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop <= self.numel:
            raise ValueError(
                f"{self.name}: expected a range within [0, {self.numel}], "
                f"got [{self.start}, {self.stop})"
            )

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    def range_of(self, rank: int) -> tuple[int, int]:
        """Return ``(start, stop)`` of what ``rank`` holds. Local."""
        low = rank * self.shard_numel - self.origin
        start = min(max(low, 0), self.numel)
        return start, min(max(low + self.shard_numel, start), self.numel)


class Ragged(Placement):
    """Placement of a contiguous element range, which may begin in the middle of a row.

    Args:
        start: first element of the flattened tensor held here.
        stop: one past the last.
    """

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.start = start
        self.stop = stop

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ragged):
            return False
        return (self.start, self.stop) == (other.start, other.stop)

    def __hash__(self) -> int:
        return hash((Ragged, self.start, self.stop))

    def __repr__(self) -> str:
        return f"Ragged({self.start}, {self.stop})"
