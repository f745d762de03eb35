"""Importing Hugging Face folders."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from shard_ckpt import CheckpointError, Naming, _posix, load_hf
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import STORED_DTYPES, run_ranks, run_threads

W = torch.arange(35.0).view(7, 5)
B = torch.arange(5, dtype=torch.int64)


def write_folder(folder: Path, *files: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    table = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", {"a.w": W}, {"b": B, "s": torch.tensor(2.5)})


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_rank_gets_its_part(folder: Path, world_size: int) -> None:
    def rank(comm: Comm) -> torch.Tensor:
        w = shard_tensor(torch.zeros(7, 5), comm=comm)
        tensors = {"a.w": w, "b": torch.zeros(5, dtype=torch.int64), "s": torch.zeros(())}
        load_hf(tensors, folder, comm=comm)
        assert torch.equal(tensors["b"], B)
        assert tensors["s"].item() == 2.5
        return w.local

    parts = run_threads(rank, world_size)
    assert torch.equal(torch.cat(parts)[:35].view(7, 5), W)


def test_a_rank_reads_only_what_it_holds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into = _posix.read_into
    asked: list[int] = []

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if offset > 8:  # else a header
            asked.append(sum(len(view) for view in views))
        return read_into(fd, views, offset)

    def rank(comm: Comm) -> int:
        w = shard_tensor(torch.zeros(7, 5), comm=comm)
        load_hf({"a.w": w}, folder, comm=comm, strict=False)
        return w.local.nbytes

    monkeypatch.setattr(_posix, "read_into", counting)
    held = run_threads(rank, 2)
    assert sum(asked) == W.nbytes <= sum(held)


def test_a_module_with_buffers_and_one_file(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3)
    want = {name: torch.full_like(t, 4) for name, t in model.state_dict().items()}
    save_file(want, tmp_path / "any.safetensors")
    load_hf(model, tmp_path, comm=SoloComm())
    assert {name: t.unique().item() for name, t in model.state_dict().items()} == dict.fromkeys(
        want, 4
    )
    with torch.no_grad():
        model.weight.zero_()
    load_hf(model, tmp_path / "any.safetensors")
    assert model.weight.tolist() == [4.0] * 3


def test_every_dtype(tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    want = {str(dtype): raw.clone().view(dtype) for dtype in STORED_DTYPES}
    save_file(want, tmp_path / "model.safetensors")
    got = {name: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for name, t in want.items()}
    load_hf(got, tmp_path)
    for name, tensor in want.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_casting_is_asked_for(folder: Path) -> None:
    half = torch.zeros(7, 5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"a\.w: expected dtype torch\.bfloat16, got"):
        load_hf({"a.w": half}, folder, strict=False)
    assert half.count_nonzero() == 0
    load_hf({"a.w": half}, folder, strict=False, cast=True)
    assert torch.equal(half, W.bfloat16())
    with pytest.raises(ValueError, match=r"model: b: .*this is never cast"):
        load_hf({"b": torch.zeros(5)}, folder, strict=False, cast=True)


def test_names_must_be_the_same(folder: Path) -> None:
    tensors = {"a.w": torch.zeros(7, 5), "c": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"lacks model: c; the template lacks model: b, model: s"):
        load_hf(tensors, folder)
    with pytest.raises(ValueError, match=r"model: a\.w: expected shape \(5, 7\), got \(7, 5\)"):
        load_hf({"a.w": torch.zeros(5, 7)}, folder, strict=False)
    assert tensors["a.w"].count_nonzero() == 0


def test_wrappers_and_renames(folder: Path) -> None:
    compiled = torch.zeros(7, 5)
    load_hf(
        {"module._orig_mod.x": compiled},
        folder,
        names=Naming(prefix="module.", strip=("_orig_mod",), rename={"x": "a.w"}),
        strict=False,
    )
    assert torch.equal(compiled, W)


def test_one_name_is_enough_for_a_tied_parameter(folder: Path) -> None:
    w = torch.zeros(7, 5)
    rest = {"b": torch.zeros(5, dtype=torch.int64), "s": torch.zeros(())}
    load_hf({"z.w": w, "a.w": w, **rest}, folder)
    assert torch.equal(w, W)


def test_a_declared_tie_fills_what_files_lack(folder: Path) -> None:
    tensors = {"a.w": torch.zeros(7, 5), "head": torch.zeros(7, 5)}
    load_hf(tensors, folder, names=Naming(ties={"head": "a.w"}), strict=False)
    assert torch.equal(tensors["head"], W)
    assert torch.equal(tensors["a.w"], W)


def test_names_of_one_tensor_hold_the_same(tmp_path: Path) -> None:
    w = torch.zeros(7, 5)
    same = write_folder(tmp_path / "same", {"a": W}, {"b": W.clone()})
    load_hf({"a": w, "b": w}, same)
    assert torch.equal(w, W)
    w.zero_()
    other = write_folder(tmp_path / "other", {"a": W}, {"b": W + 1})
    with pytest.raises(ValueError, match="a and model: b share memory here, but differ in"):
        load_hf({"a": w, "b": w}, other)
    kinds = write_folder(tmp_path / "kinds", {"a": W}, {"b": W.double()})
    with pytest.raises(ValueError, match=r"dtypes F32 and F64"):
        load_hf({"a": w, "b": w}, kinds, cast=True)
    assert w.count_nonzero() == 0


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda f: os.unlink(f), r"model-00002-of-00002\.safetensors: missing"),
    "short": (lambda f: os.truncate(f, 200), r"00002-of-00002\.safetensors: expected \d+ bytes"),
    "swapped": (
        lambda f: f.write_bytes((f.parent / "model-00001-of-00002.safetensors").read_bytes()),
        r"model-00002-of-00002\.safetensors: holds 'a\.w', which the index says is model-00001",
    ),
    "empty": (lambda f: f.write_bytes(b""), r"00002-of-00002\.safetensors: too short"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folders_are_refused_on_all_ranks(folder: Path, kind: str) -> None:
    damage, text = DAMAGE[kind]
    damage(folder / "model-00002-of-00002.safetensors")

    def rank(comm: Comm) -> int:
        w = torch.zeros(7, 5)
        with pytest.raises(CheckpointError, match=text):
            load_hf({"a.w": w}, folder, comm=comm, strict=False)
        return int(w.count_nonzero())

    assert run_threads(rank, 2) == [0, 0]


def test_an_index_that_promises_more_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    table = json.loads(path.read_text())
    table["weight_map"]["more"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"00001-of-00002\.safetensors: lacks 'more'"):
        load_hf({}, folder)
    table["weight_map"]["more"] = "../model.safetensors"
    path.write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"more is said to be in '\.\./model\.safetensors'"):
        load_hf({}, folder)


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        load_hf({}, tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds neither"):
        load_hf({}, tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"a": W}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds 2 safetensors files and no"):
        load_hf({}, tmp_path)


def test_what_is_no_tensor_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match="a: expected a tensor, got int"):
        load_hf({"a": 3}, folder)


def _fill_dtensors(comm: Comm, folder: Path) -> dict[str, list[float]]:
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    placed: dict[str, tuple[DeviceMesh, list[Placement]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "whole": (line, [Replicate()]),
        "tiles": (grid, [Shard(0), Shard(1)]),
        "rows of rows": (grid, [Shard(0), Shard(0)]),
    }
    result = {}
    for name, (mesh, placements) in placed.items():
        w = distribute_tensor(torch.zeros(7, 5), mesh, placements)
        load_hf({"a.w": w}, folder, comm=comm, strict=False)
        assert torch.equal(w.full_tensor(), W), name
        result[name] = w.to_local().flatten().tolist()
    return result


def test_dtensors_of_any_placement(folder: Path) -> None:
    parts = run_ranks(_fill_dtensors, 4, folder)
    assert parts[0]["rows"] == W[:2].flatten().tolist()
    assert parts[3]["columns"] == []  # 5 columns over 4 ranks are 2, 2 and 1
    assert parts[3]["whole"] == W.flatten().tolist()
    assert parts[1]["tiles"] == W[:4, 3:].flatten().tolist()
