from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import CheckpointError, Difference, diff, save
from shard_comm import Comm
from shard_flat import shard_tensor
from shard_testing import STORED_DTYPES, run_threads


def write(path: Path, state: dict[str, Any], world_size: int = 1) -> Path:
    def rank(comm: Comm) -> None:
        model = {
            name: shard_tensor(tensor, comm=comm, name=name)
            if tensor.is_floating_point() and tensor.itemsize > 1
            else tensor
            for name, tensor in state["model"].items()
        }
        save({**state, "model": model}, path, comm=comm)

    run_threads(rank, world_size)
    return path


def test_worlds_make_no_difference(tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    model = {str(dtype): raw.clone().view(dtype) for dtype in STORED_DTYPES}
    state = {"model": model, "nan": math.nan, "t": (1, 2), "none": {}}
    a, b = write(tmp_path / "a", state), write(tmp_path / "b", state, 3)
    assert diff(a, b) == ()


def test_differences_are_told(tmp_path: Path) -> None:
    w = torch.arange(35.0).view(7, 5)
    changed = w.clone()
    changed[3, 2:4] += torch.tensor([0.5, -2.0])
    base = {"same": torch.ones(2), "w": w, "i": torch.arange(3), "s": w, "d": w, "a": w}
    other = {**base, "w": changed, "i": torch.tensor([0, 9, 2]), "s": w.T, "d": w.double()}
    del other["a"]
    a = write(tmp_path / "a", {"model": base, "step": 3, "x": {"lr": [0.1]}}, 2)
    b = write(tmp_path / "b", {"model": {**other, "b": w}, "step": 4, "x": {"wd": 0}}, 3)
    assert diff(a, b) == (
        Difference("model: a", "only in a", f"only in {a}"),
        Difference("model: b", "only in b", f"only in {b}"),
        Difference("model: d", "dtype", "F32 and F64"),
        Difference("model: i", "elements", "1 of 3 elements differ"),
        Difference("model: s", "shape", "(7, 5) and (5, 7)"),
        Difference("model: w", "elements", "2 of 35 elements differ, by 2 at most"),
        Difference("state['step']", "value", "3 and 4"),
        Difference("state['x']['lr']", "only in a", f"only in {a}"),
        Difference("state['x']['wd']", "only in b", f"only in {b}"),
    )


def test_bits_count_not_values(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"model": {"w": torch.tensor([0.0, 1.0])}})
    b = write(tmp_path / "b", {"model": {"w": torch.tensor([-0.0, 1.0])}})
    assert [item.text for item in diff(a, b)] == ["1 of 2 elements differ"]
    c = write(tmp_path / "c", {"model": {"w": torch.tensor([math.nan, 1.0])}})
    assert [item.text for item in diff(a, c)] == ["1 of 2 elements differ, by inf at most"]


def test_tensors_longer_than_a_window(tmp_path: Path) -> None:
    long = torch.zeros(3_000_000)
    other = long.clone()
    other[[0, 1_500_000, 2_999_999]] = torch.tensor([1.0, 3.0, 2.0])
    a = write(tmp_path / "a", {"model": {"w": long}}, 2)
    b = write(tmp_path / "b", {"model": {"w": other}}, 3)
    assert [i.text for i in diff(a, b)] == ["3 of 3000000 elements differ, by 3 at most"]


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    a = write(tmp_path / "a", {"model": {"w": torch.ones(2)}})
    with pytest.raises(FileNotFoundError, match="none: no such checkpoint"):
        diff(a, tmp_path / "none")
    with pytest.raises(CheckpointError, match="no COMMITTED marker"):
        diff(tmp_path, a)
