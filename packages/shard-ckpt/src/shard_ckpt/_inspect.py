"""Looking at a checkpoint without loading it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from shard_ckpt._check import (
    Source,
    check_header,
    folding_for,
    open_checked,
    open_source,
    problems_in,
    strangers,
)
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import read_values, without_tensors
from shard_ckpt._files import TENSOR_SUFFIX
from shard_ckpt._fold import Folding
from shard_ckpt._grains import FileRecord, grain_count
from shard_ckpt._index import TensorRecord
from shard_ckpt._progress import Progress
from shard_ckpt._remote import RemotePath


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says it holds.

    Attributes:
        path: its folder, or its URL.
        save_id: which save made it.
        world_size: how many ranks wrote it.
        nbytes: bytes of all data files.
        tensors: sorted by section and name.
        files: in the order of the ranks.
        values: the values that are not tensors, in the structure that was saved.
    """

    path: Path | str
    save_id: str
    world_size: int
    nbytes: int
    tensors: tuple[TensorRecord, ...]
    files: tuple[FileRecord, ...]
    values: Mapping[str, Any]


def inspect(path: str | os.PathLike[str]) -> CheckpointInfo:
    """Return what a checkpoint holds, from its marker, index and values; no tensor is read. Local.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: marker, index or values are missing or altered.
    """
    source = open_source(path)
    index = source.index
    values = without_tensors(read_values(source.folder, index, rank=0, world_size=0))
    return CheckpointInfo(
        str(path) if "://" in str(path) else Path(path),
        index.save_id,
        index.world_size,
        index.nbytes,
        tuple(record for _, record in sorted(index.tensors.items())),
        index.files,
        values if isinstance(values, dict) else {},
    )


def verify(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Read all of a checkpoint and say what is wrong with it. Local.

    Checks marker, index, coverage, and of every file its size, the checksum of each block, that
    its header agrees with the index, and (not behind a URL or a path that is not UTF-8) that the
    safetensors library opens it and sees the same names. Files that look like a checkpoint's but
    are not listed are reported too.

    Returns:
        One line per problem, naming the file; empty for an intact checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
        OSError: reading failed.

    **Memory**: 2 MiB; from object stores 32 MiB.
    """
    try:
        source = open_source(path)
    except CheckpointError as exc:
        return (str(exc),)
    folder = source.folder
    problems = []
    folding = folding_for(source)
    progress = Progress(source.index.nbytes)
    for file in range(len(source.index.files)):
        try:
            problems += _file_problems(source, file, folding, progress)
        except CheckpointError as exc:
            problems.append(str(exc))
    if not problems:
        try:
            read_values(folder, source.index, rank=0, world_size=0)
        except CheckpointError as exc:
            problems.append(str(exc))
    return (*problems, *(f"{folder / name}: not in the index" for name in strangers(source)))


def _file_problems(source: Source, file: int, folding: Folding, progress: Progress) -> list[str]:
    record = source.index.files[file]
    with open_checked(source, file) as fd:
        runs = [(0, grain_count(record.nbytes))]
        problems = list(
            problems_in(source, file, fd=fd, runs=runs, folding=folding, progress=progress)
        )
        if problems or not record.name.endswith(TENSOR_SUFFIX):
            return problems
        check_header(source, file, fd=fd)
    return _stock_problems(source, file)


def _stock_problems(source: Source, file: int) -> list[str]:
    """Ask another implementation of the format."""
    path = source.folder / source.index.files[file].name
    if isinstance(path, RemotePath) or not _has_utf8(path):
        return []  # it opens neither
    try:
        with safe_open(path, framework="pt") as opened:
            seen = set(opened.keys())
    except SafetensorError as exc:
        return [f"{path}: the safetensors library refuses it: {exc}"]
    listed = {entry.key for _, entry in source.entries.get(file, ())}
    strange = sorted(seen - listed)
    return [f"{path}: holds {strange[0]!r}, which the index does not"] if strange else []


def _has_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True
