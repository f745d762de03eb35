"""The operating-system calls by which a checkpoint comes to be, and to an end.

Everything that must be durable or must not be half done goes through this table, so that tests
can fail, or end the process, at any one of them. Call them through the module.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_FETCH_BYTES = 128 << 10  # of larger requests Linux may leave out what exceeds its read-ahead

_allocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
if _allocate is not None:
    _allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def create(path: Path) -> int:
    """Open a file for writing that must not exist; mode ``0666 & ~umask``."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write(fd: int, views: Sequence[memoryview]) -> int:
    """Write views one after another; return how many bytes went out, perhaps not all."""
    return os.writev(fd, views)


def open_to_write(path: Path) -> int:
    """Open a file that exists for writing at offsets."""
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def resize(fd: int, nbytes: int) -> None:
    """Give an open file its size, and its space too where the file system can promise it.

    What was not written reads as zeros. The system's own call, and not ``os.posix_fallocate``: that
    one writes to every page where the file system cannot.
    """
    os.ftruncate(fd, nbytes)
    if nbytes and _allocate is not None and _allocate(fd, 0, 0, nbytes) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def write_at(fd: int, view: memoryview, offset: int) -> int:
    """Write a view at ``offset``; return how many bytes went out, perhaps not all."""
    return os.pwrite(fd, view, offset)


def fsync(fd: int) -> None:
    """Return when the file's data and size are durable."""
    os.fsync(fd)


def close(fd: int) -> None:
    """Close; some file systems report a failed write only here."""
    os.close(fd)


def sync_folder(path: Path) -> None:
    """Return when the folder's entries are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder that must not exist."""
    os.mkdir(path)


def rename(source: Path, target: Path) -> None:
    """Rename a folder; a target that is a file or a folder with content is an error."""
    os.rename(source, target)


def unlink(path: Path) -> None:
    """Remove one file."""
    os.unlink(path)


def read_no_further(fd: int) -> None:
    """Ask the system to read from storage what is asked for, and nothing beyond it."""
    with suppress(OSError):  # only advice
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def read_ahead(fd: int) -> None:
    """Let the system read ahead of what is asked for, as it does where it is told nothing."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)


def fetch(fd: int, offset: int, nbytes: int) -> None:
    """Have the system begin to read bytes from storage that will be asked for soon."""
    with suppress(OSError):
        for at in range(offset, offset + nbytes, _FETCH_BYTES):
            part = min(_FETCH_BYTES, offset + nbytes - at)
            os.posix_fadvise(fd, at, part, os.POSIX_FADV_WILLNEED)


def read_into(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Read at ``offset`` into views one after another; return how many bytes came, maybe fewer."""
    return os.preadv(fd, views, offset)
