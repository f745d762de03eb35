from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_ckpt import CheckpointError
from shard_ckpt._json import canonical_json, strict_loads
from shard_ckpt._values import PerRankRef, TensorRef, decode, encode

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=20)
)
KEYS = st.text(max_size=5) | st.integers()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def stored(value: Any) -> Any:
    text = canonical_json({"value": encode(value, path="state")})
    return decode(strict_loads(text, label="x")["value"], label="x")


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return bool(left == right)


@settings(deadline=None)
@given(VALUES)
def test_values_come_back_as_themselves(value: Any) -> None:
    assert same(stored(value), value)


def test_edges_come_back_as_themselves() -> None:
    edges: list[Any] = [
        math.inf,
        -math.inf,
        -0.0,
        5e-324,
        0.1 + 0.2,
        struct.unpack(">d", bytes.fromhex("7ff8000000000123"))[0],
        2**63 - 1,
        2**63,
        -(2**200),
        10**5000,  # more digits than Python turns to text
        "\ud800",
        {"$bytes": 1, "a": 2},
        {0: "a", "0": "b"},
        {"": ()},
    ]
    assert [at for at, value in enumerate(edges) if not same(stored(value), value)] == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, 2.5, "a"], b'[1,2.5,"a"]'),
        ((1, 2), b'{"$tuple":[1,2]}'),
        (b"ab", b'{"$bytes":"YWI="}'),
        (math.inf, b'{"$float":"7ff0000000000000"}'),
        ({0: "a"}, b'{"$map":[[0,"a"]]}'),
    ],
)
def test_example_in_the_documentation(value: Any, text: bytes) -> None:
    assert canonical_json(encode(value, path="state")) == text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensors_come_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = stored(tensor)
    assert (back.dtype, back.shape) == (dtype, shape)
    assert torch.equal(back, tensor)


def test_strided_tensors_come_back_in_their_order() -> None:
    tensor = torch.arange(6).view(2, 3).t()
    assert stored(tensor).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_stand_ins_come_back_as_stand_ins() -> None:
    value = {"a": [TensorRef("model", "a.0"), 3], "b": PerRankRef(1)}
    assert stored(value) == value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "state: .*builtins.object"),
        ({"a": [1, {2}]}, r"state\['a'\]\[1\]: .*builtins.set"),
        ({"a": bytearray(b"x")}, r"state\['a'\]: .*bytearray"),
        ({1.5: "a"}, "keys of type str or int, got 1.5"),
        (torch.zeros(1, dtype=torch.complex128), "no dtype for torch.complex128"),
    ],
)
def test_what_would_not_come_back_is_refused(value: Any, where: str) -> None:
    with pytest.raises(TypeError, match=where):
        encode(value, path="state")


@pytest.mark.parametrize(
    "value",
    [
        {"$new": 1},
        {"$int": "zz"},
        {"$float": "00"},
        {"$bytes": "é"},
        {"$map": [[[], 1]]},
        {"$array": ["F32", [2], ""]},
        {"$array": ["F99", [0], ""]},
        {"$tuple": None},
    ],
)
def test_what_was_not_stored_is_not_read(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"extra\.json"):
        decode(value, label="extra.json")
