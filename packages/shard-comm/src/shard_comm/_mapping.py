"""Mappings of a file in memory, and the pages below them."""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import lru_cache

PAGE = 4096
"""Bytes of a page; file offsets of mappings are multiples of it."""

LARGE_PAGE = 2 << 20
"""Bytes of a large page; where the machine's differ, it is asked for some in vain."""

_NONE, _READ_WRITE = 0, 3  # PROT_
_SHARED, _PRIVATE, _FIXED, _ANONYMOUS = 0x01, 0x02, 0x10, 0x20  # MAP_
_REMOVE, _DONTFORK, _COLLAPSE = 9, 10, 25  # MADV_


def round_up(nbytes: int, unit: int) -> int:
    """Return the least multiple of a unit that is no less. Local."""
    return -(-nbytes // unit) * unit


def map_file(fd: int, offset: int, nbytes: int) -> memoryview:
    """Return the bytes ``[offset, offset + nbytes)``, mapped until the last view is gone.

    Address and offset are equal modulo a large page, so that large pages of the file can be
    mapped whole. A forked child does not inherit the mapping: it would keep the memory alive.

    Raises:
        OSError: the system has no room for it.
    """
    length = round_up(nbytes, PAGE)
    base = _map(None, length + LARGE_PAGE, _NONE, _PRIVATE | _ANONYMOUS)
    before = (offset - base) % LARGE_PAGE
    address = base + before
    try:
        _map(address, nbytes, _READ_WRITE, _SHARED | _FIXED, fd, offset)
    except OSError:
        _libc().munmap(base, length + LARGE_PAGE)
        raise
    # What was taken to find such an address goes: mappings are counted, and so is their room.
    _libc().munmap(address + length, LARGE_PAGE - before)
    if before:
        _libc().munmap(base, before)
    _libc().madvise(address, nbytes, _DONTFORK)
    array = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(array, _unmap, address, nbytes, os.getpid()).atexit = False
    return memoryview(array).cast("B")


def address_of(view: memoryview) -> int:
    """Return where the bytes of a writable view lie in this process. Local."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view))


def pages_of(view: memoryview, page: int) -> range:
    """Return the pages that lie in a view whole, by number: their address over the size. Local."""
    address = address_of(view)
    return range(-(-address // page), (address + view.nbytes) // page)


def give_back(view: memoryview) -> None:
    """Return the whole pages of a view to the system; they read as zeros afterwards. Local."""
    pages = pages_of(view, PAGE)
    if pages:
        _libc().madvise(pages.start * PAGE, len(pages) * PAGE, _REMOVE)


def make_large(view: memoryview) -> None:
    """Put the whole large pages of a view on large pages, where the system has some. Local.

    A pass over them, such as a copy or a sum, is quicker than over small ones, and there are few
    faults to take. They keep what is in them, and are memory from now on, written or not.
    """
    pages = pages_of(view, LARGE_PAGE)
    if pages:
        start = pages.start * LARGE_PAGE
        for address in range(start, start + len(pages) * LARGE_PAGE, LARGE_PAGE):
            view[address - address_of(view)]  # what nobody touched is not made large
        _libc().madvise(start, len(pages) * LARGE_PAGE, _COLLAPSE)


def _map(
    at: int | None, nbytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0
) -> int:
    address = _libc().mmap(at, nbytes, protection, flags, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {nbytes} bytes: {os.strerror(code)}")
    return int(address)


def _unmap(address: int, nbytes: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has other things there
        _libc().munmap(address, nbytes)


@lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    return libc
