"""Finding and mapping tensors in arguments and outputs."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass
from typing import Any

import torch

from shard_fsdp._walk import find_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])


@dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor
    note: str


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Private:
    __slots__ = ("__tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__tensor = tensor


class Loop:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.me = self


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose values are attributes too, as in well-known model libraries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def _found(value: Any) -> tuple[int, bool]:
    into: list[torch.Tensor] = []
    known = find_tensors(value, into)
    return len({id(t) for t in into}), known


def test_find_counts_every_tensor() -> None:
    a, b = torch.ones(1), torch.ones(2)
    assert _found([a, (b, {"k": [None, 1, "text", 2.5, torch.float32]})]) == (2, True)
    assert _found(Pair(a, Frozen(b, "note"))) == (2, True)
    assert _found([Slotted(a), Loop(b)]) == (2, True)
    assert _found({a, b}) == (2, True)
    assert _found([deque([a]), {"k": b}.values()]) == (2, True)
    assert _found(Private(a)) == (1, True)
    assert _found(ModelOutput(logits=a)) == (1, True)


def test_find_says_where_it_cannot_look() -> None:
    a = torch.ones(1)
    assert _found([a, lambda: a]) == (1, False)
    assert _found(iter([a])) == (0, False)
    assert _found([torch.nn.Identity(), a]) == (1, False)


def test_map_rebuilds_only_what_changes() -> None:
    low, high = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)

    def widen(t: torch.Tensor) -> torch.Tensor:
        return t.float()

    same = [high, {"k": (high, "text")}]
    assert map_tensors(widen, same) is same
    mapped = map_tensors(widen, Pair(low, [high, Frozen(low, "note")]))
    assert isinstance(mapped, Pair)
    assert mapped.left.dtype == torch.float32
    assert mapped.right[0] is high
    assert mapped.right[1].tensor.dtype == torch.float32
    assert mapped.right[1].note == "note"


def test_map_keeps_the_kind_of_mapping() -> None:
    output: Any = ModelOutput(logits=torch.ones(1, dtype=torch.bfloat16), loss=None)
    mapped: Any = map_tensors(lambda t: t.float(), output)
    assert type(mapped).__name__ == "ModelOutput"
    assert mapped.logits.dtype == torch.float32
    assert mapped["logits"] is mapped.logits
    assert output.logits.dtype == torch.bfloat16


class Tagged(list[Any]):
    def __init__(self, items: list[Any], tag: str) -> None:
        super().__init__(items)
        self.tag = tag


def test_map_keeps_subclasses_of_sequences() -> None:
    low = torch.ones(1, dtype=torch.bfloat16)
    mapped = map_tensors(lambda t: t.float(), Tagged([low, 1], "tag"))
    assert type(mapped) is Tagged
    assert mapped.tag == "tag"
    assert mapped[0].dtype == torch.float32


def test_find_goes_as_deep_as_it_must() -> None:
    nested: Any = torch.ones(1)
    for _ in range(5_000):
        nested = [nested]
    assert _found(nested) == (1, True)
