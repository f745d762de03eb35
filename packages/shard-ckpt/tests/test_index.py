from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_ckpt import CheckpointError, FileRecord, Range, TensorRecord
from shard_ckpt._blocks import BLOCK_BYTES
from shard_ckpt._index import Index, check_coverage, encode_index, link_ties, parse_index

FILES = (FileRecord("a.safetensors", 5000, (1,)), FileRecord("b.safetensors", 6000, (2,)))
W = TensorRecord("model", "w", "F32", (2, 3), (Range(0, 4, 0, 4096), Range(4, 6, 1, 4096)))
E = TensorRecord("model", "e", "I64", (0, 3), (Range(0, 0, 1, 4104),))
S = TensorRecord("optim", "w#step", "F32", (), (Range(0, 1, 1, 4104),))
TIED = TensorRecord("model", "x", "F32", (6,), W.ranges)
V = TensorRecord(
    "model", "v", "F32", (3, 5), (Range(0, 13, 0, 4096, 3, 5), Range(3, 15, 1, 4096, 3, 5))
)
INDEX = Index("cafe", 2, link_ties([E, V, W, TIED, S]), FILES)


def record(*ranges: tuple[int, int], numel: int) -> TensorRecord:
    return TensorRecord("m", "t", "U8", (numel,), tuple(Range(a, b, 0, 0) for a, b in ranges))


def test_what_was_written_is_read() -> None:
    assert parse_index(encode_index(INDEX)) == INDEX


def test_runs_are_six_numbers_and_a_single_run_is_four() -> None:
    table = json.loads(encode_index(INDEX))["tensors"]["model"]
    assert table["v"]["ranges"] == [[0, 13, 0, 4096, 3, 5], [3, 15, 1, 4096, 3, 5]]
    assert table["w"]["ranges"] == [[0, 4, 0, 4096], [4, 6, 1, 4096]]


def test_a_tie_is_stored_as_a_name() -> None:
    table = json.loads(encode_index(INDEX))
    assert table["tensors"]["model"]["x"] == {"dtype": "F32", "shape": [6], "tie": ["model", "w"]}
    assert INDEX.tensors["model", "x"].tie == ("model", "w")
    assert INDEX.tensors["model", "w"].tie is None


@pytest.mark.parametrize(
    ("ranges", "numel", "reason"),
    [
        ([(0, 3)], 5, r"expected elements \[0, 5\), got \[0, 3\)"),
        ([(0, 3), (4, 5)], 5, r"nobody stored elements \[3, 4\) of 5"),
        ([(1, 5)], 5, r"nobody stored elements \[0, 1\)"),
        ([], 5, r"got \[0, 0\)"),
        ([(0, 3), (2, 5)], 5, r"\[2, 5\) are stored twice"),
        ([(0, 3), (0, 3), (3, 5)], 5, r"\[0, 3\) are stored twice"),
        ([(0, 3), (3, 3), (3, 5)], 5, "stored twice or empty"),
        ([(0, 6)], 5, r"expected elements \[0, 5\), got \[0, 6\)"),
        ([(0, 1)], 0, r"expected elements \[0, 0\), got \[0, 1\)"),
    ],
)
def test_coverage_must_be_exact(ranges: list[tuple[int, int]], numel: int, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"^m: t: .*{reason}"):
        check_coverage(record(*ranges, numel=numel))


def test_exact_coverage_is_accepted() -> None:
    check_coverage(record((0, 3), (3, 5), numel=5))
    check_coverage(record((0, 0), numel=0))
    check_coverage(record(numel=0))


def changed(path: list[Any], value: Any) -> bytes:
    table = json.loads(encode_index(INDEX))
    node = table
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(table).encode()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["version"], 2, "expected format version 1, got 2"),
        (["save_id"], 7, "save_id or world_size"),
        (["world_size"], -1, "save_id or world_size"),
        (["files"], {}, "outside of the files listed"),
        (["files", 0, "name"], "../a", "not the name of a file in this folder"),
        (["files", 0, "name"], ".a", "not the name of a file in this folder"),
        (["files", 0, "name"], "b.safetensors", "a file is listed twice"),
        (["files", 0, "bytes"], -1, "not counts"),
        (["files", 0, "bytes"], BLOCK_BYTES + 1, "expected 2 checksums, got 1"),
        (["files", 0, "crc32"], [1.5], "not counts"),
        (["tensors", "model", "w", "dtype"], "F99", "model: w: unknown dtype 'F99'"),
        (["tensors", "model", "w", "dtype"], ["F32"], "not laid out as an index"),
        (["tensors", "model", "w", "shape"], [2, -3], "model: w: shape or ranges"),
        (["tensors", "model", "w", "shape"], [7], "model: w: expected elements"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 2, 4096], "outside of the files listed"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 0, 4992], "outside of the files listed"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 0, 2**70], "outside of the files listed"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 0, 4097], "not aligned"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 0], "not laid out as an index"),
        (["tensors", "model", "w", "ranges", 0], [0, 4, 0, -4], "shape or ranges"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4096, 2, 5], "v: .*multiple of 5"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4096, 3], "v: .*different distances"),
        (["tensors", "model", "v", "ranges", 0], [0, 12, 0, 4096, 3, 5], "v: nobody stored 3 of"),
        (["tensors", "model", "v", "ranges", 0], [0, 14, 0, 4096, 3, 5], "from 0 on are stored tw"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4096, 10**30, 5], "not within"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4096, 3.0, 5], "shape or ranges"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4980, 3, 5], "outside of the files"),
        (["tensors", "model", "v", "ranges", 0], [0, 13, 0, 4096, 3, 5, 1], "not laid out as an"),
        (["tensors", "model", "x", "tie"], ["model", "x"], "not laid out as an index"),
        (["tensors", "model", "x", "tie"], ["model", "e"], "differs in dtype"),
        (["tensors", "model", "x", "shape"], [5], r"model: x: expected elements \[0, 5\)"),
        (["tensors", "model"], [1], "not laid out as an index"),
        (["tensors"], None, "not laid out as an index"),
    ],
)
def test_disorder_is_refused(path: list[Any], value: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        parse_index(changed(path, value))


@settings(deadline=None)
@given(st.data())
def test_damaged_text_is_refused_or_consistent(data: st.DataObject) -> None:
    raw = bytearray(encode_index(INDEX))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(32, 126))
    try:
        index = parse_index(bytes(raw))
    except CheckpointError:
        return
    for tensor in index.tensors.values():
        check_coverage(tensor)
