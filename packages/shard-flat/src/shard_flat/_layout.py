"""Layouts: the parameters of one group laid end to end and cut into equal shards."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from shard_flat._placement import ShardSpec

_MAX_BLOCK_SUBSETS = 64
_MULTIPLES_TRIED = 32


@dataclass(frozen=True)
class ParamSpec:
    """One parameter as the planner sees it.

    Args:
        name: fully qualified name, unique within a layout.
        shape: global shape; ``()`` is a scalar and any dimension may be 0.
        dtype: storage dtype.
        block: length in elements of the run that no rank boundary may cut. 1 cuts
            anywhere; ``shape[-1]`` keeps rows whole; ``numel`` keeps the parameter whole.

    Raises:
        ValueError: ``block`` is below 1 or a dimension is negative.
        TypeError: a dimension or ``block`` is no integer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    block: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(operator.index(d) for d in self.shape))
        object.__setattr__(self, "block", operator.index(self.block))
        if self.block < 1:
            raise ValueError(f"{self.name}: expected block >= 1, got {self.block}")
        if any(d < 0 for d in self.shape):
            raise ValueError(f"{self.name}: expected dimensions >= 0, got shape {self.shape}")

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that falls in one rank's shard.

    Attributes:
        spec: the parameter.
        start: first element of the flattened parameter held here.
        stop: one past the last; ``start == stop`` where the rank holds nothing of it.
        offset: where the piece begins in the rank's shard, in elements.
    """

    spec: ParamSpec
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the piece."""
        return self.stop - self.start


@dataclass(frozen=True)
class FlatLayout:
    """Parameters laid end to end in one virtual array of ``world_size * shard_numel`` elements.

    Rank ``r`` owns ``[r * shard_numel, (r + 1) * shard_numel)``. A gather of equal shards
    reproduces the array, so every full parameter is a view of it. With three ranks, ``a`` of 5
    elements, ``b`` of shape 2x3 and ``c`` of 4, and byte alignment left out::

        array   a0 a1 a2 a3 a4 | b0 b1 b2 b3 b4 | b5 c0 c1 c2 c3
        rank    0  0  0  0  0    1  1  1  1  1    2  2  2  2  2
        pieces  a[0:5)           b[0:5)           b[5:6) c[0:4)

    Attributes:
        specs: the parameters, in the caller's order.
        starts: where each parameter begins in the array, in elements; same order as ``specs``.
        shard_numel: elements per rank, padding included.
        world_size: number of ranks.
    """

    specs: tuple[ParamSpec, ...]
    starts: tuple[int, ...]
    shard_numel: int
    world_size: int

    @property
    def dtype(self) -> torch.dtype:
        """The one dtype of all parameters."""
        return self.specs[0].dtype

    @property
    def numel(self) -> int:
        """Elements of the whole array, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding_numel(self) -> int:
        """Elements of the array that belong to no parameter."""
        return self.numel - sum(spec.numel for spec in self.specs)

    def piece(self, rank: int, index: int) -> Piece:
        """Return what ``rank`` holds of parameter ``index``. Local, constant time.

        Raises:
            ValueError: ``rank`` is outside of ``range(world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank in [0, {self.world_size}), got {rank}")
        spec, origin = self.specs[index], self.starts[index]
        low = rank * self.shard_numel
        start = min(max(low - origin, 0), spec.numel)
        stop = min(max(low + self.shard_numel - origin, 0), spec.numel)
        offset = origin + start - low if stop > start else 0
        return Piece(spec, start, stop, offset)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return one piece per parameter, in the order of ``specs``, some of them empty. Local.

        Raises:
            ValueError: ``rank`` is outside of ``range(world_size)``.
        """
        return tuple(self.piece(rank, i) for i in range(len(self.specs)))

    def shard_spec(self, rank: int, index: int) -> ShardSpec:
        """Return what a ShardTensor needs to know of ``rank``'s piece of parameter ``index``.

        **Collective**: local, constant time.
        """
        piece, origin = self.piece(rank, index), self.starts[index]
        spec = piece.spec
        return ShardSpec(spec.name, spec.shape, piece.start, piece.stop, origin, self.shard_numel)

    def views(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return one ``view`` of the array per parameter, in the order of the specs. Local."""
        return [self.view(data, index) for index in range(len(self.specs))]

    def view(self, data: torch.Tensor, index: int) -> torch.Tensor:
        """Return a view of the array for one parameter, in its shape.

        It does not share the array's version counter: filling the array anew is no change of a
        parameter.

        Args:
            data: the array ``[numel]``.
            index: of the parameter's spec.

        **Collective**: local.
        """
        spec, start = self.specs[index], self.starts[index]
        return data[start : start + spec.numel].view(spec.shape).data

    def gaps(self) -> list[tuple[int, int]]:
        """Return the runs ``[start, stop)`` of the array that belong to no parameter. Local."""
        runs, cursor = [], 0
        for start, spec in sorted(zip(self.starts, self.specs, strict=True), key=lambda s: s[0]):
            if start > cursor:
                runs.append((cursor, start))
            cursor = max(cursor, start + spec.numel)
        if cursor < self.numel:
            runs.append((cursor, self.numel))
        return runs


def plan_layout(
    specs: Iterable[ParamSpec], world_size: int, *, align_bytes: int = 16
) -> FlatLayout:
    """Lay parameters end to end with the least padding that keeps every block whole.

    The same arguments give the same layout on every rank without talking. Parameters whose
    bytes are a multiple of ``align_bytes`` come first, so that they begin aligned in the array
    at no cost; within the two classes the caller's order holds. Padding stands only between
    parameters (where a boundary would cut a block) and at the end.

    Args:
        specs: parameters of one dtype, unique names, at least one.
        world_size: number of ranks, at least 1.
        align_bytes: every shard is a multiple of this many bytes.

    Returns:
        The layout. Without blocks its padding is at most ``world_size * align_bytes`` bytes.

    Raises:
        ValueError: no parameters, several dtypes, a repeated name, a bad ``world_size`` or an
            ``align_bytes`` that the element size does not divide.

    **Collective**: local.

    **Source**: minimal shard size under blocks that may not be cut is NP-hard (it contains
    Partition). The candidates tried are multiples of the least common multiples of subsets of
    the block sizes, then those that halving the remaining interval gives; each is checked by
    one greedy walk in two orders.
    """
    specs = tuple(specs)
    _check_specs(specs, world_size, align_bytes)
    itemsize = specs[0].dtype.itemsize
    align = max(align_bytes // itemsize, 1)
    order = sorted(range(len(specs)), key=lambda i: specs[i].numel % align != 0)
    total = sum(spec.numel for spec in specs)
    floor = _round_up(max(-(-total // world_size), 1), align)
    starts = _walk(specs, order, floor, world_size)
    if starts is not None:
        return FlatLayout(specs, tuple(starts), floor, world_size)
    by_block = sorted(order, key=lambda i: -specs[i].block)
    shard_numel, best = min(
        (_smallest_shard(specs, each, floor, world_size, align) for each in (order, by_block)),
        key=lambda candidate: candidate[0],
    )
    return FlatLayout(specs, tuple(best), shard_numel, world_size)


def _check_specs(specs: Sequence[ParamSpec], world_size: int, align_bytes: int) -> None:
    if not specs:
        raise ValueError("expected at least one parameter, got none")
    if world_size < 1:
        raise ValueError(f"expected world_size >= 1, got {world_size}")
    dtype = specs[0].dtype
    if align_bytes < 1 or (align_bytes % dtype.itemsize and dtype.itemsize % align_bytes):
        raise ValueError(
            f"expected align_bytes to be a multiple of the {dtype.itemsize} bytes of {dtype}, "
            f"got {align_bytes}"
        )
    seen: set[str] = set()
    for spec in specs:
        if spec.dtype != dtype:
            raise ValueError(
                f"{spec.name}: expected dtype {dtype} (that of {specs[0].name}), got "
                f"{spec.dtype}; one layout holds one dtype, plan one per dtype"
            )
        if spec.name in seen:
            raise ValueError(f"{spec.name}: the name occurs twice in one layout")
        seen.add(spec.name)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _walk(
    specs: Sequence[ParamSpec], order: Sequence[int], shard: int, world_size: int
) -> list[int] | None:
    """Place parameters in ``order``; None where they do not fit ``world_size`` shards."""
    starts = [0] * len(specs)
    cursor, end = 0, shard * world_size
    for i in order:
        numel, block = specs[i].numel, specs[i].block
        start = cursor
        cut = (cursor // shard + 1) * shard
        if block > 1 and start + numel > cut:
            block = min(block, numel)
            shifted = start + (cut - start) % block
            crosses_again = shifted + numel > cut + shard
            if not crosses_again or shard % block == 0:
                start = shifted
            elif numel <= shard:
                start = cut
            else:
                return None
        starts[i] = start
        cursor = start + numel
        if cursor > end:
            return None
    return starts


def _smallest_shard(
    specs: Sequence[ParamSpec], order: Sequence[int], floor: int, world_size: int, align: int
) -> tuple[int, list[int]]:
    """The smallest shard found for one order: exact multiples first, then a bound that holds."""
    blocks = sorted({min(spec.block, spec.numel) for spec in specs if spec.numel} | {1})
    steps = {align}
    subsets = (c for size in range(1, len(blocks) + 1) for c in combinations(blocks, size))
    for subset, _ in zip(subsets, range(_MAX_BLOCK_SUBSETS), strict=False):
        steps.add(math.lcm(align, *subset))
    # Both bounds hold: a shard that takes everything cuts nothing, and in one that is a multiple
    # of every block each parameter shifts by less than its block.
    slack = sum(min(spec.block, spec.numel) for spec in specs)
    total = sum(spec.numel for spec in specs)
    best = min(_round_up(total, align), _round_up(floor + slack, math.lcm(align, *blocks)))
    starts = _walk(specs, order, best, world_size)
    if starts is None:
        raise AssertionError(f"a shard of {best} elements must hold {len(specs)} parameters")
    for step in sorted(steps, reverse=True):
        first = _round_up(floor, step)
        for shard in range(first, min(first + step * _MULTIPLES_TRIED, best), step):
            found = _walk(specs, order, shard, world_size)
            if found is not None:
                best, starts = shard, found
                break
    low, high = floor // align, best // align
    while low < high:
        middle = (low + high) // 2
        found = _walk(specs, order, middle * align, world_size)
        if found is None:
            low = middle + 1
        else:
            high, best, starts = middle, middle * align, found
    return best, starts
