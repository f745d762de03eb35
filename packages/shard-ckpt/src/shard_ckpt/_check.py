"""Checking that files hold what the index says, before anything is taken from them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shard_ckpt import _posix
from shard_ckpt._ahead import pieces_in
from shard_ckpt._blocks import BLOCK_BYTES, Handle, read_exactly
from shard_ckpt._dtypes import header_shape
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import is_extras
from shard_ckpt._files import TENSOR_SUFFIX, entry_key, entry_shape
from shard_ckpt._fold import WINDOW_BYTES, Folding
from shard_ckpt._grains import Spans, span_bytes
from shard_ckpt._header import Header, header_length, parse_header
from shard_ckpt._index import Index, TensorRecord
from shard_ckpt._marker import find_index
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._progress import Progress
from shard_ckpt._remote import RemoteFile, RemotePath

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

    def data_start(self, file: int) -> int:
        """Return how many bytes of a file its header has; all of them if it holds no tensors."""
        offsets = (entry.offset for _, entry in self.entries.get(file, ()))
        return min(offsets, default=self.index.files[file].nbytes)


def check_grains(
    source: Source, grains: Mapping[int, Spans], *, progress: Progress | None = None
) -> None:
    """Read grains and hold them against the index; with a file's first, its header. Local.

    Raises:
        CheckpointError: a file is missing, has another size, a grain another checksum, or the
            header says something else than the index.

    **Memory**: 2 MiB; from object stores 32 MiB.
    """
    folding = folding_for(source)
    for file, runs in sorted(grains.items()):
        with open_checked(source, file) as fd:
            for problem in problems_in(
                source, file, fd=fd, runs=runs, folding=folding, progress=progress
            ):
                raise CheckpointError(problem)
            if runs[0][0] == 0:
                check_header(source, file, fd=fd)


def folding_for(source: Source, *, window_bytes: int = WINDOW_BYTES) -> Folding:
    """Return what bytes of a checkpoint can pass through: more where requests are dear. Local."""
    return Folding(BLOCK_BYTES if isinstance(source.folder, RemotePath) else window_bytes)


def problems_in(
    source: Source,
    file: int,
    *,
    fd: Handle,
    runs: Spans,
    folding: Folding,
    progress: Progress | None = None,
) -> Iterator[str]:
    """Yield what is wrong with grains of an open file, at most one text per 16 MiB. Local."""
    file_bytes = source.index.files[file].nbytes
    for piece in pieces_in(runs, fd=fd, file_bytes=file_bytes):
        problem = _piece_problem(source, file, fd, piece, folding)
        if problem is not None:
            yield problem
        if progress is not None:
            low, high = span_bytes(*piece, file_bytes)
            progress.advance(high - low)


def open_source(path: str | os.PathLike[str] | RemotePath) -> Source:
    """Read marker and index of a checkpoint, wherever it lies. Local.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: marker or index are missing, altered or do not belong together.
    """
    return Source(*find_index(place_of(path)))


@contextmanager
def open_checked(source: Source, file: int, *, exact: bool = False) -> Iterator[Handle]:
    """Open a file for reading once its size is known to be right. Local.

    Args:
        source: the checkpoint.
        file: which.
        exact: nothing beyond what is asked for should be read from storage.

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
        if exact and isinstance(fd, int):
            _posix.read_no_further(fd)
        yield fd
    finally:
        if isinstance(fd, int):
            os.close(fd)


def _size_and_identity(fd: Handle) -> tuple[int, tuple[object, ...]]:
    if isinstance(fd, RemoteFile):
        return fd.nbytes, fd.identity
    stat = os.fstat(fd)
    return stat.st_size, (stat.st_dev, stat.st_ino, stat.st_mtime_ns)


def _piece_problem(
    source: Source, file: int, fd: Handle, piece: tuple[int, int], folding: Folding
) -> str | None:
    record = source.index.files[file]
    found = _crc_of(source, file, fd, piece, folding)
    if found == record.crc(*piece):
        return None
    return altered(source, file, fd=fd, piece=piece)


def altered(source: Source, file: int, *, fd: Handle, piece: tuple[int, int]) -> str:
    """Say which of some grains are not what the index says, and what they hold. Local."""
    record = source.index.files[file]
    path = source.folder / record.name
    folding = Folding()
    wrong = [
        grain
        for grain in range(*piece)
        if _crc_of(source, file, fd, (grain, grain + 1), folding) != record.crc(grain, grain + 1)
    ]
    if not wrong:
        return f"{path}: changed while it was being read"
    first, stop = wrong[0], wrong[-1] + 1
    low, high = span_bytes(first, stop, record.nbytes)
    found = _crc_of(source, file, fd, (first, stop), folding)
    if found is None:
        return f"{path}: ends before byte {high}, expected {record.nbytes} bytes"
    return (
        f"{path}: bytes {low} to {high} are altered: expected CRC-32 {record.crc(first, stop):08x},"
        f" got {found:08x}; they hold {_holds(source, file, low, high)}"
    )


def _crc_of(
    source: Source, file: int, fd: Handle, piece: tuple[int, int], folding: Folding
) -> int | None:
    """Return the checksum of grains as they are; None where the file ends before."""
    low, high = span_bytes(*piece, source.index.files[file].nbytes)
    folding.restart()
    for at in range(low, high, len(folding.view)):
        view = folding.view[: high - at]
        if not read_exactly(fd, [view], offset=at):
            return None
        folding.absorb(len(view))
    return folding.value()


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
    if low < source.data_start(file) and source.index.files[file].name.endswith(TENSOR_SUFFIX):
        names.insert(0, "the header")
    shown = ", ".join(names[:_NAMES_SHOWN]) or "values that are not tensors"
    return shown + (f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else "")
