"""Very many tensors, each very small."""

from __future__ import annotations

from pathlib import Path

import torch

from shard_ckpt import inspect, load, save
from shard_comm import SoloComm

COUNT = 100_000


def make_parts(flat: torch.Tensor) -> dict[str, torch.Tensor]:
    """A few elements each, views of one tensor; every tenth is 0-dim, every tenth empty."""
    parts = {}
    for number in range(COUNT):
        part = flat[3 * number : 3 * number + 3]
        kind = number % 10
        parts[f"p{number}"] = part[0] if kind == 0 else part[:0] if kind == 1 else part[:kind]
    return parts


def test_100_000_tiny_tensors(tmp_path: Path) -> None:
    flat = torch.arange(3.0 * COUNT)
    save({"m": make_parts(flat)}, tmp_path / "a", comm=SoloComm())
    assert len(inspect(tmp_path / "a").tensors) == COUNT
    found = torch.full((3 * COUNT,), -1.0)
    load({"m": make_parts(found)}, tmp_path / "a", comm=SoloComm())
    rows, kinds = flat.view(-1, 3).clone(), torch.arange(COUNT) % 10
    rows[kinds == 0, 1:] = -1
    rows[kinds == 1] = -1
    rows[kinds == 2, 2] = -1
    assert torch.equal(found.view(-1, 3), rows)
