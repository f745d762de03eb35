"""The index: where every element of every tensor lies, and what each file should be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from shard_ckpt._blocks import FileRecord, block_count
from shard_ckpt._collector import collector_paused
from shard_ckpt._dtypes import torch_dtype
from shard_ckpt._errors import CheckpointError
from shard_ckpt._json import canonical_json, is_count, strict_loads
from shard_ckpt._runs import Runs, tiling_problem

INDEX_NAME = "index.json"
FORMAT_VERSION = 1

TensorId = tuple[str, str]
"""Section and name."""


class Range(NamedTuple):
    """Elements of a flattened tensor, and where they lie: at byte ``offset`` of file ``file``.

    They are ``[start, stop)``, or of these ``times`` equal runs that begin every ``stride``
    elements: what a column-cut matrix leaves to a rank.
    """

    start: int
    stop: int
    file: int
    offset: int
    times: int = 1
    stride: int = 0

    @property
    def runs(self) -> Runs:
        """Which elements."""
        return Runs(self.start, self.stop, self.times, self.stride)

    @property
    def numel(self) -> int:
        """How many elements."""
        return self.times * (self.stop - self.start - (self.times - 1) * self.stride)

    def row(self) -> list[int]:
        """Return what JSON says of it: a single run needs four numbers. Local."""
        return list(self if self.times > 1 else self[:4])


@dataclass(frozen=True)
class TensorRecord:
    """What the index says of a tensor.

    Attributes:
        section: top-level key of the state.
        name: its name within the section.
        dtype: as safetensors spells it.
        shape: global shape.
        ranges: sorted by ``start``; together exactly ``[0, numel)``.
        tie: the tensor whose elements these are too; None where it has its own.
    """

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]
    tie: TensorId | None = None

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.section}: {self.name}"

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def reach(self) -> int:
        """From the first element of a range to its last, at most."""
        return max((part.stop - part.start for part in self.ranges), default=0)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        dtype = torch_dtype(self.dtype)
        if dtype is None:
            raise AssertionError(f"{self.label}: dtype {self.dtype!r} was let through")
        return dtype.itemsize


@dataclass(frozen=True)
class Index:
    """The contents of ``index.json``.

    Attributes:
        save_id: which save made the checkpoint.
        world_size: how many ranks wrote it.
        tensors: by section and name.
        files: data files; ranges refer to them by position.
    """

    save_id: str
    world_size: int
    tensors: Mapping[TensorId, TensorRecord]
    files: tuple[FileRecord, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.nbytes for file in self.files)


def link_ties(records: Iterable[TensorRecord]) -> dict[TensorId, TensorRecord]:
    """Mark tensors that lie in the same bytes as an earlier one, and key all. Local.

    Args:
        records: sorted by section and name.
    """
    owners: dict[tuple[Range, ...], TensorRecord] = {}
    result = {}
    for record in records:
        tie = None
        if record.numel > 0:
            owner = owners.setdefault(record.ranges, record)
            tie = None if owner is record else (owner.section, owner.name)
        result[record.section, record.name] = TensorRecord(
            record.section, record.name, record.dtype, record.shape, record.ranges, tie
        )
    return result


def check_coverage(record: TensorRecord) -> None:
    """Check that ranges are sorted and together exactly ``[0, numel)``. Local.

    Raises:
        CheckpointError: elements are missing or occur twice.
    """
    if any(part.times != 1 or part.stride for part in record.ranges):
        problem = tiling_problem([part.runs for part in record.ranges], record.numel)
        if problem is not None:
            raise CheckpointError(f"{record.label}: {problem}")
        return
    at = 0
    for part in record.ranges:
        if part.start > at:
            raise CheckpointError(
                f"{record.label}: nobody stored elements [{at}, {part.start}) of {record.numel}"
            )
        if part.start < at or part.stop < part.start or (part.stop == part.start and record.numel):
            raise CheckpointError(
                f"{record.label}: elements [{part.start}, {part.stop}) are stored twice or empty, "
                f"expected a range from {at} on"
            )
        at = part.stop
    if at != record.numel:
        raise CheckpointError(
            f"{record.label}: expected elements [0, {record.numel}), got [0, {at})"
        )


@collector_paused()
def encode_index(index: Index) -> bytes:
    """Return the bytes of ``index.json``. Local."""
    tensors: dict[str, dict[str, Any]] = {}
    for record in index.tensors.values():
        entry: dict[str, Any] = {"dtype": record.dtype, "shape": list(record.shape)}
        if record.tie is None:
            entry["ranges"] = [part.row() for part in record.ranges]
        else:
            entry["tie"] = list(record.tie)
        tensors.setdefault(record.section, {})[record.name] = entry
    files = [
        {"name": file.name, "bytes": file.nbytes, "crc32": list(file.crcs)} for file in index.files
    ]
    return canonical_json(
        {
            "version": FORMAT_VERSION,
            "save_id": index.save_id,
            "world_size": index.world_size,
            "tensors": tensors,
            "files": files,
        }
    )


@collector_paused()
def parse_index(raw: bytes, *, label: str = INDEX_NAME) -> Index:
    """Read ``index.json`` and check that it is whole and consistent in itself. Local.

    Raises:
        CheckpointError: a version this code does not know, a missing or unknown field, a range
            outside of its file, elements that are missing or stored twice, a tie to nothing.
    """
    table = strict_loads(raw, label=label)
    check_version(table, label)
    try:
        files = tuple(_parse_file(item, label) for item in table["files"])
        save_id, world_size = table["save_id"], table["world_size"]
        entries = [
            (section, name, item)
            for section, names in table["tensors"].items()
            for name, item in names.items()
        ]
        owned = {
            (section, name): _parse_tensor(section, name, item, files)
            for section, name, item in entries
            if "tie" not in item
        }
        tied = {
            (section, name): _parse_tied(section, name, item, owned)
            for section, name, item in entries
            if "tie" in item
        }
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise CheckpointError(f"{label}: not laid out as an index ({exc!r})") from exc
    if len({file.name for file in files}) != len(files):
        raise CheckpointError(f"{label}: a file is listed twice")
    if type(save_id) is not str or not is_count(world_size):
        raise CheckpointError(f"{label}: save_id or world_size is of the wrong type")
    return Index(save_id, world_size, {**owned, **tied}, files)


def check_version(table: Mapping[str, Any], label: str) -> None:
    """Check that this code knows the format. Local.

    Raises:
        CheckpointError: it does not.
    """
    version = table.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{label}: expected format version {FORMAT_VERSION}, got {version!r}; another release "
            f"of shard-ckpt wrote it"
        )


def _parse_file(item: Any, label: str) -> FileRecord:
    name, nbytes, crcs = item["name"], item["bytes"], item["crc32"]
    if not isinstance(name, str) or "/" in name or name.startswith(".") or "\0" in name or not name:
        raise CheckpointError(f"{label}: {name!r} is not the name of a file in this folder")
    if not is_count(nbytes) or not isinstance(crcs, list) or not all(map(is_count, crcs)):
        raise CheckpointError(f"{label}: size or checksums of {name} are not counts")
    if len(crcs) != block_count(nbytes):
        raise CheckpointError(
            f"{label}: {name} has {nbytes} bytes, so expected {block_count(nbytes)} checksums, got "
            f"{len(crcs)}"
        )
    return FileRecord(name, nbytes, tuple(crcs))


def _parse_tensor(
    section: str, name: str, item: Any, files: tuple[FileRecord, ...]
) -> TensorRecord:
    dtype, shape = item["dtype"], item["shape"]
    ranges = tuple(Range(*part) for part in item["ranges"])
    record = TensorRecord(section, name, dtype, tuple(shape), ranges)
    if torch_dtype(dtype) is None:
        raise CheckpointError(f"{record.label}: unknown dtype {dtype!r}")
    if not all(map(is_count, shape)) or not all(map(is_count, chain.from_iterable(ranges))):
        raise CheckpointError(f"{record.label}: shape or ranges are not counts")
    check_coverage(record)
    for part in ranges:
        end = part.offset + part.numel * record.itemsize
        if part.file >= len(files) or end > files[part.file].nbytes:
            raise CheckpointError(f"{record.label}: {part} lies outside of the files listed")
        if part.offset % record.itemsize:
            raise CheckpointError(f"{record.label}: {part} is not aligned to its dtype {dtype}")
    return record


def _parse_tied(
    section: str, name: str, item: Any, owned: Mapping[TensorId, TensorRecord]
) -> TensorRecord:
    owner_section, owner_name = item["tie"]
    owner = owned[owner_section, owner_name]
    record = TensorRecord(
        section,
        name,
        item["dtype"],
        tuple(item["shape"]),
        owner.ranges,
        (owner_section, owner_name),
    )
    if record.dtype != owner.dtype or not all(map(is_count, record.shape)):
        raise CheckpointError(f"{record.label}: differs in dtype from {owner.label}, its tie")
    check_coverage(record)
    return record
