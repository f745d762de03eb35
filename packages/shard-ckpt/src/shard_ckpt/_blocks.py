"""Files as runs of blocks, which are written and read in one call each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shard_ckpt import _posix
from shard_ckpt._behind import Behind
from shard_ckpt._grains import FileRecord, GrainSums
from shard_ckpt._places import Place
from shard_ckpt._remote import RemoteFile, RemotePath, RemoteSink

BLOCK_BYTES = 16 << 20
"""This much of a file is written in one call, or asked of a store; the last may be shorter."""

_MAX_VIEWS = 512  # below every system's limit on views in one call


Handle = int | RemoteFile
"""A file opened for reading: a descriptor of this system, or a key of an object store."""


class BlockWriter:
    """Writes a new file in block-sized calls and checksums the bytes before they go out.

    A whole block is written on a thread of its own while the next one is checksummed.

    Args:
        path: a file that must not exist.

    Raises:
        OSError: from any method, with the file's name.

    **Memory**: no copies; what was fed is held until it is written, two blocks later at most.
    """

    def __init__(self, path: Place) -> None:
        self._path = path
        self._sink = RemoteSink(path) if isinstance(path, RemotePath) else _FileSink(path)
        self._open = True
        self._writing: Behind[None] | None = None
        self._pending: list[memoryview] = []
        self._owners: list[object] = []
        self._room = BLOCK_BYTES
        self._sums = GrainSums()
        self._nbytes = 0

    def feed(self, view: memoryview, *, owner: object = None) -> None:
        """Take the next bytes, which must not change before they are written. Local.

        Args:
            view: the bytes.
            owner: what to keep alive for as long.
        """
        self._owners.append(owner)
        at = 0
        while at < len(view):
            part = view[at : at + self._room]
            at += len(part)
            self._sums.feed(part)
            self._pending.append(part)
            self._room -= len(part)
            self._nbytes += len(part)
            if self._room == 0:
                self._end_block()
        if len(self._pending) >= _MAX_VIEWS:
            self.flush()

    def flush(self) -> None:
        """Return when the system has everything fed so far. Local."""
        self._await_block()
        views, self._pending = self._pending, []
        self._write(views)
        self._owners = []

    def finish(self) -> FileRecord:
        """Make the file durable and close it. Local."""
        self.flush()
        return self._seal()

    def finish_behind(self) -> Behind[FileRecord]:
        """Hand everything to the system and make it durable while the caller goes on. Local."""
        self.flush()
        return Behind(self._seal)

    def abandon(self) -> None:
        """Close without making durable; nothing happens after ``finish``. Local."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._open:
            self._open = False
            self._sink.abandon()
        self._pending, self._owners = [], []

    def _seal(self) -> FileRecord:
        self._check_open()
        try:
            self._sink.seal()
        except OSError as exc:
            self.abandon()
            raise self._named(exc) from exc
        self._open = False
        return FileRecord(self._path.name, self._nbytes, self._sums.finish())

    def _write(self, views: list[memoryview]) -> None:
        self._check_open()
        while views:
            try:
                done = self._sink.write(views)
            except OSError as exc:
                raise self._named(exc) from exc
            views = _after(views, done)

    def _write_behind(self) -> None:
        """Start writing what is pending, once the block before it is written."""
        self._await_block()
        views, self._pending = self._pending, []
        owners, self._owners = self._owners, self._owners[-1:]  # the last may go on

        def write() -> None:
            self._write(views)
            owners.clear()

        self._writing = Behind(write)

    def _await_block(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _check_open(self) -> None:
        if not self._open:
            raise AssertionError(f"{self._path}: written to after it was closed")

    def _end_block(self) -> None:
        self._room = BLOCK_BYTES
        self._write_behind()

    def _named(self, exc: OSError) -> OSError:
        return OSError(exc.errno, exc.strerror, str(self._path))


class _FileSink:
    """A new file of this system."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = _posix.create(path)

    def write(self, views: Sequence[memoryview]) -> int:
        return _posix.write(self._held(), views)

    def seal(self) -> None:
        fd = self._held()
        _posix.fsync(fd)
        self._fd = None
        _posix.close(fd)

    def abandon(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def _held(self) -> int:
        if self._fd is None:
            raise AssertionError("a file was used after it was closed")
        return self._fd


def write_file(path: Place, data: bytes) -> FileRecord:
    """Write a small file and make it durable. Local.

    Raises:
        OSError: it exists, or writing failed.
    """
    writer = BlockWriter(path)
    try:
        writer.feed(memoryview(data))
        return writer.finish()
    finally:
        writer.abandon()


def block_count(nbytes: int) -> int:
    """Return how many blocks a file of this size has. Local."""
    return -(-nbytes // BLOCK_BYTES)


def block_range(block: int, nbytes: int) -> tuple[int, int]:
    """Return where a block of a file of this size begins and ends. Local."""
    return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, nbytes)


def read_exactly(fd: Handle, views: Sequence[memoryview], *, offset: int) -> bool:
    """Fill views from ``offset`` on; False where the file ends before. Local."""
    rest = list(views)
    while rest:
        if isinstance(fd, RemoteFile):
            got = fd.read_into(rest, offset)
        else:
            got = _posix.read_into(fd, rest[:_MAX_VIEWS], offset)
        if got == 0:
            return False
        offset += got
        rest = _after(rest, got)
    return True


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of ``views`` after their first ``done`` bytes."""
    for at, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[at + 1 :]]
        done -= len(view)
    return []
