"""CRC-32 of bytes on their way through a window of memory, folded before it is computed."""

from __future__ import annotations

import torch

from shard_ckpt._crc import crc32
from shard_ckpt._memory import bytes_of

WINDOW_BYTES = 512 << 10
"""How much passes through at a time: little enough to stay in a core's cache."""

NEAR, FAR = 199_844, 366_556
"""A byte may be added to the bytes these distances further on, and then be forgotten."""

_SPAN = 131_064  # below NEAR, and below the size from which torch would spread it over threads
_PREFIX = bytes.fromhex("62f52692")  # turns a register of zeros into CRC-32's initial one
_PAD = -FAR % 64  # so that the window is aligned for every dtype
_ZERO = 0xFFFFFFFF  # what zlib takes for a register of zeros


class Folding:
    """Checksums bytes at the speed of XOR; what comes out is CRC-32 to the bit.

    CRC-32 is the remainder of a polynomial over GF(2). Modulo its generator, with x of degree 1,

        x^(8 * 366556) = x^(8 * 166712) + 1

    so a byte of value v at place 0 counts as much as v at place 199844 and v at place 366556
    together: a message of zeros but for the same byte at these three places has the checksum of
    zeros alone. Whatever leaves the window is therefore XORed into what comes 199844 and 366556
    bytes later, in runs of thousands of bytes at once, and only the last 358 KiB go through zlib.

    Put up to ``WINDOW_BYTES`` into ``view``, use them, ``absorb`` them, and so on; what was
    absorbed is overwritten.

    Args:
        window_bytes: room for how much at a time; a multiple of 4.

    **Memory**: the window and 358 KiB.
    **Source**: S. Russell, "Chorba: A novel CRC32 implementation", 2024, which folds 64-bit words
    in registers; here with distances that are multiples of 4 bytes and far apart.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        words = torch.empty((_PAD + FAR + window_bytes) // 4, dtype=torch.int32, device="cpu")
        self._words = words[_PAD // 4 :]
        self._bytes = bytes_of(self._words)
        self._steps = [
            (self._part(at + distance, nbytes), self._part(at, nbytes))
            for at in range(0, window_bytes, _SPAN)
            for nbytes in [min(_SPAN, window_bytes - at)]
            for distance in (NEAR, FAR)
        ]
        self.view = self._bytes[FAR:]
        self.tensor = self._words[FAR // 4 :].view(torch.uint8)
        self._used = FAR
        self.restart()

    def restart(self) -> None:
        """Forget everything. Local."""
        self._words[: FAR // 4].zero_()
        self._bytes[FAR - len(_PREFIX) : FAR] = _PREFIX
        self._used = FAR

    def absorb(self, nbytes: int) -> None:
        """Take the first ``nbytes`` of the window; less than a whole one only at the end. Local."""
        if self._used != FAR:
            raise AssertionError("bytes after the last ones")
        if nbytes < len(self.view):
            self._used += nbytes
            return
        for target, source in self._steps:
            target.bitwise_xor_(source)
        self._bytes[:FAR] = bytes(self._bytes[len(self.view) :])

    def value(self) -> int:
        """Return the CRC-32 of everything since ``restart``. Local."""
        return crc32(self._bytes[: self._used], _ZERO)

    def _part(self, at: int, nbytes: int) -> torch.Tensor:
        return self._words[at // 4 : (at + nbytes) // 4]
