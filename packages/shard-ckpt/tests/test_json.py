from __future__ import annotations

import pytest

from shard_ckpt import CheckpointError
from shard_ckpt._json import canonical_json, is_count, strict_loads


def test_equal_values_have_equal_bytes() -> None:
    assert canonical_json({"b": [1, 2.5], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.5]}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


def test_what_was_written_is_read() -> None:
    value = {"name": "é\N{SNOWMAN}", "list": [1, None, True, {"x": -0.5}]}
    assert strict_loads(canonical_json(value), label="x") == value


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff{}", "not valid JSON"),
        (b'{"a":1,"a":2}', "key 'a' occurs twice"),
        (b'{"a":NaN}', "NaN is not a JSON number"),
        (b'{"a":-Infinity}', "-Infinity is not a JSON number"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not valid JSON"),
        (b'{"a":' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_nothing_else_is_read(raw: bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=r"file\.json") as caught:
        strict_loads(raw, label="file.json")
    assert reason in str(caught.value)


def test_counts_are_ints_from_zero() -> None:
    assert [is_count(value) for value in (0, 7, 2**70)] == [True, True, True]
    assert [is_count(value) for value in (-1, True, 1.0, "1", None)] == [False] * 5
