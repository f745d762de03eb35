from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from shard_ckpt import CheckpointError, PerRank, inspect, save, verify
from shard_comm import Comm
from shard_flat import shard_tensor
from shard_testing import run_threads


@pytest.fixture
def path(tmp_path: Path) -> Path:
    def rank(comm: Comm) -> None:
        state = {
            "model": {"w": shard_tensor(torch.ones(4, 4), comm=comm), "b": torch.ones(3).half()},
            "step": 9,
            "rng": PerRank(comm.rank),
        }
        save(state, tmp_path / "a", comm=comm)

    run_threads(rank, 2)
    return tmp_path / "a"


def test_what_a_checkpoint_holds(path: Path) -> None:
    info = inspect(path)
    assert (info.path, info.world_size, len(info.save_id)) == (path, 2, 32)
    assert [(r.section, r.name, r.dtype, r.shape, r.numel) for r in info.tensors] == [
        ("model", "b", "F16", (3,), 3),
        ("model", "w", "F32", (4, 4), 16),
    ]
    assert [len(record.ranges) for record in info.tensors] == [1, 2]
    assert info.values == {"step": 9, "rng": [0, 1]}
    on_disk = {name: (path / name).stat().st_size for name in os.listdir(path)}
    assert {file.name: file.nbytes for file in info.files} == {
        name: size for name, size in on_disk.items() if name not in ("index.json", "COMMITTED")
    }
    assert info.nbytes == sum(file.nbytes for file in info.files)


def test_an_intact_checkpoint_has_no_problems(path: Path) -> None:
    assert verify(path) == ()


def test_every_problem_is_listed(path: Path) -> None:
    first, second = sorted(path.glob("model-*.safetensors"))
    data = bytearray(first.read_bytes())
    data[5] ^= 1
    first.write_bytes(data)
    second.unlink()
    (path / "extra-r00007.json").write_bytes(b"")
    problems = verify(path)
    assert len(problems) == 3
    assert f"{first}: bytes 0 to" in problems[0]
    assert "the header, model: " in problems[0]
    assert problems[1] == f"{second}: missing, though the index lists it"
    assert problems[2] == f"{path / 'extra-r00007.json'}: not in the index"


def test_without_a_marker_there_is_one_problem(path: Path) -> None:
    (path / "COMMITTED").unlink()
    assert verify(path) == (f"{path}: no COMMITTED marker, so it is not a finished checkpoint",)
    with pytest.raises(CheckpointError, match="no COMMITTED marker"):
        inspect(path)


def test_damaged_values_are_a_problem(path: Path) -> None:
    raw = (path / "extra-r00001.json").read_bytes()
    (path / "extra-r00001.json").write_bytes(raw.replace(b"[1]", b"[7]"))
    (problem,) = verify(path)
    assert "extra-r00001.json: bytes 0 to" in problem
    assert "values that are not tensors" in problem
    with pytest.raises(CheckpointError, match=r"extra-r00001.json: altered"):
        inspect(path)


def test_no_folder_is_no_file(tmp_path: Path) -> None:
    for look in (inspect, verify):
        with pytest.raises(FileNotFoundError, match="no such checkpoint"):
            look(tmp_path / "a")


def test_the_index_is_readable_by_anyone(path: Path) -> None:
    table = json.loads((path / "index.json").read_text())
    assert sorted(table) == ["files", "save_id", "tensors", "version", "world_size"]
    assert table["tensors"]["model"]["b"]["shape"] == [3]
