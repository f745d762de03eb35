"""Which tensor goes into which file of an export, and at which byte."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shard_ckpt._dtypes import dtype_name, header_shape
from shard_ckpt._header import HeaderEntry, encode_header
from shard_ckpt._hf_folder import HF_STEM, SUFFIX
from shard_ckpt._index import Index, TensorRecord
from shard_ckpt._naming import Naming
from shard_ckpt._own_read import stored_dtype

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


class Item(NamedTuple):
    """A tensor to write: its name in files, the stored tensor, the dtype it gets."""

    key: str
    record: TensorRecord
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.record.numel * self.dtype.itemsize


@dataclass(frozen=True)
class OutFile:
    """One file of an export.

    Attributes:
        name: file name.
        header: everything before the data.
        items: in the order of their bytes.
        offsets: byte in the file at which each item begins.
        nbytes: size of the file.
    """

    name: str
    header: bytes
    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    nbytes: int


class Copy(NamedTuple):
    """A stored range and where it goes.

    Attributes:
        offset: first byte in the source file.
        stop: one past the last.
        out: number of the output file.
        at: byte there at which the first run goes.
        stored: dtype in the source.
        dtype: dtype in the output.
        length: elements of each run; they follow one another in the source.
        stride: elements from one run to the next in the output; 0 for a single run.
    """

    offset: int
    stop: int
    out: int
    at: int
    stored: torch.dtype
    dtype: torch.dtype
    length: int
    stride: int

    def spans(self, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield what lies in bytes ``[low, high)`` of the source file, run by run. Local.

        Returns:
            First byte, one past the last, and the byte in the output file where they go.
        """
        size = self.length * self.stored.itemsize
        at, stop = max(self.offset, low), min(self.stop, high)
        while at < stop:
            run, within = divmod(at - self.offset, size)
            end = min(stop, self.offset + (run + 1) * size)
            elements = run * self.stride + within // self.stored.itemsize
            yield at, end, self.at + elements * self.dtype.itemsize
            at = end


def parse_size(text: str | int) -> int:
    """Return a number of bytes: ``"5GB"`` is 5e9, ``"5GiB"`` is 5 * 2**30. Local.

    Raises:
        ValueError: not a size above 0.
    """
    matched = _SIZE.fullmatch(str(text).strip())
    if matched is None or float(matched[1]) == 0:
        raise ValueError(f"max_shard_size: expected a size such as '5GB', got {text!r}")
    base = 1024 if matched[3] else 1000
    return int(float(matched[1]) * base ** _POWERS[matched[2].upper()])


def choose_items(
    index: Index, *, section: str, names: Naming, cast: torch.dtype | None
) -> list[Item]:
    """Return what an export of a section holds, sorted by name with numbers as numbers. Local.

    Raises:
        ValueError: no such section, names that clash, a declared tie that is none, a dtype that
            floating-point tensors cannot become.
    """
    if cast is not None and not cast.is_floating_point:
        raise ValueError(f"cast: expected a floating-point dtype, got {cast!r}")
    records = {name: r for (where, name), r in sorted(index.tensors.items()) if where == section}
    if not records:
        known = sorted({where for where, _ in index.tensors})
        raise ValueError(f"section: the checkpoint has {known}, got {section!r}")
    table = names.table(records, what=f"section {section!r}")
    by_key = {table[name]: record for name, record in records.items()}
    for key, shared in names.ties.items():
        _check_tie(by_key, key, shared)
    kept = {key: record for key, record in by_key.items() if key not in names.ties}
    ordered = sorted(kept, key=_natural)
    return [Item(key, kept[key], _out_dtype(kept[key], cast)) for key in ordered]


def doubles(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return the pairs of names under which one stored tensor is written twice. Local."""
    owners: dict[object, str] = {}
    result = []
    for item in items:
        owner = owners.setdefault(item.record.ranges, item.key) if item.record.numel else item.key
        if owner != item.key:
            result.append((owner, item.key))
    return result


def lay_out_files(items: Sequence[Item], *, max_bytes: int) -> list[OutFile]:
    """Deal tensors to files in order, a new file where the next would exceed the size. Local.

    A tensor larger than ``max_bytes`` gets a file of its own. Sizes of 3, 2, 4, 1 with at most 5
    give files of 3+2 and 4+1.
    """
    shards: list[list[Item]] = []
    filled = 0
    for item in items:
        if not shards or filled + item.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(item)
        filled += item.nbytes
    count = len(shards)
    single = count == 1
    return [
        _lay_out(f"{HF_STEM}{SUFFIX}" if single else _shard_name(number, count), shard)
        for number, shard in enumerate(shards, start=1)
    ]


def plan_copies(files: Sequence[OutFile]) -> dict[int, list[Copy]]:
    """Return what each source file gives, in the order of its bytes. Local."""
    copies: dict[int, list[Copy]] = {}
    for out, file in enumerate(files):
        for item, offset in zip(file.items, file.offsets, strict=True):
            stored = stored_dtype(item.record)
            for part in item.record.ranges:
                stop = part.offset + part.numel * stored.itemsize
                at = offset + part.start * item.dtype.itemsize
                runs = (part.runs.length, part.stride)
                copy = Copy(part.offset, stop, out, at, stored, item.dtype, *runs)
                copies.setdefault(part.file, []).append(copy)
    for listed in copies.values():
        listed.sort(key=lambda copy: (copy.offset, copy.stop))
    return copies


def weight_map(files: Sequence[OutFile]) -> Mapping[str, str]:
    """Return the file of each tensor. Local."""
    return {item.key: file.name for file in files for item in file.items}


def _lay_out(name: str, shard: Sequence[Item]) -> OutFile:
    items = sorted(shard, key=lambda item: -item.dtype.itemsize)  # aligned without holes
    entries = []
    at = 0
    for item in items:
        spelled = dtype_name(item.dtype)
        if spelled is None:
            raise AssertionError(f"{item.key}: dtype {item.dtype} was let through")
        shape = header_shape(spelled, item.record.shape)
        entries.append(HeaderEntry(item.key, spelled, shape, at, at + item.nbytes))
        at += item.nbytes
    header = encode_header(entries, {"format": "pt"})
    offsets = tuple(len(header) + entry.start for entry in entries)
    return OutFile(name, header, tuple(items), offsets, len(header) + at)


def _shard_name(number: int, count: int) -> str:
    return f"{HF_STEM}-{number:05d}-of-{count:05d}{SUFFIX}"


def _out_dtype(record: TensorRecord, cast: torch.dtype | None) -> torch.dtype:
    stored = stored_dtype(record)
    if cast is None or not stored.is_floating_point or stored == cast:
        return stored
    try:
        torch.empty(1, dtype=stored).to(cast)
    except (RuntimeError, NotImplementedError) as exc:
        raise ValueError(f"{record.label}: torch cannot convert {stored} to {cast}") from exc
    return cast


def _check_tie(by_key: Mapping[str, TensorRecord], key: str, shared: str) -> None:
    if shared not in by_key:
        raise ValueError(f"ties: {key} is tied to {shared}, which the checkpoint does not have")
    if by_key[key].ranges != by_key[shared].ranges:
        raise ValueError(f"ties: {key} and {shared} are two tensors in the checkpoint, not one")


def _natural(key: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", key)
    return [(int(part), "") if at % 2 else (0, part) for at, part in enumerate(parts)]
