"""Checksums of a file, each of so few bytes that little more is read than is needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shard_ckpt._crc import append_zeros, crc32

GRAIN_BYTES = 256 << 10
"""A checksum stands for this many bytes of a file; the last grain may be shorter."""

_CRC_BYTES = 4

Spans = list[tuple[int, int]]
"""Sorted disjoint runs of grains: the first, and one past the last."""


class FileRecord(NamedTuple):
    """What the index says of a file.

    Attributes:
        name: within the checkpoint's folder.
        nbytes: its size.
        crcs: CRC-32 of each grain, four bytes each, most significant first.
    """

    name: str
    nbytes: int
    crcs: bytes

    def crc(self, first: int, stop: int) -> int:
        """Return the CRC-32 of grains ``[first, stop)`` taken together. Local."""
        result = 0
        for grain in range(first, stop):
            low, high = span_bytes(grain, grain + 1, self.nbytes)
            at = grain * _CRC_BYTES
            own = int.from_bytes(self.crcs[at : at + _CRC_BYTES], "big")
            result = append_zeros(result, high - low) ^ own
        return result


class GrainSums:
    """Checksums the grains of a file whose bytes come in any pieces."""

    def __init__(self) -> None:
        self._sums = bytearray()
        self._crc = 0
        self._room = GRAIN_BYTES

    def feed(self, view: memoryview) -> None:
        """Take the next bytes. Local."""
        at = 0
        while at < len(view):
            part = view[at : at + self._room]
            at += len(part)
            self._crc = crc32(part, self._crc)
            self._room -= len(part)
            if self._room == 0:
                self._end_grain()

    def finish(self) -> bytes:
        """Return the checksums of everything fed, as ``FileRecord`` has them. Local."""
        if self._room < GRAIN_BYTES:
            self._end_grain()
        return bytes(self._sums)

    def _end_grain(self) -> None:
        self._sums += self._crc.to_bytes(_CRC_BYTES, "big")
        self._crc = 0
        self._room = GRAIN_BYTES


def sums_of(data: bytes) -> bytes:
    """Return the checksums of a file with these contents. Local."""
    sums = GrainSums()
    sums.feed(memoryview(data))
    return sums.finish()


def grain_count(nbytes: int) -> int:
    """Return how many grains a file of this size has. Local."""
    return -(-nbytes // GRAIN_BYTES)


def span_bytes(first: int, stop: int, nbytes: int) -> tuple[int, int]:
    """Return where grains ``[first, stop)`` of a file of this size begin and end. Local."""
    return first * GRAIN_BYTES, min(stop * GRAIN_BYTES, nbytes)


def grains_in(low: int, high: int) -> tuple[int, int]:
    """Return the run of grains that bytes ``[low, high)`` of a file touch. Local."""
    return low // GRAIN_BYTES, grain_count(high)


def merged(runs: Iterable[tuple[int, int]]) -> Spans:
    """Sort runs and join those that meet or overlap. Local."""
    result: Spans = []
    for first, stop in sorted(runs):
        if result and first <= result[-1][1]:
            result[-1] = (result[-1][0], max(stop, result[-1][1]))
        else:
            result.append((first, stop))
    return result


def cut_runs(runs: Spans, *, low: int, high: int) -> Spans:
    """Return what is left of runs without the grains before the ``low``-th and from ``high`` on.

    Of ``[0, 2) [5, 9)``, the grains counted 1 and 2 are ``[1, 2) [5, 6)``.
    """
    result: Spans = []
    at = 0
    for first, stop in runs:
        begin, end = max(low - at, 0), min(high - at, stop - first)
        if begin < end:
            result.append((first + begin, first + end))
        at += stop - first
    return result
