"""What the system is told of a file's bytes before they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shard_ckpt import _posix
from shard_ckpt._blocks import BLOCK_BYTES, Handle
from shard_ckpt._grains import GRAIN_BYTES, Spans, grain_count, span_bytes

_PIECE_GRAINS = BLOCK_BYTES // GRAIN_BYTES
_TAIL_GRAINS = 2 * _PIECE_GRAINS


class _Piece(NamedTuple):
    """Grains ``[first, stop)``; exact if nothing after the run they are in may be read."""

    first: int
    stop: int
    exact: bool


def pieces_in(runs: Spans, *, fd: Handle, file_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield runs of grains in pieces of at most 16 MiB, each to be read before the next. Local.

    The system reads ahead as it sees fit, but for the last 32 MiB of a run that ends before the
    file does. Left to itself it takes memory in large parts, from which bytes are copied at up to
    twice the speed, now and when they are wanted again. Near the end it would read what nobody
    asks for. There it is told not to, and all that is left of the run is asked for at once: where
    Linux meets what it has for the length of a window, it stops reading ahead. So nothing else is
    read as long as its windows are of 8 MiB at most; few systems have larger ones.

    Args:
        runs: grains of an open file.
        fd: the file.
        file_bytes: its size.
    """
    pieces = list(_cut(runs, grain_count(file_bytes)))
    exact: bool | None = None
    asked = 0  # pieces before this one need not be asked for
    for at, piece in enumerate(pieces):
        if isinstance(fd, int):
            if exact is not piece.exact:
                exact = piece.exact
                (_posix.read_no_further if exact else _posix.read_ahead)(fd)
            if exact:
                for soon in pieces[max(at, asked) : at + 2]:
                    if soon.exact:
                        low, high = span_bytes(soon.first, soon.stop, file_bytes)
                        _posix.fetch(fd, low, high - low)
                asked = at + 2
        yield piece.first, piece.stop


def _cut(runs: Spans, end: int) -> Iterator[_Piece]:
    for first, stop in runs:
        tail = stop if stop == end else max(first, stop - _TAIL_GRAINS)
        for begin, until, exact in ((first, tail, False), (tail, stop, True)):
            for at in range(begin, until, _PIECE_GRAINS):
                yield _Piece(at, min(at + _PIECE_GRAINS, until), exact)
