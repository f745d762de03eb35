"""Converting from and to torch's formats and Hugging Face files."""

from __future__ import annotations

import collections
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shard_ckpt import CheckpointError, PerRank, convert, inspect, load, save, verify
from shard_ckpt._dcp_read import _overlap
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_ranks, run_threads

W = torch.arange(35.0).view(7, 5)


def full_state() -> dict[str, Any]:
    """A model and its AdamW state under names, as full state dicts of FSDP are."""
    slots = {"step": torch.tensor(3.0), "exp_avg": W + 1, "exp_avg_sq": W + 2}
    return {
        "model": collections.OrderedDict({"a.w": W.clone(), "b": torch.arange(3)}),
        "optim": {
            "state": {"a.w": slots},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a.w"]}],
        },
        "epoch": 4,
    }


def check_state(path: Path) -> None:
    """Check that a checkpoint holds ``full_state``."""
    assert verify(path) == ()
    empty = torch.zeros(7, 5)
    template = {
        "model": {"a.w": empty.clone(), "b": torch.zeros(3, dtype=torch.int64)},
        "optim": {
            "state": {
                "a.w": {
                    "step": torch.tensor(0.0),
                    "exp_avg": empty.clone(),
                    "exp_avg_sq": empty.clone(),
                }
            },
            "param_groups": [{}],
        },
        "epoch": 0,
    }
    got = load(template, path, comm=SoloComm())
    assert got["epoch"] == 4
    assert torch.equal(got["model"]["a.w"], W)
    assert got["model"]["b"].tolist() == [0, 1, 2]
    slots = got["optim"]["state"]["a.w"]
    assert slots["step"].item() == 3
    assert torch.equal(slots["exp_avg"], W + 1)
    assert torch.equal(slots["exp_avg_sq"], W + 2)
    (group,) = got["optim"]["param_groups"]
    assert (group["lr"], list(group["betas"]), group["params"]) == (0.1, [0.9, 0.95], ["a.w"])


@pytest.mark.parametrize("zipped", [True, False])
def test_a_torch_file(tmp_path: Path, zipped: bool) -> None:
    torch.save(full_state(), tmp_path / "f.pt", _use_new_zipfile_serialization=zipped)
    convert(tmp_path / "f.pt", tmp_path / "c")
    check_state(tmp_path / "c")


def test_a_bare_state_dict_is_a_model(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 3).state_dict(), tmp_path / "f.bin")
    convert(tmp_path / "f.bin", tmp_path / "c")
    assert [r.label for r in inspect(tmp_path / "c").tensors] == ["model: bias", "model: weight"]


def test_a_bare_optimizer_state_gets_names_where_groups_have_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    convert(tmp_path / "o.pt", tmp_path / "c")
    info = inspect(tmp_path / "c")
    assert [record.name for record in info.tensors] == [
        f"{name}#{slot}"
        for name in ("bias", "weight")
        for slot in ("exp_avg", "exp_avg_sq", "step")
    ]
    assert info.values["optim"]["param_groups"][0]["params"] == ["weight", "bias"]


def test_shared_memory_in_a_file_stays_one_tensor(tmp_path: Path) -> None:
    torch.save({"a": W, "b": W}, tmp_path / "f.pt")
    convert(tmp_path / "f.pt", tmp_path / "c")
    assert [record.tie for record in inspect(tmp_path / "c").tensors] == [None, ("model", "a")]


def test_sections_are_renamed_and_skipped(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": W}, "args": object, "n": 3}, tmp_path / "f.pt")
    with pytest.raises(TypeError, match=r"state\['args'\]: expected a tensor, number"):
        convert(tmp_path / "f.pt", tmp_path / "c")
    convert(tmp_path / "f.pt", tmp_path / "c", sections={"state_dict": "model"}, skip=("args",))
    info = inspect(tmp_path / "c")
    assert ([r.label for r in info.tensors], info.values) == (["model: w"], {"n": 3})
    with pytest.raises(ValueError, match=r"some of \['args', 'n', 'state_dict'\], got 'x'"):
        convert(tmp_path / "f.pt", tmp_path / "d", skip=("x",))


class Trap:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_nothing_in_a_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"w": W, "x": Trap()}, tmp_path / "f.pt")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"f\.pt: .*GLOBAL posix\.mkdir whose module"):
        convert(tmp_path / "f.pt", tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"it names posix\.mkdir, which is not let through"):
        convert(tmp_path / "d", tmp_path / "c")
    assert sorted(os.listdir(tmp_path)) == ["d", "f.pt"]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.pt").write_bytes(b"PK\x03\x04 and nothing more")
    with pytest.raises(CheckpointError, match=r"f\.pt: cannot be read as a torch\.save file"):
        convert(tmp_path / "f.pt", tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        convert(tmp_path / "none", tmp_path / "c")
    with pytest.raises(CheckpointError, match="not a checkpoint of a known format"):
        convert(tmp_path, tmp_path / "c")
    torch.save([1], tmp_path / "g.pt")
    with pytest.raises(CheckpointError, match="expected a mapping, holds list"):
        convert(tmp_path / "g.pt", tmp_path / "c")
    torch.save({"a": W, "model": {}}, tmp_path / "h.pt")
    with pytest.raises(CheckpointError, match="tensors beside a section 'model', such as 'a'"):
        convert(tmp_path / "h.pt", tmp_path / "c")
    with pytest.raises(ValueError, match="target_format: expected 'shard' or 'dcp', got 'hf'"):
        convert(tmp_path / "g.pt", tmp_path / "c", target_format="hf")
    with pytest.raises(ValueError, match="source_format: expected one of"):
        convert(tmp_path / "g.pt", tmp_path / "c", source_format="npz")


def test_hugging_face_files(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    save_file({"w": W}, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "c")
    got = torch.zeros(7, 5)
    load({"model": {"w": got}}, tmp_path / "c", comm=SoloComm())
    assert torch.equal(got, W)


# --- torch.distributed.checkpoint ---------------------------------------------------------------


def _save_dcp(comm: Comm, folder: Path) -> None:
    state = full_state()
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    slots = state["optim"]["state"]["a.w"]
    state["model"]["a.w"] = distribute_tensor(W, line, [Shard(0)])
    slots["exp_avg"] = distribute_tensor(slots["exp_avg"], grid, [Shard(1), Shard(0)])
    slots["exp_avg_sq"] = distribute_tensor(slots["exp_avg_sq"], grid, [Replicate(), Shard(1)])
    save_dcp(state, checkpoint_id=folder)


def test_a_dcp_folder_of_four_ranks(tmp_path: Path) -> None:
    run_ranks(_save_dcp, 4, tmp_path / "d")
    convert(tmp_path / "d", tmp_path / "c")
    check_state(tmp_path / "c")


def make_dcp(folder: Path, state: dict[str, Any] | None = None) -> Path:
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        save_dcp(state or full_state(), checkpoint_id=folder, no_dist=True)
    return folder


def test_a_dcp_folder_of_a_bare_model(tmp_path: Path) -> None:
    make_dcp(tmp_path / "d", {"a.w": W, "b": W + 1})
    convert(tmp_path / "d", tmp_path / "c")
    assert [r.label for r in inspect(tmp_path / "c").tensors] == ["model: a.w", "model: b"]


def test_damaged_dcp_folders_are_refused(tmp_path: Path) -> None:
    folder = make_dcp(tmp_path / "d")
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: \S+ cannot be read"):
        convert(folder, tmp_path / "c")
    data.unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: missing; it holds "):
        convert(folder, tmp_path / "c")
    (folder / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match="holds NoneType, not Metadata"):
        convert(folder, tmp_path / "c")
    assert os.listdir(tmp_path) == ["d"]


def test_dcp_metadata_that_does_not_cover_is_refused(tmp_path: Path) -> None:
    folder = make_dcp(tmp_path / "d")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["model.a.w"]
    stored.size = torch.Size((8, 5))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"a\.w: expected 40 elements, its chunks hold 35"):
        convert(folder, tmp_path / "c")
    stored.size = torch.Size((5, 7))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"a\.w: a chunk at \(0, 0\) of \(7, 5\) is not"):
        convert(folder, tmp_path / "c")


def test_dcp_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    folder = make_dcp(tmp_path / "d")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["model.a.w"]
    (chunk,) = stored.chunks
    top, bottom = [type(chunk)(torch.Size((r, 0)), torch.Size((4, 5))) for r in (0, 3)]
    stored.chunks, stored.size = [bottom, top], torch.Size((8, 5))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"chunks at \(0, 0\) and \(3, 0\) hold the same"):
        convert(folder, tmp_path / "c")


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 2))], None),
        ([((0, 0), (3, 3)), ((2, 2), (2, 3))], ((0, 0), (2, 2))),
        ([((0, 0), (3, 3)), ((1, 1), (0, 3))], None),
        ([((), ())], None),
        ([((), ()), ((), ())], ((), ())),
        ([], None),
    ],
)
def test_overlaps_are_found(chunks: list[Any], found: Any) -> None:
    assert _overlap(chunks) == found


def sharded_checkpoint(path: Path, world_size: int) -> Path:
    def rank(comm: Comm) -> None:
        state = full_state()
        for tensors, name in [
            (state["model"], "a.w"),
            (state["optim"]["state"]["a.w"], "exp_avg"),
            (state["optim"]["state"]["a.w"], "exp_avg_sq"),
        ]:
            tensors[name] = shard_tensor(tensors[name], comm=comm, name=name)
        save({**state, "rng": PerRank(comm.rank)}, path, comm=comm)

    run_threads(rank, world_size)
    return path


@pytest.mark.parametrize("world_size", [1, 3])
def test_to_dcp_and_back(tmp_path: Path, world_size: int) -> None:
    ckpt = sharded_checkpoint(tmp_path / "c", world_size)
    convert(ckpt, tmp_path / "d", target_format="dcp")
    state = full_state()
    for tensors in (state["model"], state["optim"]["state"]["a.w"]):
        for tensor in tensors.values():
            tensor.zero_()
    state["epoch"] = 0
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load_dcp(state, checkpoint_id=tmp_path / "d", no_dist=True)
    assert torch.equal(state["model"]["a.w"], W)
    assert torch.equal(state["optim"]["state"]["a.w"]["exp_avg"], W + 1)
    assert state["epoch"] == 4
    convert(tmp_path / "d", tmp_path / "e", skip=("rng",))
    check_state(tmp_path / "e")


def test_to_dcp_takes_nothing_unverified(tmp_path: Path) -> None:
    ckpt = sharded_checkpoint(tmp_path / "c", 2)
    path = ckpt / "optim-r00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"optim-r00001-of-00002\.safetensors: bytes 0 to"):
        convert(ckpt, tmp_path / "d", target_format="dcp")
    assert os.listdir(tmp_path) == ["c"]


def test_to_dcp_says_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = sharded_checkpoint(tmp_path / "c", 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(ckpt, tmp_path / "d", target_format="dcp")

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("enforce fail")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", broken)
    with pytest.raises(OSError, match=r"could not write it: \[RuntimeError\('enforce fail'\)\]"):
        convert(ckpt, tmp_path / "d", target_format="dcp")
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("target_format", ["shard", "dcp"])
def test_targets_are_never_replaced(tmp_path: Path, target_format: str) -> None:
    folder = make_dcp(tmp_path / "d")
    (tmp_path / "c").mkdir()
    with pytest.raises(FileExistsError):
        convert(folder, tmp_path / "c", target_format=target_format)
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


def test_keys_that_are_one_as_strings_are_refused(tmp_path: Path) -> None:
    torch.save({1: {"a": W}, "1": {"b": W}}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"two of the keys \[1, '1'\] are one as strings"):
        convert(tmp_path / "a.pt", tmp_path / "c")


def test_an_optimizer_keeps_its_numbers_where_names_are_not_its_own(tmp_path: Path) -> None:
    slots = {0: {"exp_avg": W}, 1: {"exp_avg": W + 1}}
    groups = [{"params": [n], "param_names": ["weight"]} for n in range(2)]
    torch.save({"optim": {"state": slots, "param_groups": groups}}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "c")
    assert [t.name for t in inspect(tmp_path / "c").tensors] == ["0#exp_avg", "1#exp_avg"]


@pytest.mark.parametrize("groups", [3, [3], [{"param_names": ["w"]}], [{"params": [0, 1]}]])
def test_an_optimizer_with_strange_groups_is_taken_as_it_is(tmp_path: Path, groups: Any) -> None:
    state = {"state": {0: {"exp_avg": W}}, "param_groups": groups}
    torch.save({"optim": state}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "c")
    (tensor,) = inspect(tmp_path / "c").tensors
    assert tensor.name == "0#exp_avg"
    assert inspect(tmp_path / "c").values["optim"]["param_groups"] == groups


@pytest.mark.parametrize("raw", [b"\x80\x02a.", b"\x80\x04\x95" + b"\xff" * 8, b"\x80\x02"])
def test_pickles_that_break_off_are_damage(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"a\.pt: cannot be read as a torch\.save file"):
        convert(tmp_path / "a.pt", tmp_path / "c")
    folder = make_dcp(tmp_path / "d")
    (folder / ".metadata").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"\.metadata: cannot be read"):
        convert(folder, tmp_path / "c")


def test_dcp_metadata_without_its_fields_is_damage(tmp_path: Path) -> None:
    folder = make_dcp(tmp_path / "d")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        del info.__dict__["relative_path"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is said to be in None"):
        convert(folder, tmp_path / "c")
    del metadata.state_dict_metadata["model.a.w"].__dict__["chunks"]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata: not laid out as torch .*'chunks'"):
        convert(folder, tmp_path / "c")
