"""Elements of a flattened tensor as runs at equal distances, and what two such sets share."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Runs(NamedTuple):
    """Runs of elements of a flattened tensor, all of one length and at equal distances.

    Columns 1 and 2 of a 3x5 tensor are ``Runs(1, 13, times=3, stride=5)``: [1, 3) [6, 8) [11, 13).

    Attributes:
        start: first element of the first run.
        stop: one past the last element of the last run.
        times: how many runs.
        stride: elements from the beginning of one run to that of the next; 0 for a single run.
    """

    start: int
    stop: int
    times: int = 1
    stride: int = 0

    @property
    def length(self) -> int:
        """Elements of each run."""
        return self.stop - self.start - (self.times - 1) * self.stride

    @property
    def numel(self) -> int:
        """Elements of all runs."""
        return self.times * self.length


class Box(NamedTuple):
    """A block of a tensor: where it begins and how far it goes, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Rect(NamedTuple):
    """Part of a flattened tensor that is written in rows: rows, columns, and its first element."""

    row: int
    rows: int
    col: int
    cols: int
    at: int


def box_runs(
    shape: Sequence[int], box: Box, *, first: int, last: int
) -> Iterator[tuple[Runs, int]]:
    """Yield where elements ``[first, last)`` of a flattened block lie in the whole, in order.

    Of columns 1 and 2 of a 3x5 tensor, elements 1 to 6 are the end of the first row's run and
    those of the other two rows::

        box_runs((3, 5), Box((0, 1), (3, 2)), first=1, last=6)
            Runs(2, 3), 1
            Runs(6, 13, times=2, stride=5), 2

    Args:
        shape: of the whole.
        box: the block.
        first: an element of the flattened block.
        last: one past another.

    Returns:
        Runs, and which element of the flattened block their first is.
    """
    offsets, sizes = box
    cut = max((dim for dim, size in enumerate(sizes) if size != shape[dim]), default=None)
    if cut is None:
        if first < last:
            yield Runs(first, last), first
        return
    inner = math.prod(shape[cut + 1 :])
    length, stride = sizes[cut] * inner, shape[cut] * inner
    evenly = 1  # so many runs follow one another at this distance
    for dim in range(cut - 1, -1, -1):
        evenly *= sizes[dim]
        if sizes[dim] != shape[dim]:
            break
    at = first
    while at < last:
        row, within = divmod(at, length)
        start = (_row_of(row, shape[:cut], box) * shape[cut] + offsets[cut]) * inner + within
        rows = min((last - at) // length, evenly - row % evenly)
        if within or rows < 2:
            numel = min(last - at, length - within)
            yield Runs(start, start + numel), at
        else:
            numel = rows * length
            yield Runs(start, start + (rows - 1) * stride + length, rows, stride), at
        at += numel


def _row_of(row: int, shape: Sequence[int], box: Box) -> int:
    """Return which row of the whole a row of the block is."""
    result, step = 0, 1
    for dim in range(len(shape) - 1, -1, -1):
        row, index = divmod(row, box.sizes[dim])
        result += (index + box.offsets[dim]) * step
        step *= shape[dim]
    return result


def overlaps(one: Runs, other: Runs) -> Iterator[tuple[int, int, int]]:
    """Yield the elements that two sets of runs share, in runs that are one in both.

    Of columns 1 and 2 of a 3x5 tensor, its elements 7 to 12 are these::

        overlaps(Runs(1, 13, times=3, stride=5), Runs(7, 13))
            3, 0, 1
            4, 4, 2

    Returns:
        Which element of ``one``, which of ``other``, and how many from there on.
    """
    width = one.stride or other.stride
    if one.times > 1 and other.times > 1 and one.stride != other.stride:
        for run in range(one.times):
            start = one.start + run * one.stride
            for at, to, numel in overlaps(Runs(start, start + one.length), other):
                yield run * one.length + at, to, numel
    elif width == 0:
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        if start < stop:
            yield start - one.start, start - other.start, stop - start
    else:
        for left in _rects(one, width):
            for right in _rects(other, width):
                yield from _shared(left, right)


def tiling_problem(parts: Sequence[Runs], numel: int) -> str | None:
    """Return why runs are not exactly the elements ``[0, numel)``; None if they are. Local.

    All parts with several runs must have one stride, and no run may go across a multiple of it,
    as pieces of one tensor do that were cut along the same dimension. So each is a rectangle, or
    up to three, of the tensor written in rows of that length, and a line that goes down over the
    rows meets every overlap.
    """
    strides = {part.stride for part in parts if part.times != 1}
    if len(strides) > 1:
        return f"its runs are at different distances, {sorted(strides)}"
    width = max(strides, default=max(numel, 1))
    for part in parts:
        if part.times < 1 or part.length < 1 or part.stop > numel:
            return f"{part} is not within [0, {numel})"
        if (part.times > 1) != (part.stride > 0):
            return f"{part} has runs without a distance, or a distance without runs"
        if part.times > 1 and part.start % width + part.length > width:
            return f"{part} goes across a multiple of {width}"
    held = sum(part.numel for part in parts)
    if held < numel:
        return f"nobody stored {numel - held} of {numel} elements"
    twice = _overlap(rect for part in parts for rect in _rects(part, width))
    if twice is None and held == numel:
        return None
    return f"elements from {0 if twice is None else twice * width} on are stored twice"


def _rects(runs: Runs, width: int) -> Iterator[_Rect]:
    """Cut runs into rectangles of the tensor written in rows of ``width``."""
    if runs.times > 1:
        row, col = divmod(runs.start, width)
        yield _Rect(row, runs.times, col, runs.length, 0)
        return
    at = runs.start
    while at < runs.stop:
        row, col = divmod(at, width)
        rows = (runs.stop - at) // width if col == 0 else 0
        cols = width if rows else min(width - col, runs.stop - at)
        yield _Rect(row, rows or 1, col, cols, at - runs.start)
        at += (rows or 1) * cols


def _shared(one: _Rect, other: _Rect) -> Iterator[tuple[int, int, int]]:
    row, last = max(one.row, other.row), min(one.row + one.rows, other.row + other.rows)
    col = max(one.col, other.col)
    cols = min(one.col + one.cols, other.col + other.cols) - col
    if row >= last or cols <= 0:
        return
    left = one.at + (row - one.row) * one.cols + col - one.col
    right = other.at + (row - other.row) * other.cols + col - other.col
    if cols == one.cols == other.cols:
        yield left, right, (last - row) * cols
        return
    for down in range(last - row):
        yield left + down * one.cols, right + down * other.cols, cols


def _overlap(rects: Iterable[_Rect]) -> int | None:
    """Return the first row in which two rectangles overlap."""
    events = []
    for rect in rects:
        span = (rect.col, rect.col + rect.cols)
        events += [(rect.row, True, span), (rect.row + rect.rows, False, span)]
    active: list[tuple[int, int]] = []
    for row, begins, span in sorted(events):  # what ends comes first
        place = bisect_left(active, span)
        if not begins:
            del active[place]
            continue
        before, after = active[place - 1 : place], active[place : place + 1]
        if (before and before[0][1] > span[0]) or (after and after[0][0] < span[1]):
            return row
        insort(active, span)
    return None
