"""Readers of headers, indexes, markers and values against 10,000 damaged inputs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shard_ckpt import CheckpointError, PerRank, save
from shard_ckpt._header import METADATA_KEY, header_length, parse_header
from shard_ckpt._index import parse_index
from shard_ckpt._json import canonical_json, strict_loads
from shard_ckpt._marker import MARKER_NAME, read_marker
from shard_ckpt._values import decode
from shard_comm import Comm
from shard_testing import run_threads

ODD_VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**32 + 1,
    2**63,
    2**64,
    10**30,
    0.5,
    1e308,
    "",
    "F32",
    "F4",
    "\ud800",
    "a/b",
    "..",
    [],
    [[]],
    [0, 0],
    [1, 0],
    {},
    {"": None},
    {"$tuple": 1},
    {"$float": "x"},
    {"$map": [[1]]},
    {"$array": ["F32", [2], ""]},
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "a"
    tied = torch.ones(3, 4)

    def rank(comm: Comm) -> None:
        mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=comm.rank)
        columns = DTensor.from_local(torch.ones(6, 2), mesh, (Shard(1),), run_check=False)
        state = {
            "model": {"w": tied, "again": tied, "half": torch.ones(7).bfloat16()},
            "cut": {"columns": columns, "s": torch.ones(())},
            "values": {"t": (1, float("inf")), "b": b"x", "big": 2**70, "map": {1: [None, True]}},
            "rng": PerRank(torch.arange(3)),
        }
        save(state, folder, comm=comm)

    run_threads(rank, 2)
    return folder


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Change bytes, without regard to what they mean."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2:
            del data[at : at + rng.randint(1, 40)]
        elif kind == 3:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif at < len(data):
            data[at] = rng.choice(b'0123456789-.{}[]",:eE')
    return bytes(data)


def twisted(raw: bytes, rng: random.Random) -> bytes:
    """Change what it means: put something odd, or something from elsewhere, in a place."""
    root: Any = json.loads(raw)
    nodes: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in list(items):
            nodes.append((node, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(root)
    for _ in range(rng.randint(1, 2)):
        holder, key = rng.choice(nodes)
        if rng.random() < 0.3 and isinstance(holder, dict):
            holder.pop(key, None)
        elif rng.random() < 0.5:
            holder[key] = rng.choice(ODD_VALUES)
        else:
            other, place = rng.choice(nodes)
            if isinstance(other, list) or place in other:
                holder[key] = json.loads(json.dumps(other[place]))
    return json.dumps(root).encode()


def inputs(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for number in range(count):
        yield (damaged if number % 2 else twisted)(raw.rstrip(), rng)


def refusals(read: Callable[[bytes], object], raw: bytes, count: int, seed: int) -> int:
    """Count the refusals. Any other error than ``CheckpointError`` ends the test."""
    refused = 0
    read(raw)
    for text in inputs(raw, count, seed):
        try:
            read(text)
        except CheckpointError:
            refused += 1
        except Exception as exc:
            raise AssertionError(f"{type(exc).__name__}: {exc} at {text!r}") from exc
    return refused


def test_headers(whole: Path) -> None:
    raw = (whole / "cut-r00000-of-00002.safetensors").read_bytes()
    length = header_length(raw[:8], file_bytes=len(raw), label="f")
    text = raw[8 : 8 + length].rstrip()
    data_bytes = len(raw) - 8 - length

    def read(header: bytes) -> None:
        parsed = parse_header(header, file_bytes=8 + len(header) + data_bytes, label="f")
        spans = [(entry.start, entry.stop) for entry in parsed.entries]
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans)][: len(spans)]
        assert METADATA_KEY not in {entry.key for entry in parsed.entries}

    assert 3000 < refusals(read, text, 4000, seed=1) < 4000


def test_lengths_of_headers() -> None:
    rng = random.Random(2)
    accepted = 0
    for _ in range(1000):
        prefix = rng.randbytes(rng.choice([0, 7, 8, 8, 8, 8]))
        if len(prefix) == 8 and rng.random() < 0.7:
            prefix = rng.randrange(2 ** rng.randrange(1, 40)).to_bytes(8, "little")
        size = rng.randrange(2 ** rng.randrange(1, 36))
        try:
            length = header_length(prefix, file_bytes=size, label="f")
        except CheckpointError:
            continue
        assert 8 + length <= size
        accepted += 1
    assert 50 < accepted < 950


def test_indexes(whole: Path) -> None:
    def read(text: bytes) -> None:
        index = parse_index(text, label="f")
        for record in index.tensors.values():
            assert sum(part.numel for part in record.ranges) == record.numel
            for part in record.ranges:
                end = part.offset + part.numel * record.itemsize
                assert end <= index.files[part.file].nbytes

    raw = (whole / "index.json").read_bytes()
    assert sum(len(part) == 6 for part in json.loads(raw)["tensors"]["cut"]["columns"]["ranges"])
    assert 3000 < refusals(read, raw, 4000, seed=3) < 4000


def test_markers(whole: Path, tmp_path: Path) -> None:
    def read(text: bytes) -> None:
        (tmp_path / MARKER_NAME).write_bytes(text)
        read_marker(tmp_path)

    assert 400 < refusals(read, (whole / MARKER_NAME).read_bytes(), 500, seed=4) < 500


def test_values(whole: Path) -> None:
    raw = (whole / "extra-r00000.json").read_bytes()

    def read(text: bytes) -> None:
        decode(strict_loads(text, label="f"), label="f")

    assert canonical_json(json.loads(raw)) == raw
    assert 100 < refusals(read, raw, 1000, seed=5) < 1000
