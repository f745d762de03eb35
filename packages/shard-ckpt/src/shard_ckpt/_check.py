"""Checking that files hold what the index says, before anything is taken from them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shard_ckpt._blocks import BLOCK_BYTES, Handle, block_range, read_exactly
from shard_ckpt._collector import collector_paused
from shard_ckpt._crc import crc32
from shard_ckpt._dtypes import header_shape
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import is_extras
from shard_ckpt._files import TENSOR_SUFFIX, entry_key, entry_shape
from shard_ckpt._header import Header, header_length, parse_header
from shard_ckpt._index import Index, TensorRecord
from shard_ckpt._marker import find_index
from shard_ckpt._match import Read
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._remote import RemoteFile, RemotePath

CHECK_BYTES = 512 << 10
"""How much is read at a time to be checked: little enough to stay in a core's cache."""

Intervals = dict[int, list[tuple[int, int]]]
"""Per file: sorted disjoint runs of blocks, first and last."""

_NAMES_SHOWN = 3


class Entry(NamedTuple):
    """What index or header say of one entry of a file; offset and size in bytes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Source:
    """A checkpoint to read from.

    Attributes:
        folder: where it lies.
        index: what it should hold.
        seen: which file was behind each name when it was first opened.
    """

    folder: Place
    index: Index
    seen: dict[int, tuple[object, ...]] = field(default_factory=dict)

    @cached_property
    def entries(self) -> Mapping[int, Sequence[tuple[TensorRecord, Entry]]]:
        """What the index says of each file's contents, ties included."""
        result: dict[int, list[tuple[TensorRecord, Entry]]] = {}
        for record in self.index.tensors.values():
            for part in record.ranges:
                key = entry_key(record.name, record.shape, part.runs)
                shape = header_shape(record.dtype, entry_shape(record.shape, part.runs))
                nbytes = part.numel * record.itemsize
                entry = Entry(key, record.dtype, shape, part.offset, nbytes)
                result.setdefault(part.file, []).append((record, entry))
        return result


@collector_paused()
def blocks_of(reads: Iterable[Read]) -> Intervals:
    """Return the blocks that reads touch, and each file's first, which holds the header. Local."""
    touched: dict[int, list[tuple[int, int]]] = {}
    for read in reads:
        runs = touched.setdefault(read.file, [(0, 0)])
        if read.nbytes:
            last = (read.offset + read.nbytes - 1) // BLOCK_BYTES
            runs.append((read.offset // BLOCK_BYTES, last))
    return {file: _merged(runs) for file, runs in touched.items()}


def own_blocks(needs: Sequence[Intervals], rank: int) -> dict[int, list[int]]:
    """Deal the blocks that ranks need to ranks that need them, each to exactly one.

    Of the blocks of a file that the same ranks need, each of these gets an equal run: of four
    blocks that ranks 0 and 2 need, rank 0 the first two, rank 2 the others.

    Args:
        needs: every rank's ``blocks_of``.
        rank: whose blocks to return.

    Returns:
        Per file, sorted block numbers.

    **Collective**: local; every rank computes the same dealing.
    """
    result = {}
    for file, runs in needs[rank].items():
        needers: dict[int, list[int]] = {
            block: [] for first, last in runs for block in range(first, last + 1)
        }
        for other, theirs in enumerate(needs):
            for first, last in theirs.get(file, ()):
                for block in range(first, last + 1):
                    if block in needers:
                        needers[block].append(other)
        alike: dict[tuple[int, ...], list[int]] = {}
        for block, others in sorted(needers.items()):
            alike.setdefault(tuple(others), []).append(block)
        mine = []
        for sharers, blocks in alike.items():
            # odd ones out go to another rank from file to file
            part, parts = (sharers.index(rank) + file) % len(sharers), len(sharers)
            mine += blocks[len(blocks) * part // parts : len(blocks) * (part + 1) // parts]
        if mine:
            result[file] = sorted(mine)
    return result


def check_blocks(source: Source, blocks: Mapping[int, Sequence[int]]) -> None:
    """Read blocks and hold them against the index; with a file's first block, its header. Local.

    Raises:
        CheckpointError: a file is missing, has another size, a block another checksum, or the
            header says something else than the index.

    **Memory**: 512 KiB; from object stores 32 MiB.
    """
    remote = isinstance(source.folder, RemotePath)  # where a request costs more than memory
    buffer = bytearray(BLOCK_BYTES if remote else CHECK_BYTES)
    for file, numbers in sorted(blocks.items()):
        with open_checked(source, file) as fd:
            for block in numbers:
                problem = block_problem(source, file, fd=fd, block=block, buffer=buffer)
                if problem is not None:
                    raise CheckpointError(problem)
            if numbers[0] == 0:
                check_header(source, file, fd=fd)


def open_source(path: str | os.PathLike[str] | RemotePath) -> Source:
    """Read marker and index of a checkpoint, wherever it lies. Local.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: marker or index are missing, altered or do not belong together.
    """
    return Source(*find_index(place_of(path)))


@contextmanager
def open_checked(source: Source, file: int) -> Iterator[Handle]:
    """Open a file for reading once its size is known to be right. Local.

    Raises:
        CheckpointError: it is missing, has another size, or is not the file of the first time.
    """
    record = source.index.files[file]
    path = source.folder / record.name
    try:
        if isinstance(path, RemotePath):
            fd: Handle = RemoteFile(path)
        else:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path}: missing, though the index lists it") from exc
    try:
        nbytes, identity = _size_and_identity(fd)
        if nbytes != record.nbytes:
            raise CheckpointError(
                f"{path}: expected {record.nbytes} bytes, got {nbytes}; truncated or replaced"
            )
        if source.seen.setdefault(file, identity) != identity:
            raise CheckpointError(f"{path}: changed while it was being read")
        yield fd
    finally:
        if isinstance(fd, int):
            os.close(fd)


def _size_and_identity(fd: Handle) -> tuple[int, tuple[object, ...]]:
    if isinstance(fd, RemoteFile):
        return fd.nbytes, fd.identity
    stat = os.fstat(fd)
    return stat.st_size, (stat.st_dev, stat.st_ino, stat.st_mtime_ns)


def block_problem(
    source: Source, file: int, *, fd: Handle, block: int, buffer: bytearray
) -> str | None:
    """Return what is wrong with one block of an open file; None if nothing is.

    The block passes through ``buffer``, of any size, piece by piece. Local.
    """
    record = source.index.files[file]
    low, high = block_range(block, record.nbytes)
    path = source.folder / record.name
    found = 0
    for at in range(low, high, len(buffer)):
        view = memoryview(buffer)[: min(len(buffer), high - at)]
        if not read_exactly(fd, [view], offset=at):
            return f"{path}: ends before byte {high}, expected {record.nbytes} bytes"
        found = crc32(view, found)
    if found == record.crcs[block]:
        return None
    return (
        f"{path}: bytes {low} to {high} are altered: expected CRC-32 {record.crcs[block]:08x}, got "
        f"{found:08x}; they hold {_holds(source, file, low, high)}"
    )


def check_header(source: Source, file: int, *, fd: Handle) -> None:
    """Hold an open file's header against the index. Local.

    Raises:
        CheckpointError: the header is not valid, from another save, or says something else.
    """
    index, record = source.index, source.index.files[file]
    label = str(source.folder / record.name)
    header = _read_header(fd, record.nbytes, label)
    save_id = header.metadata.get("save_id")
    if save_id != index.save_id:
        raise CheckpointError(f"{label}: from save {save_id}, expected {index.save_id}")
    stated = {
        Entry(e.key, e.dtype, e.shape, header.data_start + e.start, e.stop - e.start)
        for e in header.entries
    }
    listed = {entry for _, entry in source.entries.get(file, ())}
    places = {(entry.offset, entry.nbytes) for entry in stated}
    for entry in sorted(stated - listed):
        raise CheckpointError(f"{label}: {entry.key!r} is not in the index as the file states it")
    for entry in sorted(listed):
        if (entry.offset, entry.nbytes) not in places:
            raise CheckpointError(f"{label}: {entry.key!r} is in the index, but not in the file")


def strangers(source: Source) -> list[str]:
    """Return files that look like part of this checkpoint and are not in its index. Local."""
    listed = {file.name for file in source.index.files}
    names = sorted(set(names_in(source.folder)) - listed)
    return [name for name in names if name.endswith(TENSOR_SUFFIX) or is_extras(name)]


def _read_header(fd: Handle, file_bytes: int, label: str) -> Header:
    prefix = bytearray(min(8, file_bytes))
    if not read_exactly(fd, [memoryview(prefix)], offset=0):
        raise CheckpointError(f"{label}: ends within its first 8 bytes")
    text = bytearray(header_length(bytes(prefix), file_bytes=file_bytes, label=label))
    if not read_exactly(fd, [memoryview(text)], offset=8):
        raise CheckpointError(f"{label}: ends within its header")
    return parse_header(bytes(text), file_bytes=file_bytes, label=label)


def _holds(source: Source, file: int, low: int, high: int) -> str:
    names = [
        record.label
        for record, entry in source.entries.get(file, ())
        if entry.offset < high and entry.offset + entry.nbytes > low
    ]
    if low == 0 and source.index.files[file].name.endswith(TENSOR_SUFFIX):
        names.insert(0, "the header")
    shown = ", ".join(names[:_NAMES_SHOWN]) or "values that are not tensors"
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if result and first <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(last, result[-1][1]))
        else:
            result.append((first, last))
    return result
