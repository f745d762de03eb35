from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shard_ckpt import CheckpointError
from shard_ckpt._header import (
    DATA_ALIGNMENT,
    MAX_HEADER_BYTES,
    HeaderEntry,
    encode_header,
    header_length,
    parse_header,
)

ENTRIES = [
    HeaderEntry("z.é@2:5", "C64", (3,), 0, 24),
    HeaderEntry("a", "F32", (2, 2), 24, 40),
    HeaderEntry("scalar", "BF16", (), 40, 42),
    HeaderEntry("empty", "I64", (0, 3), 42, 42),
    HeaderEntry("packed", "F4", (2, 4), 42, 46),
]
METADATA = {"format": "pt", "entries": '{"a":1}'}


def test_the_stock_reader_reads_it(tmp_path: Path) -> None:
    header = encode_header(ENTRIES, METADATA)
    assert len(header) % DATA_ALIGNMENT == 0
    path = tmp_path / "f.safetensors"
    path.write_bytes(header + bytes(range(46)))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == METADATA
        assert sorted(file.keys()) == sorted(entry.key for entry in ENTRIES)
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        assert shapes == {entry.key: entry.shape for entry in ENTRIES}
        assert file.get_tensor("a").view(torch.uint8).flatten().tolist() == list(range(24, 40))
        assert file.get_tensor("empty").shape == (0, 3)


def test_what_was_written_is_read() -> None:
    header = encode_header(reversed(ENTRIES), METADATA)
    length = header_length(header[:8], file_bytes=len(header) + 46, label="f")
    parsed = parse_header(header[8 : 8 + length], file_bytes=len(header) + 46, label="f")
    assert {entry.key: entry for entry in parsed.entries} == {e.key: e for e in ENTRIES}
    assert [entry.start for entry in parsed.entries] == sorted(e.start for e in ENTRIES)
    assert (dict(parsed.metadata), parsed.data_start) == (METADATA, len(header))


def test_equal_contents_give_equal_bytes() -> None:
    assert encode_header(ENTRIES, METADATA) == encode_header(
        reversed(ENTRIES), dict(reversed(METADATA.items()))
    )


def test_a_header_that_no_reader_accepts_is_not_written() -> None:
    entries = [HeaderEntry("a" * MAX_HEADER_BYTES, "U8", (0,), 0, 0)]
    with pytest.raises(ValueError, match="spread the state"):
        encode_header(entries, {})


def parse(table: Any, data_bytes: int) -> None:
    text = json.dumps(table).encode()
    parse_header(text, file_bytes=8 + len(text) + data_bytes, label="f.safetensors")


def entry(start: int, stop: int, *, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [stop - start] if shape is None else shape,
        "data_offsets": [start, stop],
    }


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"a": entry(0, 3)}, "expected .* bytes from the header"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, "'b' begins at byte 3 of the data, expected 2"),
        ({"a": entry(0, 3), "b": entry(2, 4)}, "'b' begins at byte 2 of the data, expected 3"),
        ({"a": entry(1, 4)}, "'a' begins at byte 1 of the data, expected 0"),
        ({"a": entry(4, 0, shape=[0])}, "'a' has -4 bytes"),
        ({"a": entry(0, 4, dtype="F32", shape=[2])}, "F32 of shape .2. takes 8"),
        ({"a": entry(0, 4, shape=[-4])}, "shape .-4."),
        ({"a": entry(0, 4, shape=[True])}, "shape .True."),
        ({"a": entry(0, 4, shape=4)}, "shape 4"),
        ({"a": entry(0, 4, dtype="F99")}, "unknown dtype 'F99'"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4.0]}}, "data_offsets"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0]}}, "data_offsets"),
        ({"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "needs dtype, shape and data_offsets"),
        ({"a": 1}, "needs dtype, shape and data_offsets"),
        ({"__metadata__": {"rank": 1}, "a": entry(0, 4)}, "mapping of strings"),
    ],
)
def test_disorder_is_refused(table: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"^f.safetensors: .*{reason}"):
        parse(table, 4)


def test_lengths_are_checked_before_they_are_believed() -> None:
    def length(stated: int, file_bytes: int) -> int:
        return header_length(struct.pack("<Q", stated), file_bytes=file_bytes, label="f")

    assert length(92, 100) == 92
    with pytest.raises(CheckpointError, match="has 93 bytes, the file has 100 in all"):
        length(93, 100)
    with pytest.raises(CheckpointError, match="readers accept 100000000"):
        length(200 << 20, 1 << 40)
    with pytest.raises(CheckpointError, match="too short"):
        header_length(b"1234", file_bytes=4, label="f")


@settings(deadline=None)
@given(st.data())
def test_damaged_text_is_read_as_written_or_refused(data: st.DataObject) -> None:
    text = bytearray(encode_header(ENTRIES, METADATA)[8:])
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, 500))] = data.draw(st.integers(0, 255))
    try:
        parsed = parse_header(bytes(text), file_bytes=8 + len(text) + 46, label="f")
    except CheckpointError:
        return
    assert sum(e.stop - e.start for e in parsed.entries) == 46
