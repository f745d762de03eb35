from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import CheckpointError, PerRank, reindex, save, verify
from shard_comm import Comm
from shard_flat import shard_tensor
from shard_testing import STORED_DTYPES, run_threads


def make_checkpoint(path: Path, world_size: int, *, step: int = 3) -> Path:
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    tied = torch.ones(4)

    def rank(comm: Comm) -> None:
        model: dict[str, Any] = {str(dtype): raw.clone().view(dtype) for dtype in STORED_DTYPES}
        model |= {"w": shard_tensor(torch.arange(35.0).view(7, 5), comm=comm, name="w")}
        model |= {"none": torch.zeros(0, 3), "one": torch.tensor(1), "ä": tied, "b@0:2": tied}
        optim = {"state": {"w": {"m": shard_tensor(torch.arange(35.0), comm=comm, name="m")}}}
        state = {
            "model": model,
            "optim": {**optim, "param_groups": [{"lr": torch.tensor(0.5)}]},
            "big": {"t": torch.zeros(600_000)},
            "again": {"tied": tied},
            "step": step,
            "rng": PerRank(comm.rank),
        }
        save(state, path, comm=comm)

    run_threads(rank, world_size)
    return path


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_index_comes_out_as_it_was(tmp_path: Path, world_size: int) -> None:
    path = make_checkpoint(tmp_path / "a", world_size)
    index, marker = (path / "index.json").read_bytes(), (path / "COMMITTED").read_bytes()
    assert reindex(path) is False
    (path / "index.json").unlink()
    assert reindex(path) is True
    assert (path / "index.json").read_bytes() == index
    (path / "index.json").write_bytes(index[:-9])
    (path / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match="no COMMITTED marker, so it may never have been"):
        reindex(path)
    assert reindex(path, commit=True) is True
    assert (path / "index.json").read_bytes() == index
    assert (path / "COMMITTED").read_bytes() == marker
    assert verify(path) == ()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = make_checkpoint(tmp_path / "a", 2)
    (made / "index.json").unlink()
    return made


def test_altered_bytes_do_not_pass_the_marker(path: Path) -> None:
    file = path / "model-r00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"COMMITTED: expected .*; a file was altered"):
        reindex(path)
    assert not (path / "index.json").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optim-r00001-of-00002.safetensors", r"optim: w#m: expected elements \[0, 35\), got"),
        ("again-r00000-of-00002.safetensors", r"again: tied is in no file"),
        ("extra-r00001.json", r"extra-r00001\.json: the index does not list it"),
        ("extra-r00000.json", r"extra-r00000\.json: the index does not list it"),
    ],
)
def test_incomplete_folders_are_refused(path: Path, name: str, text: str) -> None:
    (path / "COMMITTED").unlink()
    if not (path / name).exists():  # the tied tensor lies in another rank's file
        name = name.replace("r00000", "r00001")
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=text):
        reindex(path, commit=True)
    assert not {"index.json", "COMMITTED"} & set(os.listdir(path))


def test_files_of_two_saves_are_refused(path: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "b", 2, step=4)
    name = "optim-r00001-of-00002.safetensors"
    shutil.copy(other / name, path / name)
    with pytest.raises(CheckpointError, match=r"optim-r00001-of-00002\.safetensors: from save"):
        reindex(path)


def test_files_under_other_names_are_refused(path: Path) -> None:
    shutil.copy(
        path / "optim-r00001-of-00002.safetensors", path / "optim-r00003-of-00002.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"r00003.*: expected the name optim-r00001-of"):
        reindex(path)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (b'\\"start\\":20', b'\\"start\\":19', "is not what it is described as"),
        (b'\\"fqn\\":\\"w\\"', b'\\"fqm\\":\\"w\\"', "is not described"),
        (b'"version":"2"', b'"version":"1"', "not of a checkpoint of format version 2"),
        (b'"rank":"1"', b'"rank":"x"', "does not say which rank and section it is from"),
        (b'\\"w@20:35\\":', b'\\"x@20:35\\":', "describes other tensors than it holds"),
    ],
)
def test_what_files_say_is_checked(path: Path, old: bytes, new: bytes, text: str) -> None:
    file = path / "model-r00001-of-00002.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert data[: 8 + length].count(old) == 1
    file.write_bytes(data.replace(old, new, 1))
    with pytest.raises(CheckpointError, match=rf"model-r00001-of-00002\.safetensors: .*{text}"):
        reindex(path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        reindex(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds no files of a checkpoint"):
        reindex(tmp_path, commit=True)
