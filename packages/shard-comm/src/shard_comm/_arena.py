"""One rank's part of a shared file, handed out in blocks."""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby

import torch

from shard_comm._mapping import (
    LARGE_PAGE,
    PAGE,
    address_of,
    give_back,
    make_large,
    pages_of,
    round_up,
)
from shard_comm._shared_file import SharedFile

_ALIGN = 64
_SEGMENT_BYTES = 32 << 20
_LARGE_BYTES = 1 << 20
_SPREAD_BYTES = 2 * LARGE_PAGE  # less has hardly a whole large page in it
_SWEEP_TAKES = 64
_KEEP_TAKES = 512


@dataclass(frozen=True)
class Place:
    """Where bytes lie in the file.

    Attributes:
        segment: offset of the mapping that holds them.
        segment_bytes: size of that mapping.
        offset: offset of the bytes themselves.
    """

    segment: int
    segment_bytes: int
    offset: int


@dataclass
class _Segment:
    """One mapping of the owner; ``free`` lists (offset, bytes, when freed), sorted.

    ``large`` has the numbers of the pages that were asked to be large, as ``pages_of`` counts.
    """

    start: int
    view: memoryview
    address: int
    free: list[tuple[int, int, int]]
    large: set[int] = field(default_factory=set)


class Arena:
    """Hand out memory that other ranks can read, and take it back when nobody holds it.

    A block returns to the free list when the storage of its tensor is gone; touching free blocks
    are joined. The smallest free block that fits is used first.

    Args:
        file: the file that all ranks have open.
        start: file offset of this rank's part, a multiple of the page size.
        nbytes: size of the part.

    **Memory**: the file grows in steps of 32 MiB or of one block, whichever is more, and pages
    cost nothing until they are written. Of blocks of 4 MiB and more, what is written whole comes to
    lie on large pages when the block is used again, which costs no memory either. Freed blocks are
    kept for the next taker; blocks of 1 MiB and more that 512 later takers had no use for go back
    to the system, and so does everything free on ``trim()``.
    """

    def __init__(self, file: SharedFile, start: int, nbytes: int) -> None:
        self._file = file
        self._next = start
        self._stop = start + nbytes
        self._segments: list[_Segment] = []  # sorted by address
        self._refs: dict[tuple[int, int], weakref.ref[memoryview]] = {}
        self._freed: deque[tuple[int, int, int]] = deque()  # filled whenever a storage dies
        self._takes = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes in blocks that somebody holds."""
        self._collect()
        mapped = sum(segment.view.nbytes for segment in self._segments)
        return mapped - sum(n for segment in self._segments for _, n, _ in segment.free)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a block of ``numel > 0`` elements, aligned to a cache line.

        Raises:
            MemoryError: there is no memory left to share.
        """
        nbytes = numel * dtype.itemsize
        self._collect()
        self._takes += 1
        if self._takes % _SWEEP_TAKES == 0:
            self._sweep(self._takes - _KEEP_TAKES, _LARGE_BYTES)
        unit = PAGE if nbytes >= _LARGE_BYTES else _ALIGN
        room = round_up(nbytes, unit)
        fits = [
            (free[1], index, position)
            for index, segment in enumerate(self._segments)
            for position, free in enumerate(segment.free)
            if free[1] >= room
        ]
        if fits:
            _, index, position = min(fits)
            segment = self._segments[index]
        else:
            segment, position = self._grow(room), 0
        offset, length, tick = segment.free.pop(position)
        if length > room:
            segment.free.insert(position, (offset + room, length - room, tick))
        block = segment.view[offset : offset + nbytes]
        self._enlarge(segment, offset, nbytes)
        key = (segment.start, offset)
        freed = self._freed
        self._refs[key] = weakref.ref(block, lambda _: freed.append((*key, room)))
        return torch.frombuffer(block, dtype=dtype)  # its storage keeps this view

    def find(self, address: int) -> Place | None:
        """Return where an address of this process lies in the file; None where it does not."""
        segment = self._segment_at(address)
        if segment is None:
            return None
        offset = segment.start + address - segment.address
        return Place(segment.start, segment.view.nbytes, offset)

    def enlarge(self, address: int, nbytes: int) -> None:
        """Put bytes on large pages where they lie here and hold data, page by page. Local."""
        segment = self._segment_at(address)
        if segment is not None:
            self._enlarge(segment, address - segment.address, nbytes)

    def trim(self) -> None:
        """Return all free memory to the system. Local."""
        self._collect()
        self._sweep(self._takes, PAGE)

    def _segment_at(self, address: int) -> _Segment | None:
        index = bisect_right(self._segments, address, key=lambda segment: segment.address) - 1
        if index < 0:
            return None
        segment = self._segments[index]
        return segment if address < segment.address + segment.view.nbytes else None

    def _enlarge(self, segment: _Segment, offset: int, nbytes: int) -> None:
        if nbytes < _SPREAD_BYTES:
            return
        pages = []
        for page in pages_of(segment.view[offset : offset + nbytes], LARGE_PAGE):
            at = segment.start + page * LARGE_PAGE - segment.address
            if page not in segment.large and self._file.is_written(at, LARGE_PAGE):
                pages.append(page)
        segment.large.update(pages)
        for _, run in groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
            numbers = [page for _, page in run]
            low, high = numbers[0] * LARGE_PAGE, (numbers[-1] + 1) * LARGE_PAGE
            make_large(segment.view[low - segment.address : high - segment.address])

    def _grow(self, room: int) -> _Segment:
        least, unit = (0, PAGE) if self._file.named else (_SEGMENT_BYTES, LARGE_PAGE)
        nbytes = max(round_up(room, unit), least)
        if self._next + nbytes > self._stop:
            raise MemoryError(f"no shared memory left for {room} bytes")
        try:
            self._file.reserve(self._next, nbytes)
            view = self._file.map(self._next, nbytes)
        except OSError as error:
            raise MemoryError(f"no shared memory left for {room} bytes: {error}") from error
        segment = _Segment(self._next, view, address_of(view), [(0, nbytes, self._takes)])
        self._next += nbytes
        insort(self._segments, segment, key=lambda other: other.address)
        return segment

    def _collect(self) -> None:
        by_start = {segment.start: segment for segment in self._segments} if self._freed else {}
        while self._freed:
            start, offset, room = self._freed.popleft()
            del self._refs[start, offset]
            free = by_start[start].free
            position = bisect_right(free, (offset, 0, 0))
            joined = [(offset, room, self._takes)]
            if position < len(free) and free[position][0] == offset + room:
                joined.append(free.pop(position))
            if position and sum(free[position - 1][:2]) == offset:
                position -= 1
                joined.append(free.pop(position))
            # It is as old as the largest part that may be memory: little blocks come and go
            # beside large ones.
            tick = max(joined, key=lambda part: (part[2] >= 0, part[1]))[2]
            free.insert(position, (min(joined)[0], sum(part[1] for part in joined), tick))

    def _sweep(self, latest: int, least_bytes: int) -> None:
        """Give back blocks that were freed at or before a take; a tick of -1 says so."""
        if self._file.named:  # what was reserved there could not be had again for certain
            return
        for segment in self._segments:
            for position, (offset, length, tick) in enumerate(segment.free):
                if length >= least_bytes and 0 <= tick <= latest:
                    _give_back(segment, offset, length)
                    segment.free[position] = (offset, length, -1)


def _give_back(segment: _Segment, offset: int, nbytes: int) -> None:
    """Return memory to the system; pages that it was a part of are to be made large again."""
    give_back(segment.view[offset : offset + nbytes])
    first = segment.address + offset
    pages = range(first // LARGE_PAGE, (first + nbytes - 1) // LARGE_PAGE + 1)
    segment.large.difference_update(pages)
