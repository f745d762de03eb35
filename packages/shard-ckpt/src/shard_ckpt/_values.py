"""Values that are not tensors, as JSON that gives back exactly what was stored."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shard_ckpt._dtypes import dtype_name, torch_dtype
from shard_ckpt._errors import CheckpointError
from shard_ckpt._json import is_count
from shard_ckpt._memory import bytes_of


@dataclass(frozen=True, eq=False)
class PerRank:
    """Marks a value that differs between ranks, so that each rank's is stored.

    Without the mark rank 0's value is stored for all. Meant for small things: the state of a
    random generator, a position in the data. Tensors inside are stored whole by each rank.

    Attributes:
        value: numbers, strings, bytes, None, plain tensors, and lists, tuples and mappings of them.
    """

    value: Any


class RankValues(list[Any]):
    """What every saving rank stored under one ``PerRank``, in rank order.

    ``load`` returns it in the value's place where the number of ranks has changed. ``deal`` gives
    each of the new ranks its part.
    """

    def deal(self, rank: int, size: int) -> list[Any]:
        """Return the values that one of the new ranks takes over. Local.

        Runs of saving ranks go to the new ranks in order, as evenly as they can, each to exactly
        one. What 5 ranks stored goes to 2 ranks, and what 2 stored to 3, as::

            0 1 | 2 3 4
            | 0 | 1

        A rank that gets none has to start anew: from a seed of its own, say.

        Args:
            rank: the new rank.
            size: how many there are.

        Raises:
            ValueError: ``rank`` is not one of ``size``.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank: expected one of {size} ranks, got {rank}")
        return self[len(self) * rank // size : len(self) * (rank + 1) // size]


@dataclass(frozen=True)
class TensorRef:
    """Stands in a stored structure for a tensor that lies in a safetensors file."""

    section: str
    name: str


@dataclass(frozen=True)
class PerRankRef:
    """Stands in a stored structure for the ``number``-th per-rank value."""

    number: int


_PLAIN_INT = 2**63


def encode(value: Any, *, path: str) -> Any:
    """Turn a value into what JSON can say. Local.

    JSON's own types stand for themselves; everything else is an object with one key that begins
    with ``$``::

        1.5  "a"  [1, 2]     1.5  "a"  [1,2]
        (1, 2)               {"$tuple":[1,2]}
        b"ab"                {"$bytes":"YWI="}
        inf                  {"$float":"7ff0000000000000"}
        {0: "a"}             {"$map":[[0,"a"]]}

    Args:
        value: the value.
        path: where it stands in the state, for errors.

    Raises:
        TypeError: a type that would not come back as itself.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_PLAIN_INT <= value < _PLAIN_INT else {"$int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if kind is list or kind is tuple:
        items = [encode(item, path=f"{path}[{at}]") for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if isinstance(value, TensorRef):
        return {"$tensor": [value.section, value.name]}
    if isinstance(value, PerRankRef):
        return {"$per_rank": value.number}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path)
    if kind is torch.Tensor:
        return _encode_tensor(value, path)
    raise TypeError(
        f"{path}: expected a tensor, number, string, bytes, None, list, tuple or mapping, got "
        f"{kind.__module__}.{kind.__qualname__}; convert it to one of these"
    )


def decode(value: Any, *, label: str) -> Any:
    """Turn what ``encode`` made back into values; stand-ins come back as stand-ins. Local.

    Raises:
        CheckpointError: not something that ``encode`` makes.
    """
    if isinstance(value, list):
        return [decode(item, label=label) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, label=label) for key, item in value.items()}
    try:
        return _decode_tagged(tag, value[tag], label)
    except (KeyError, ValueError, TypeError, struct.error, binascii.Error) as exc:
        raise CheckpointError(f"{label}: a {tag!r} value cannot be read ({exc})") from exc


def _encode_mapping(value: Mapping[Any, Any], path: str) -> Any:
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"{path}: expected keys of type str or int, got {key!r}")
    pairs = [(key, encode(item, path=f"{path}[{key!r}]")) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$map": [[encode(key, path=path), item] for key, item in pairs]}


def _encode_tensor(value: torch.Tensor, path: str) -> Any:
    name = dtype_name(value.dtype)
    if name is None:
        raise TypeError(f"{path}: safetensors has no dtype for {value.dtype}; convert the tensor")
    host = value.detach().cpu().contiguous()
    data = base64.b64encode(bytes_of(host)).decode("ascii")
    return {"$array": [name, list(value.shape), data]}


def _decode_tagged(tag: str, item: Any, label: str) -> Any:
    if tag == "$int":
        return int(item, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(item))[0]
    if tag == "$bytes":
        return base64.b64decode(item, validate=True)
    if tag == "$tuple":
        return tuple(decode(part, label=label) for part in item)
    if tag == "$map":
        return {decode(key, label=label): decode(part, label=label) for key, part in item}
    if tag == "$tensor":
        section, name = item
        return TensorRef(section, name)
    if tag == "$per_rank":
        return PerRankRef(item)
    if tag == "$array":
        return _decode_tensor(*item)
    raise ValueError("unknown tag")


def _decode_tensor(name: str, shape: Any, data: str) -> torch.Tensor:
    dtype = torch_dtype(name)
    if dtype is None:
        raise ValueError(f"unknown dtype {name!r}")
    raw = bytearray(base64.b64decode(data, validate=True))
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise ValueError(f"not a shape: {shape!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(raw) != nbytes:
        raise ValueError(f"expected {nbytes} bytes for shape {shape}, got {len(raw)}")
    result = torch.empty(shape, dtype=dtype)
    bytes_of(result)[:] = raw
    return result
