from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_ckpt._cut import box_runs, cut_leaves
from shard_comm import SoloComm
from shard_flat import shard_tensor


def test_the_example_of_the_docstring() -> None:
    assert list(box_runs((3, 5), (0, 1), (3, 2))) == [(1, 3), (6, 8), (11, 13)]
    assert list(box_runs((3, 5), (1, 0), (2, 5))) == [(5, 15)]


def test_corners() -> None:
    assert list(box_runs((), (), ())) == [(0, 1)]
    assert list(box_runs((4,), (1,), (0,))) == []
    assert list(box_runs((2, 3, 4), (0, 0, 0), (2, 3, 4))) == [(0, 24)]
    assert list(box_runs((2, 3, 4), (0, 1, 0), (2, 1, 4))) == [(4, 8), (16, 20)]


@given(st.data())
def test_runs_are_the_elements_of_the_box_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    offsets = [data.draw(st.integers(0, dim - 1)) for dim in shape]
    sizes = [data.draw(st.integers(0, dim - at)) for dim, at in zip(shape, offsets, strict=True)]
    box = torch.arange(math.prod(shape)).view(shape)
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        box = box.narrow(dim, at, size)
    runs = list(box_runs(shape, offsets, sizes))
    assert [i for start, stop in runs for i in range(start, stop)] == box.flatten().tolist()
    assert all(left[1] < right[0] for left, right in itertools.pairwise(runs))


def test_plain_and_sharded_tensors_are_one_leaf_each() -> None:
    tensors: dict[str, Any] = {
        "b": torch.zeros(2, 3),
        "a": shard_tensor(torch.zeros(4), comm=SoloComm()),
    }
    leaves = cut_leaves(tensors, section="model")
    assert [(leaf.name, leaf.start, leaf.stop) for leaf in leaves] == [("a", 0, 4), ("b", 0, 6)]


def test_a_tensor_without_memory_is_named() -> None:
    with pytest.raises(TypeError, match=r"model: w: a meta tensor has no elements"):
        cut_leaves({"w": torch.empty(2, device="meta")}, section="model")
