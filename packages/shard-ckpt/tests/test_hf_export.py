"""Exporting checkpoints as Hugging Face folders."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shard_ckpt import CheckpointError, Naming, _posix, export_hf, load_hf, save
from shard_ckpt._hf_layout import parse_size
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import STORED_DTYPES, run_threads

BIG = torch.arange(9_000_000, dtype=torch.int32).view(3000, 3000).float()  # three blocks


def make_state(comm: Comm) -> dict[str, Any]:
    table = torch.arange(60.0).view(12, 5)
    return {
        "model": {
            "embed.weight": table,
            "head.weight": table,
            "layers.10.w": shard_tensor(torch.arange(77.0).view(7, 11) + 10, comm=comm, name="m"),
            "layers.2.w": shard_tensor(torch.arange(35.0).view(5, 7), comm=comm, name="n"),
            "layers.2.b": torch.arange(5).bfloat16(),
            "seen": torch.tensor(7),
            "none": torch.zeros(0, 4),
        },
        "step": 3,
    }


def expected() -> dict[str, torch.Tensor]:
    model = make_state(SoloComm())["model"]
    return {n: t.full_tensor() if hasattr(t, "spec") else t for n, t in model.items()}


def make_checkpoint(path: Path, world_size: int = 3) -> Path:
    run_threads(lambda comm: save(make_state(comm), path, comm=comm), world_size)
    return path


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "ckpt")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Read a folder with the safetensors library alone, by the rules of its layout."""
    names = sorted(os.listdir(folder))
    if names == ["model.safetensors"]:
        return load_file(folder / names[0])
    assert names.pop() == "model.safetensors.index.json"
    count = len(names)
    assert names == [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    table = json.loads((folder / "model.safetensors.index.json").read_bytes())
    result = {}
    for name in names:
        with safe_open(folder / name, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for key in opened.keys():  # noqa: SIM118  # not a mapping
                assert table["weight_map"].pop(key) == name
                result[key] = opened.get_tensor(key)
    assert table["weight_map"] == {}
    assert table["metadata"]["total_size"] == sum(t.nbytes for t in result.values())
    assert table["metadata"]["total_parameters"] == sum(t.numel() for t in result.values())
    return result


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_one_file_at_any_world(ckpt: Path, tmp_path: Path, world_size: int) -> None:
    made = run_threads(lambda comm: export_hf(ckpt, tmp_path / "hf", comm=comm), world_size)
    assert made == [("model.safetensors",)] * world_size
    assert_same(read_folder(tmp_path / "hf"), expected())


@pytest.mark.parametrize("world_size", [1, 3])
def test_files_of_limited_size(ckpt: Path, tmp_path: Path, world_size: int) -> None:
    folder = tmp_path / "hf"
    run_threads(lambda comm: export_hf(ckpt, folder, comm=comm, max_shard_size=400), world_size)
    assert_same(read_folder(folder), expected())
    held = [sorted(load_file(path)) for path in sorted(folder.glob("*.safetensors"))]
    # 240 + 240 > 400; layer 2 comes before layer 10; 10 + 140 + 308 > 400; 308 + 8 is not
    assert held == [
        ["embed.weight"],
        ["head.weight", "layers.2.b", "layers.2.w"],
        ["layers.10.w", "none", "seen"],
    ]


def test_blocks_are_written_from_any_rank(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        state = {"model": {"big": shard_tensor(BIG, comm=comm), "small": torch.ones(3)}}
        save(state, tmp_path / "c", comm=comm)
        export_hf(tmp_path / "c", tmp_path / "hf", comm=comm)
        export_hf(tmp_path / "c", tmp_path / "half", comm=comm, cast=torch.bfloat16)

    run_threads(rank, 2)
    want = {"big": BIG, "small": torch.ones(3)}
    assert_same(read_folder(tmp_path / "hf"), want)
    assert_same(read_folder(tmp_path / "half"), {n: t.bfloat16() for n, t in want.items()})


def test_every_dtype(tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (3, 16), dtype=torch.uint8)
    want = {str(dtype): raw.clone().view(dtype) for dtype in STORED_DTYPES}
    save({"model": want}, tmp_path / "c", comm=SoloComm())
    export_hf(tmp_path / "c", tmp_path / "hf")
    got = {name: torch.zeros_like(raw).view(t.dtype) for name, t in want.items()}
    load_hf(got, tmp_path / "hf")
    assert all(torch.equal(t.view(torch.uint8), raw) for t in got.values())
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as opened:
        assert sorted(opened.keys()) == sorted(want)


def test_casting_leaves_integers_alone(ckpt: Path, tmp_path: Path) -> None:
    export_hf(ckpt, tmp_path / "hf", cast=torch.float16)
    got = read_folder(tmp_path / "hf")
    assert got["seen"].dtype == torch.int64
    assert got["layers.2.b"].dtype == got["layers.2.w"].dtype == torch.float16
    assert torch.equal(got["layers.2.w"], expected()["layers.2.w"].half())


def test_names_and_ties_as_declared(ckpt: Path, tmp_path: Path) -> None:
    naming = Naming(strip=("layers",), rename={"embed.weight": "wte"}, ties={"head.weight": "wte"})
    export_hf(ckpt, tmp_path / "hf", names=naming)
    got = read_folder(tmp_path / "hf")
    assert sorted(got) == ["10.w", "2.b", "2.w", "none", "seen", "wte"]
    assert torch.equal(got["wte"], expected()["embed.weight"])


def test_undeclared_ties_are_written_twice_and_said(
    ckpt: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_hf(ckpt, tmp_path / "hf")
    assert "embed.weight and head.weight are one tensor in the checkpoint" in caplog.text


def test_what_does_not_fit_is_said(ckpt: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    with pytest.raises(ValueError, match=r"layers\.2\.w and layers\.10\.w are two tensors"):
        export_hf(ckpt, out, names=Naming(ties={"layers.2.w": "layers.10.w"}))
    with pytest.raises(ValueError, match=r"tied to nowhere, which the checkpoint does not have"):
        export_hf(ckpt, out, names=Naming(ties={"layers.2.w": "nowhere"}))
    with pytest.raises(ValueError, match=r"section: the checkpoint has \['model'\], got 'ema'"):
        export_hf(ckpt, out, section="ema")
    with pytest.raises(ValueError, match="expected a size such as '5GB', got 'big'"):
        export_hf(ckpt, out, max_shard_size="big")
    with pytest.raises(ValueError, match=r"cast: expected a floating-point dtype, got torch\.int8"):
        export_hf(ckpt, out, cast=torch.int8)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        export_hf(tmp_path / "none", out)
    assert not out.exists()


def test_sizes() -> None:
    assert [parse_size(s) for s in ("5GB", "5GiB", "1.5kb", "20", 7)] == [
        5_000_000_000,
        5 << 30,
        1500,
        20,
        7,
    ]


def test_a_model_that_is_there_is_not_mixed_with(ckpt: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    export_hf(ckpt, folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    with pytest.raises(FileExistsError, match=r"in the way; .*hf/model.safetensors"):
        export_hf(ckpt, folder, max_shard_size=100)


def test_altered_bytes_are_not_exported(ckpt: Path, tmp_path: Path) -> None:
    path = ckpt / "model-r00001-of-00003.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    def rank(comm: Comm) -> None:
        with pytest.raises(CheckpointError, match=r"r00001-of-00003\.safetensors: bytes 0 to"):
            export_hf(ckpt, tmp_path / "hf", comm=comm)

    run_threads(rank, 2)
    assert os.listdir(tmp_path / "hf") == []


@pytest.mark.parametrize(
    ("op", "code"),
    [
        ("create", errno.EACCES),
        ("resize", errno.EFBIG),
        ("write_at", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("rename", errno.EIO),
        ("sync_folder", errno.EIO),
    ],
)
def test_failures_leave_nothing(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, code: int
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    original = getattr(_posix, op)
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) < 2 and op != "sync_folder":
            return original(*args)
        raise OSError(code, "injected")

    def rank(comm: Comm) -> None:
        with pytest.raises(OSError, match="injected") as caught:
            export_hf(ckpt, folder, comm=comm, max_shard_size=400)
        assert caught.value.errno == code

    monkeypatch.setattr(_posix, op, failing)
    run_threads(rank, 2)
    assert os.listdir(folder) == []


def test_a_file_for_which_there_is_no_space_is_named(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_posix, "resize", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/model\.safetensors'"):
        export_hf(ckpt, tmp_path / "hf")


def test_dead_exports_are_swept(ckpt: Path, tmp_path: Path) -> None:
    dead = tmp_path / "hf" / f".tmp-export-{'0' * 32}"
    dead.mkdir(parents=True)
    export_hf(ckpt, tmp_path / "hf")
    assert os.listdir(tmp_path / "hf") == ["model.safetensors"]


def test_there_and_back(ckpt: Path, tmp_path: Path) -> None:
    export_hf(ckpt, tmp_path / "hf", max_shard_size=400)
    want = expected()
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    load_hf(got, tmp_path / "hf")
    assert_same(got, want)


def test_two_exports_into_one_folder(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    fsync = _posix.fsync

    def other_first(fd: int) -> None:
        fsync(fd)
        (folder / "model.safetensors").write_bytes(b"theirs")

    monkeypatch.setattr(_posix, "fsync", other_first)
    with pytest.raises(FileExistsError, match=r"made by somebody else .*model.safetensors"):
        export_hf(ckpt, folder)
    assert (folder / "model.safetensors").read_bytes() == b"theirs"
    assert os.listdir(folder) == ["model.safetensors"]


def test_nothing_is_synced_where_nobody_asks(
    ckpt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("synced")

    (tmp_path / "hf").mkdir()
    monkeypatch.setattr(_posix, "fsync", never)
    monkeypatch.setattr(_posix, "sync_folder", never)
    made = export_hf(ckpt, tmp_path / "hf", max_shard_size=400, durable=False)
    assert sorted(os.listdir(tmp_path / "hf")) == sorted(made)
    assert_same(read_folder(tmp_path / "hf"), expected())


def test_files_without_data_are_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"model": {"none": torch.zeros(0, 4)}}, tmp_path / "c", comm=SoloComm())
    fsync, synced = _posix.fsync, []

    def noting(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(_posix, "fsync", noting)
    export_hf(tmp_path / "c", tmp_path / "hf")
    assert synced == [(tmp_path / "hf" / "model.safetensors").stat().st_ino]
    assert read_folder(tmp_path / "hf")["none"].shape == (0, 4)
