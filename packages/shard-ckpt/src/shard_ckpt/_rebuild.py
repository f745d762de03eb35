"""An index made again from what the files say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_ckpt._blocks import BLOCK_BYTES, FileRecord, block_count, block_range, read_exactly
from shard_ckpt._crc import crc32
from shard_ckpt._dtypes import header_shape
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import extras_name, is_extras, read_values
from shard_ckpt._files import TENSOR_SUFFIX, entry_key, entry_shape
from shard_ckpt._header import HeaderEntry
from shard_ckpt._index import (
    FORMAT_VERSION,
    Index,
    Range,
    TensorId,
    TensorRecord,
    check_coverage,
    link_ties,
)
from shard_ckpt._json import is_count, strict_loads
from shard_ckpt._open import open_to_read
from shard_ckpt._places import Place, names_in, size_of
from shard_ckpt._progress import Progress
from shard_ckpt._runs import Runs
from shard_ckpt._tensor_file import TensorFile, read_tensor_file
from shard_ckpt._values import TensorRef


@dataclass(frozen=True)
class _Origin:
    """Which save, rank and section a file says it is from; no section for values."""

    save_id: str
    rank: int
    world_size: int
    section: str | None


@dataclass
class _Tensor:
    """What files say of one tensor, so far."""

    dtype: str
    shape: tuple[int, ...]
    ranges: list[Range]


def rebuild_index(folder: Place) -> Index:
    """Make the index of a folder from its files, as the save that wrote them did. Local.

    Raises:
        CheckpointError: files are missing, damaged or of several saves, elements are missing, or
            the stored structure names other tensors than the files hold.

    **Memory**: a block.
    """
    names = [name for name in names_in(folder) if name.endswith(TENSOR_SUFFIX) or is_extras(name)]
    if not names:
        raise CheckpointError(f"{folder}: holds no files of a checkpoint")
    progress = Progress(sum(size_of(folder / name) or 0 for name in names))
    headers = {
        name: read_tensor_file(folder / name) for name in names if name.endswith(TENSOR_SUFFIX)
    }
    origins = {name: _origin_of(folder / name, headers.get(name)) for name in names}
    _check_origins(folder, origins)
    names.sort(key=lambda name: _order(origins[name]))
    files = tuple(_read_file(folder / name, progress) for name in names)
    tensors: dict[TensorId, _Tensor] = {}
    for number, name in enumerate(names):
        if name in headers:
            section = str(origins[name].section)
            for tensor, found, part in _entries(folder / name, headers[name], section, number):
                _add(tensors, tensor, found, part)
    records = [
        TensorRecord(section, name, found.dtype, found.shape, tuple(sorted(found.ranges)))
        for (section, name), found in sorted(tensors.items())
    ]
    for record in records:
        check_coverage(record)
    first = origins[names[0]]
    index = Index(first.save_id, first.world_size, link_ties(records), files)
    _check_structure(folder, index)
    return index


def _origin_of(path: Place, file: TensorFile | None) -> _Origin:
    table: Mapping[str, Any]
    if file is None:
        table = strict_loads(path.read_bytes(), label=str(path))
        numbers = [table.get(key) for key in ("version", "rank", "world_size")]
    else:
        table = file.header.metadata
        texts = [table.get(key, "") for key in ("version", "rank", "world_size")]
        numbers = [int(text) if text.isdecimal() else None for text in texts]
    version, rank, world_size = numbers
    save_id = table.get("save_id")
    section = table.get("section") if file is not None else None
    if version != FORMAT_VERSION or not isinstance(save_id, str):
        raise CheckpointError(f"{path}: not of a checkpoint of format version {FORMAT_VERSION}")
    if not is_count(rank) or not is_count(world_size) or (file is not None and not section):
        raise CheckpointError(f"{path}: does not say which rank and section it is from")
    origin = _Origin(save_id, int(rank or 0), int(world_size or 0), section)
    if path.name != _name_of(origin):
        raise CheckpointError(f"{path}: expected the name {_name_of(origin)}")
    return origin


def _name_of(origin: _Origin) -> str:
    if origin.section is None:
        return extras_name(origin.rank)
    ranks = f"r{origin.rank:05d}-of-{origin.world_size:05d}"
    return f"{origin.section}-{ranks}{TENSOR_SUFFIX}"


def _order(origin: _Origin) -> tuple[int, bool, str]:
    """Sort files as a save lists them: by rank, tensors by section, then values."""
    return origin.rank, origin.section is None, origin.section or ""


def _check_origins(folder: Place, origins: Mapping[str, _Origin]) -> None:
    names = list(origins)
    first = origins[names[0]]
    for name, origin in origins.items():
        if (origin.save_id, origin.world_size) != (first.save_id, first.world_size):
            raise CheckpointError(
                f"{folder / name}: from save {origin.save_id} of {origin.world_size} ranks, "
                f"{names[0]} from save {first.save_id} of {first.world_size}"
            )


def _read_file(path: Place, progress: Progress) -> FileRecord:
    buffer = memoryview(bytearray(BLOCK_BYTES))
    crcs = []
    with open_to_read(path) as (file, nbytes):
        for block in range(block_count(nbytes)):
            low, high = block_range(block, nbytes)
            if not read_exactly(file, [buffer[: high - low]], offset=low):
                raise CheckpointError(f"{path}: got shorter while it was being read")
            crcs.append(crc32(buffer[: high - low]))
            progress.advance(high - low)
    return FileRecord(path.name, nbytes, tuple(crcs))


def _entries(
    path: Place, file: TensorFile, section: str, number: int
) -> Iterator[tuple[TensorId, _Tensor, Range]]:
    """Yield the tensors that a file holds elements of, ties included, and which elements."""
    described = strict_loads(
        file.header.metadata.get("entries", "").encode(), label=f"{path}: entries"
    )
    if described.keys() != {entry.key for entry in file.header.entries}:
        raise CheckpointError(f"{path}: describes other tensors than it holds")
    for entry in file.header.entries:
        about = described[entry.key]
        try:
            name = about["fqn"]
            runs = Runs(
                about["start"], about["stop"], about.get("times", 1), about.get("stride", 0)
            )
            shapes = [(section, name, tuple(about["shape"]))]
            shapes += [(where, tie, tuple(shape)) for where, tie, shape in about.get("ties", ())]
            counts = [*runs, *(dim for *_, shape in shapes for dim in shape)]
        except (KeyError, TypeError, ValueError) as exc:
            raise CheckpointError(f"{path}: {entry.key!r} is not described") from exc
        if not all(map(is_count, counts)) or not _fits(entry, name, shapes[0][2], runs):
            raise CheckpointError(f"{path}: {entry.key!r} is not what it is described as")
        offset = file.header.data_start + entry.start
        part = Range(runs.start, runs.stop, number, offset, runs.times, runs.stride)
        for where, tensor, shape in shapes:
            yield (where, tensor), _Tensor(entry.dtype, shape, []), part


def _fits(entry: HeaderEntry, name: str, shape: tuple[int, ...], runs: Runs) -> bool:
    stored = header_shape(entry.dtype, entry_shape(shape, runs))
    return entry.key == entry_key(name, shape, runs) and entry.shape == stored


def _add(tensors: dict[TensorId, _Tensor], tensor: TensorId, found: _Tensor, part: Range) -> None:
    known = tensors.setdefault(tensor, found)
    if (known.dtype, known.shape) != (found.dtype, found.shape):
        raise CheckpointError(
            f"{tensor[0]}: {tensor[1]}: files disagree: {known.dtype} of shape {known.shape}, "
            f"{found.dtype} of shape {found.shape}"
        )
    known.ranges.append(part)


def _check_structure(folder: Place, index: Index) -> None:
    """Check that files hold the tensors that the stored structure names, no more and no fewer."""
    named = set(_refs(read_values(folder, index, rank=0, world_size=0)))
    held = set(index.tensors)
    for tensor in sorted(named - held):
        raise CheckpointError(f"{folder}: {tensor[0]}: {tensor[1]} is in no file")
    for tensor in sorted(held - named):
        raise CheckpointError(f"{folder}: {tensor[0]}: {tensor[1]} is not in the structure")


def _refs(node: Any) -> Iterator[TensorId]:
    if isinstance(node, TensorRef):
        yield node.section, node.name
    elif isinstance(node, dict):
        for item in node.values():
            yield from _refs(item)
    elif isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        for item in node:
            yield from _refs(item)
