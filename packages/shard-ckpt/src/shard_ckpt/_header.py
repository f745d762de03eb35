"""Headers of safetensors files."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shard_ckpt._collector import collector_paused
from shard_ckpt._dtypes import torch_dtype
from shard_ckpt._errors import CheckpointError
from shard_ckpt._json import canonical_json, is_count, strict_loads

DATA_ALIGNMENT = 4096
"""Data begins at a multiple of this many bytes, as direct I/O wants it."""

MAX_HEADER_BYTES = 100_000_000
"""The stock reader refuses longer headers."""

METADATA_KEY = "__metadata__"


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file.

    Attributes:
        key: its name in the file.
        dtype: as safetensors spells it.
        shape: as the header states it.
        start: first byte, counted from the beginning of the data.
        stop: one past the last byte.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What a file says about itself.

    Attributes:
        entries: in the order of their bytes.
        metadata: free text.
        data_start: where data begins in the file, in bytes.
    """

    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]
    data_start: int


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file, up to where data begins. Local.

    Raises:
        ValueError: the header would be longer than readers accept.
    """
    table: dict[str, Any] = {METADATA_KEY: dict(metadata)}
    for entry in entries:
        table[entry.key] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.stop],
        }
    text = canonical_json(table)
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"{len(table) - 1} tensors in one file need a header of {len(text)} bytes, but readers "
            f"accept {MAX_HEADER_BYTES}; spread the state over more sections or ranks"
        )
    return struct.pack("<Q", len(text)) + text


def header_length(prefix: bytes, *, file_bytes: int, label: str) -> int:
    """Return the length of the JSON text that follows a file's first 8 bytes. Local.

    Raises:
        CheckpointError: the file is too short for it, or it is longer than readers accept.
    """
    if len(prefix) != 8:
        raise CheckpointError(f"{label}: too short for a safetensors file ({len(prefix)} bytes)")
    (length,) = struct.unpack("<Q", prefix)
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{label}: the header says it has {length} bytes, readers accept {MAX_HEADER_BYTES}"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{label}: the header says it has {length} bytes, the file has {file_bytes} in all"
        )
    return int(length)


@collector_paused()
def parse_header(text: bytes, *, file_bytes: int, label: str) -> Header:
    """Read a header's JSON text as the stock reader would, and as strictly. Local.

    Args:
        text: what follows the first 8 bytes.
        file_bytes: size of the whole file.
        label: the file's name, for errors.

    Raises:
        CheckpointError: anything out of order: dtype, shape, offsets, holes, overlaps.
    """
    table = strict_loads(text, label=label)
    metadata = table.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{label}: {METADATA_KEY} is not a mapping of strings")
    entries = sorted(
        (_parse_entry(key, value, label) for key, value in table.items()),
        key=lambda entry: (entry.start, entry.stop),
    )
    at = 0
    for entry in entries:
        if entry.start != at:
            raise CheckpointError(
                f"{label}: {entry.key!r} begins at byte {entry.start} of the data, expected {at}"
            )
        at = entry.stop
    data_start = 8 + len(text)
    if data_start + at != file_bytes:
        raise CheckpointError(
            f"{label}: expected {data_start + at} bytes from the header, the file has {file_bytes}"
        )
    return Header(tuple(entries), metadata, data_start)


def _parse_entry(key: str, value: Any, label: str) -> HeaderEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{label}: {key!r} needs dtype, shape and data_offsets, and no more")
    name, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    dtype = torch_dtype(name) if isinstance(name, str) else None
    if dtype is None:
        raise CheckpointError(f"{label}: {key!r} has the unknown dtype {name!r}")
    if not isinstance(shape, list) or not all(is_count(dim) for dim in shape):
        raise CheckpointError(f"{label}: {key!r} has the shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise CheckpointError(f"{label}: {key!r} has the data_offsets {offsets!r}")
    start, stop = offsets
    bits = math.prod(shape) * (4 if name == "F4" else dtype.itemsize * 8)
    if (stop - start) * 8 != bits:
        raise CheckpointError(
            f"{label}: {key!r} has {stop - start} bytes, but {name} of shape {shape} takes "
            f"{bits / 8:g}"
        )
    return HeaderEntry(key, name, tuple(shape), start, stop)
