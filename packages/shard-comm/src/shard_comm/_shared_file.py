"""One file of memory that every rank of a host has open."""

from __future__ import annotations

import os
import secrets
import stat
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shard_comm._mapping import map_file

_MEMORY_FIRST = (False, True)  # named or not
_TOKEN_BYTES = 16
_FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid

T = TypeVar("T")
Exchange = Callable[[Any], "list[Any]"]
"""Collective: give one object, get every rank's, in rank order."""


class NoSharedMemoryError(RuntimeError):
    """The ranks found no memory that all of them can open. Every rank raises it."""


class SharedFile:
    """An open file without a name: it is gone when the last process lets go of it.

    Args:
        fd: the file's descriptor; it belongs to this object.
        named: the file came from a file system of limited size, so that pages are reserved
            before they are touched.
    """

    def __init__(self, fd: int, *, named: bool) -> None:
        self.fd = fd
        self.named = named

    def close(self) -> None:
        """Close the descriptor; mappings stay. Local."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Make sure that touching ``[offset, offset + nbytes)`` cannot fail.

        Raises:
            OSError: the file system is full.
        """
        if self.named:
            os.posix_fallocate(self.fd, offset, nbytes)

    def is_written(self, offset: int, nbytes: int) -> bool:
        """Whether all pages of ``[offset, offset + nbytes)`` hold data, so that they are memory."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_HOLE) >= offset + nbytes
        except OSError:  # the system does not say
            return False

    def map(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes ``[offset, offset + nbytes)``, mapped until the last view is gone."""
        return map_file(self.fd, offset, nbytes)

    def mark_alive(self, rank: int) -> None:
        """Say that this process is ``rank``, until it closes the file or dies however it may."""
        import fcntl  # not on every system that this module is imported on

        fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def claim(self, byte: int) -> bool:
        """Take a byte past the ranks' ones for good, unless another process holds it."""
        import fcntl

        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # as the system has it
            return False
        return True

    def is_alive(self, rank: int) -> bool:
        """Whether the process of another rank has the file open still.

        Record locks answer for zombies, for other pid namespaces and for pids used again, and
        a forked child does not inherit them.
        """
        import fcntl

        asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, rank, 1, 0)
        kind = struct.unpack(_FLOCK, fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)


def host_name(declared: str | None = None) -> str:
    """Return what two processes have in common exactly when they count as on one host.

    That is when they share a running kernel, and nothing declares them to be apart.

    Args:
        declared: a name that sets ranks of one machine apart; by default that of the environment
            variable ``SHARD_HOST``, if it is set. It never brings ranks of two machines together.
    """
    if declared is None:
        declared = os.environ.get("SHARD_HOST", "")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = f"unknown host of process {os.getpid()} {secrets.token_hex(8)}"
    return f"{declared} {boot}"


def share_file(
    exchange: Exchange,
    rank: int,
    nbytes: int,
    *,
    prepare: Callable[[SharedFile], T],
    named: bool | None = None,
    numbers: Sequence[int] | None = None,
) -> T:
    """Open one new file of ``nbytes`` on every rank and do with it what ``prepare`` does.

    The file has no name: rank 0 makes it with memfd_create and the others open it through
    rank 0's entry in /proc. Where that fails (another pid namespace, ptrace restrictions) it is
    a file in /dev/shm, which loses its name as soon as all have opened it. Pages cost memory
    once they are written.

    Args:
        exchange: gathers an object of each rank.
        rank: this rank; rank 0 makes the file.
        nbytes: size of the file. Its first page is taken.
        prepare: what each rank does with the file before the ranks agree that it serves. It
            keeps the file, or closes it.
        named: True and False ask for one of the two ways only.
        numbers: what messages call the ranks, if not by their place.

    Returns:
        What ``prepare`` returned.

    Raises:
        NoSharedMemoryError: some rank could not open or prepare the file, whichever way. All
            ranks raise.

    **Collective**: two exchanges for each way.
    """
    reasons: list[str] = []
    for way in _MEMORY_FIRST if named is None else (named,):
        result, problem = _share(exchange, rank, nbytes, prepare=prepare, named=way)
        if result is not None:
            return result
        culprit, error = problem
        reasons.append(f"rank {culprit if numbers is None else numbers[culprit]}: {error}")
    raise NoSharedMemoryError(f"the ranks cannot open memory of one another: {'; '.join(reasons)}")


def _share(
    exchange: Exchange,
    rank: int,
    nbytes: int,
    *,
    prepare: Callable[[SharedFile], T],
    named: bool,
) -> tuple[T | None, tuple[int, str]]:
    """Return the result, or None and which rank was kept from it by what."""
    file: SharedFile | None = None
    result: T | None = None
    path, token, error = "", b"", ""
    problems = [(rank, "interrupted")]
    try:
        if rank == 0:
            try:
                file, path, token = _create(nbytes, named=named)
                result = prepare(file)
            except (OSError, AttributeError) as problem:
                error = str(problem)
        path, token, failed = exchange((path, token, error))[0]
        if rank != 0 and not failed:
            try:
                file = _open(path, token, named=named)
                result = prepare(file)
            except OSError as problem:
                error = str(problem)
        verdicts = exchange(error)
        problems = [(r, verdict) for r, verdict in enumerate(verdicts) if verdict]
    finally:
        if rank == 0 and named and path:
            Path(path).unlink(missing_ok=True)
        if problems and file is not None:
            file.close()
    return (None, problems[0]) if problems else (result, (rank, ""))


def _create(nbytes: int, *, named: bool) -> tuple[SharedFile, str, bytes]:
    token = secrets.token_bytes(_TOKEN_BYTES)
    if named:
        path = f"/dev/shm/shard-comm-{token.hex()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    else:
        fd = os.memfd_create("shard-comm", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{fd}"
    try:
        os.ftruncate(fd, nbytes)
        os.pwrite(fd, token, 0)
    except OSError:
        os.close(fd)
        if named:
            Path(path).unlink()
        raise
    return SharedFile(fd, named=named), path, token


def _open(path: str, token: bytes, *, named: bool) -> SharedFile:
    if not stat.S_ISREG(os.stat(path).st_mode):  # in another pid namespace it is anything
        raise OSError(f"{path} is not the file that rank 0 made")
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    if os.pread(fd, _TOKEN_BYTES, 0) != token:
        os.close(fd)
        raise OSError(f"{path} is not the file that rank 0 made")
    return SharedFile(fd, named=named)
