from __future__ import annotations

import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shard_ckpt import load, verify
from shard_ckpt._lazy import LazyTensors, save_lazy
from shard_comm import SoloComm
from shard_testing import STORED_DTYPES


def test_tensors_are_read_one_after_another(tmp_path: Path) -> None:
    lazy = LazyTensors()
    order: list[int] = []
    made: list[weakref.ref[Any]] = []

    def reader(number: int) -> torch.Tensor:
        assert all(memory() is None for memory in made), "two tensors are in memory"
        order.append(number)
        memory = np.full((3, 2), number)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    model = {str(n): lazy.add(torch.int64, (3, 2), partial(reader, n)) for n in range(4)}
    assert all(tensor.untyped_storage().nbytes() == 8 for tensor in model.values())
    save_lazy({"model": model, "step": 5}, tmp_path / "a", lazy=lazy)
    assert order == [0, 1, 2, 3]
    assert verify(tmp_path / "a") == ()
    want = {str(n): torch.zeros(3, 2, dtype=torch.int64) for n in range(4)}
    assert load({"model": want, "step": 0}, tmp_path / "a", comm=SoloComm())["step"] == 5
    assert [int(tensor.sum()) for tensor in want.values()] == [0, 6, 12, 18]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 4)])
def test_every_dtype_has_stand_ins(shape: tuple[int, ...]) -> None:
    lazy = LazyTensors()
    for dtype in STORED_DTYPES:
        stand_in = lazy.add(dtype, shape, partial(torch.zeros, shape))
        assert (stand_in.dtype, stand_in.shape) == (dtype, torch.Size(shape))


def test_what_is_no_stand_in_is_itself() -> None:
    tensor = torch.ones(2)
    assert LazyTensors().read(tensor) is tensor


def test_the_same_stand_in_is_one_tensor(tmp_path: Path) -> None:
    lazy = LazyTensors()
    w = lazy.add(torch.float32, (4,), lambda: torch.arange(4.0))
    save_lazy({"model": {"a": w, "b": w}}, tmp_path / "a", lazy=lazy)
    a, b = torch.zeros(4), torch.zeros(4)
    load({"model": {"a": a, "b": b}}, tmp_path / "a", comm=SoloComm())
    assert a.tolist() == b.tolist() == [0, 1, 2, 3]
    data = (tmp_path / "a" / "model-r00000-of-00001.safetensors").stat().st_size
    assert data % 4096 == 16


def test_a_read_that_fails_leaves_nothing(tmp_path: Path) -> None:
    lazy = LazyTensors()
    fine = lazy.add(torch.float32, (4,), lambda: torch.zeros(4))
    wrong = lazy.add(torch.float32, (4,), lambda: torch.zeros(5))
    with pytest.raises(AssertionError, match=r"expected torch\.float32 of shape \(4,\), read"):
        save_lazy({"model": {"a": fine, "b": wrong}}, tmp_path / "a", lazy=lazy)
    assert os.listdir(tmp_path) == []
