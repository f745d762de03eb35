"""One rank's files: which tensors in which order, and writing them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_ckpt._behind import Behind
from shard_ckpt._blocks import BlockWriter
from shard_ckpt._collector import collector_paused
from shard_ckpt._dtypes import header_shape
from shard_ckpt._grains import FileRecord
from shard_ckpt._header import HeaderEntry, encode_header
from shard_ckpt._index import FORMAT_VERSION, Range, TensorId
from shard_ckpt._json import canonical_json
from shard_ckpt._memory import bytes_of, flat_range, joined_runs
from shard_ckpt._places import Place
from shard_ckpt._plan import Entry
from shard_ckpt._runs import Runs
from shard_ckpt._staging import Windows

TENSOR_SUFFIX = ".safetensors"

SMALL_BYTES = 64 << 10
"""Storages with fewer bytes to store go to the front of a file."""


@dataclass(frozen=True)
class Origin:
    """Which save, and which of its ranks, a file is from."""

    save_id: str
    rank: int
    world_size: int


@dataclass(frozen=True)
class SectionFile:
    """The layout of one file.

    Attributes:
        section: whose tensors it holds.
        name: file name.
        header: everything before the data.
        entries: in the order of their bytes.
        offsets: byte in the file at which each entry begins.
    """

    section: str
    name: str
    header: bytes
    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]

    def ranges(self, file: int) -> Iterator[tuple[TensorId, Range]]:
        """Yield what the index should say of this file, which it lists as number ``file``."""
        for entry, offset in zip(self.entries, self.offsets, strict=True):
            start, stop, times, stride = entry.runs
            for leaf in (entry.leaf, *entry.ties):
                yield leaf.id, Range(start, stop, file, offset, times, stride)


def entry_key(name: str, shape: tuple[int, ...], runs: Runs) -> str:
    """Return what a file calls elements of a tensor of this shape. Local.

    The whole tensor has its name, ``[4, 9)`` of it is ``name@4:9``, and three runs in ``[1, 13)``
    that begin every 5 elements are ``name@1:13:3x5``.
    """
    if _is_whole(shape, runs):
        return name
    key = f"{name}@{runs.start}:{runs.stop}"
    return key if runs.times == 1 else f"{key}:{runs.times}x{runs.stride}"


def entry_shape(shape: tuple[int, ...], runs: Runs) -> tuple[int, ...]:
    """Return the torch shape of these elements in a file: natural if whole, else flat. Local."""
    return shape if _is_whole(shape, runs) else (runs.numel,)


def _is_whole(shape: tuple[int, ...], runs: Runs) -> bool:
    return runs == (0, math.prod(shape), 1, 0)


def lay_out(entries: Iterable[Entry], origin: Origin) -> list[SectionFile]:
    """Lay a rank's entries out in one file per section. Local.

    Wide dtypes come first, so that every tensor is aligned without padding. Within a width,
    storages of which less than ``SMALL_BYTES`` are stored come first, so that what every rank
    wants, step counters say, lies in the block of the header, which every rank wants too. Then
    tensors follow one another as they do in memory, so that neighbours in a flat buffer are
    neighbours in the file; storages in the order of the first name in them.

    Raises:
        ValueError: two tensors would be called the same in one file.
    """
    ordered = order_entries(entries)
    return [_lay_out_section(section, group, origin) for section, group in ordered.items()]


@collector_paused()
def order_entries(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return each section's entries in the order in which a file holds them. Local."""
    numbers: dict[tuple[torch.device, int], int] = {}
    sections: dict[str, list[tuple[int, Entry]]] = {}
    firsts: dict[TensorId, int] = {}
    nbytes: dict[tuple[str, int], int] = {}
    for entry in sorted(entries, key=lambda entry: entry.leaf.id):
        tensor, section = entry.leaf.tensor, entry.leaf.section
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        number = numbers.setdefault(storage, len(numbers))
        sections.setdefault(section, []).append((number, entry))
        firsts.setdefault(entry.leaf.id, entry.at)
        nbytes[section, number] = nbytes.get((section, number), 0) + entry.nbytes

    def place(section: str, number: int, entry: Entry) -> tuple[int, bool, int, int, str]:
        tensor = entry.leaf.tensor
        size = tensor.element_size()
        at = int(tensor.storage_offset()) + firsts[entry.leaf.id]
        large = nbytes[section, number] >= SMALL_BYTES
        return -size, large, number, at * size, entry.leaf.name  # a tensor's entries stay together

    result = {}
    for section, numbered in sorted(sections.items()):
        keyed = [(place(section, number, entry), entry) for number, entry in numbered]
        keyed.sort(key=lambda pair: pair[0])
        result[section] = [entry for _, entry in keyed]
    return result


def write_section(folder: Place, layout: SectionFile) -> Behind[FileRecord]:
    """Write one file; it is made durable while the caller goes on. Local.

    Returns:
        What the index should say of the file, once it is durable.

    Raises:
        OSError: it exists, or writing failed.

    **Memory**: none for host tensors that are contiguous; a copy of one tensor at a time for those
    that are not; two windows of pinned memory per device otherwise.
    """
    writer = BlockWriter(folder / layout.name)
    windows: dict[torch.device, Windows] = {}
    try:
        writer.feed(memoryview(layout.header))
        for run in joined_runs(pieces_of(layout.entries)):
            if run.device.type == "cpu":
                writer.feed(bytes_of(run), owner=run)
                continue
            if run.device not in windows:
                windows[run.device] = Windows(run.device)
            for view in windows[run.device].read_out(run):
                writer.feed(view)
                writer.flush()  # the next window but one overwrites it
        return writer.finish_behind()
    except BaseException:
        writer.abandon()
        raise


def pieces_of(entries: Sequence[Entry]) -> Iterator[torch.Tensor]:
    """Yield the elements of each entry, contiguous and flat. Local.

    **Memory**: views, but a copy of the tensor where it is not contiguous.
    """
    for entry in entries:
        last = entry.at + entry.runs.numel
        yield flat_range(entry.leaf.tensor, start=entry.at, stop=last)


def _lay_out_section(section: str, entries: Sequence[Entry], origin: Origin) -> SectionFile:
    table: dict[str, HeaderEntry] = {}
    described: dict[str, Mapping[str, Any]] = {}
    at = 0
    for entry in entries:
        leaf = entry.leaf
        key = entry_key(leaf.name, leaf.shape, entry.runs)
        if key in table:
            raise ValueError(
                f"{section}: {leaf.name} and {described[key]['fqn']} would both be called {key!r} "
                f"in one file; rename one"
            )
        shape = entry_shape(leaf.shape, entry.runs)
        stop = at + entry.nbytes
        table[key] = HeaderEntry(key, leaf.dtype, header_shape(leaf.dtype, shape), at, stop)
        described[key] = _describe(entry)
        at = stop
    header = encode_header(table.values(), _metadata(section, origin, described))
    offsets = tuple(len(header) + item.start for item in table.values())
    name = f"{section}-r{origin.rank:05d}-of-{origin.world_size:05d}{TENSOR_SUFFIX}"
    return SectionFile(section, name, header, tuple(entries), offsets)


def _describe(entry: Entry) -> dict[str, Any]:
    leaf = entry.leaf
    described: dict[str, Any] = {
        "fqn": leaf.name,
        "shape": list(leaf.shape),
        "start": entry.runs.start,
        "stop": entry.runs.stop,
    }
    if entry.runs.times > 1:
        described |= {"times": entry.runs.times, "stride": entry.runs.stride}
    if entry.ties:
        described["ties"] = [[tie.section, tie.name, list(tie.shape)] for tie in entry.ties]
    return described


def _metadata(section: str, origin: Origin, described: Mapping[str, Any]) -> dict[str, str]:
    return {
        "format": "pt",
        "version": str(FORMAT_VERSION),
        "save_id": origin.save_id,
        "rank": str(origin.rank),
        "world_size": str(origin.world_size),
        "section": section,
        "entries": canonical_json(described).decode("ascii"),
    }
