"""CRC-32 by the fastest implementation at hand; all give the same numbers."""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable
from functools import cache, lru_cache

_GENERATOR = 0xEDB88320  # bits reflected, as in all of CRC-32's registers
_ONE = 0x80000000  # the polynomial 1

Buffer = bytes | bytearray | memoryview


def crc32(data: Buffer, value: int = 0) -> int:
    """Return the CRC-32 of ``data``, or go on from that of what came before it. Local.

    Args:
        data: bytes.
        value: the checksum so far.
    """
    return implementation()(data, value)


@cache
def implementation() -> Callable[[Buffer, int], int]:
    """Return zlib-ng's function where it is installed, several times as fast as zlib's. Local."""
    try:
        module = importlib.import_module("zlib_ng.zlib_ng")
    except ImportError:
        return zlib.crc32
    fast: Callable[[Buffer, int], int] = module.crc32
    return fast


def append_zeros(crc: int, nbytes: int) -> int:
    """Return what a checksum counts for once ``nbytes`` more bytes have followed. Local.

    The checksum of two strings, one after the other, is that of the first, moved so, XORed with
    that of the second::

        crc32(b"123456789") == append_zeros(crc32(b"12345"), 4) ^ crc32(b"6789")
    """
    tables = _shift_tables(nbytes)
    return (
        tables[0][crc & 0xFF]
        ^ tables[1][crc >> 8 & 0xFF]
        ^ tables[2][crc >> 16 & 0xFF]
        ^ tables[3][crc >> 24]
    )


@lru_cache(maxsize=16)
def _shift_tables(nbytes: int) -> list[list[int]]:
    """Return the product of every byte, at each of four places, with x^(8 * nbytes)."""
    factor, square = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            factor = _multiply(factor, square)
        square = _multiply(square, square)
        nbytes >>= 1
    bits = [_multiply(1 << bit, factor) for bit in range(32)]
    tables = []
    for place in range(4):
        table = [0]
        for bit in range(8):
            table += [entry ^ bits[8 * place + bit] for entry in table]
        tables.append(table)
    return tables


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the generator."""
    result = 0
    while a:
        if a & _ONE:
            result ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_GENERATOR if b & 1 else 0)
    return result
