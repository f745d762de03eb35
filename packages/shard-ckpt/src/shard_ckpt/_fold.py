"""CRC-32 of bytes on their way through a window of memory, folded before it is computed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch

from shard_ckpt._crc import crc32, implementation
from shard_ckpt._memory import bytes_of

WINDOW_BYTES = 1 << 20
"""How much passes through at a time: little enough to stay in a core's cache."""

NEAR, FAR = 199_844, 366_556
"""A byte may be added to the bytes these distances further on, and then be forgotten."""

_SPAN_BYTES = 131_064  # below the size from which torch would spread the work over threads
_ZERO = 0xFFFFFFFF  # what zlib takes for a register of zeros
_WORD = torch.int32


class Folding:
    """Checksums bytes at the speed of XOR; what comes out is CRC-32 to the bit.

    CRC-32 is the remainder of a polynomial over GF(2). Modulo its generator, with x of degree 1,

        x^(8 * 366556) = x^(8 * 166712) + 1

    so a byte of value v at place 0 counts as much as v at place 199844 and v at place 366556
    together: a message of zeros but for the same byte at these three places has the checksum of
    zeros alone. Whatever leaves the window is therefore XORed into what came 199844 and 366556
    bytes later, in runs of thousands of bytes at once, and only the end goes through zlib.

    Put up to ``window_bytes`` into ``view``, use them, ``absorb`` them, and so on. There are two
    windows, which take turns: one is filled, then what was in the other is folded into it. Where
    zlib-ng is installed, which is faster still, it gets every window as it is.

    Args:
        window_bytes: room for how much at a time; a multiple of 64, and ``FAR`` at least.

    **Memory**: both windows.
    **Source**: S. Russell, "Chorba: A novel CRC32 implementation", 2024, which folds 64-bit words
    in registers; here with distances that are multiples of 4 bytes and far apart.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._size = window_bytes
        self._both = torch.empty(2 * window_bytes, dtype=torch.uint8, device="cpu")
        self._tensors = (self._both[:window_bytes], self._both[window_bytes:])
        self._views = [bytes_of(tensor) for tensor in self._tensors]
        self._folds = implementation() is zlib.crc32
        self._steps = [list(self._fold(half)) for half in (0, 1)]
        self.restart()

    @property
    def tensor(self) -> torch.Tensor:
        """Where the next bytes go: uint8 ``[window_bytes]``, aligned for every dtype."""
        return self._tensors[self._turn]

    @property
    def view(self) -> memoryview:
        """The same memory."""
        return self._views[self._turn]

    def restart(self) -> None:
        """Forget everything. Local."""
        self._turn = 0
        self._start = 0
        self._rest: list[memoryview] = []
        self._ended = False

    def absorb(self, nbytes: int) -> None:
        """Take the first ``nbytes`` of the window; less than a whole one only at the end. Local."""
        if self._ended:
            raise AssertionError("bytes after the last ones")
        self._ended = nbytes < self._size
        if not self._folds:
            self._start = crc32(self.view[:nbytes], self._start)
            return
        if self._rest and nbytes >= FAR:
            if self._start != _ZERO:  # the same as beginning with a register of ones
                head = self._rest[0]
                head[:4] = bytes(byte ^ 0xFF for byte in head[:4])
                self._start = _ZERO
            for target, source in self._steps[1 - self._turn]:
                target.bitwise_xor_(source)
            self._rest = []
        self._rest.append(self.view[:nbytes])
        self._turn = 1 - self._turn

    def value(self) -> int:
        """Return the CRC-32 of everything since ``restart``. Local."""
        result = self._start
        for part in self._rest:
            result = crc32(part, result)
        return result

    def _fold(self, half: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what to XOR with what, in order, to fold a window into the one after it."""
        words, total = self._both.view(_WORD), 2 * self._size
        at, end = half * self._size, (half + 1) * self._size
        while at < end:
            places = [(at + distance) % total for distance in (NEAR, FAR)]
            nbytes = min(_SPAN_BYTES, end - at, *(total - place for place in places))
            for place in places:
                yield _part(words, place, nbytes), _part(words, at, nbytes)
            at += nbytes


def _part(words: torch.Tensor, at: int, nbytes: int) -> torch.Tensor:
    return words[at // _WORD.itemsize : (at + nbytes) // _WORD.itemsize]
