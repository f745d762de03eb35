"""Checkpoints behind URLs, read and written by what is not ``save`` or ``load``."""

from __future__ import annotations

import errno
import json
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shard_ckpt import (
    Checkpointer,
    CheckpointError,
    convert,
    diff,
    export_hf,
    load_hf,
    main,
    reindex,
    save,
    verify,
)
from shard_ckpt._remote import RemoteSink, remote_path
from shard_comm import Comm, SoloComm
from shard_testing import run_threads

BF16 = torch.bfloat16
SHAPES = {"columns": (2000, 2999), "b": (5,), "none": (0, 3)}

BIG = torch.arange(6_000_000, dtype=torch.int32).view(2000, 3000)  # two blocks


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    if remote_path(url).exists():
        remote_path(url).remove()


@pytest.fixture
def run(root: str) -> str:
    """Return a URL below which two steps are."""
    steps = Checkpointer(f"{root}/run", comm=SoloComm())
    for step in (1, 2):
        steps.save(step, {"model": {"w": BIG, "s": torch.tensor(step)}, "step": step})
    return f"{root}/run"


def test_export(run: str, tmp_path: Path) -> None:
    export_hf(f"{run}/step-00000001", tmp_path / "hf")
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(got["w"], BIG)
    assert got["s"].item() == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_export_to_a_url(run: str, world_size: int) -> None:
    """Four ranks cut columns, each file is written by one of ``world_size``."""
    columns = BIG[:, :2999].float()

    def saved(comm: Comm) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4), _init_backend=False, _rank=comm.rank)
        part = columns.chunk(4, dim=1)[comm.rank].contiguous()
        placed = DTensor.from_local(
            part, mesh, (Shard(1),), run_check=False, shape=columns.shape, stride=columns.stride()
        )
        model = {"columns": placed, "b": torch.ones(5), "none": torch.zeros(0, 3)}
        save({"model": model}, f"{run}/cut", comm=comm)

    run_threads(saved, 4)

    def exported(comm: Comm) -> tuple[str, ...]:
        return export_hf(f"{run}/cut", f"{run}/hf", comm=comm, max_shard_size=40, cast=BF16)

    files = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    index = "model.safetensors.index.json"
    assert run_threads(exported, world_size) == [(*files, index)] * world_size
    assert remote_path(f"{run}/hf").names() == sorted([*files, index])
    model = {name: torch.zeros(shape, dtype=BF16) for name, shape in SHAPES.items()}
    load_hf(model, f"{run}/hf", comm=SoloComm())
    assert torch.equal(model["columns"], columns.bfloat16())
    assert model["b"].tolist() == [1] * 5
    with pytest.raises(FileExistsError, match="in the way"):
        run_threads(exported, world_size)
    export_hf(f"{run}/step-00000002", f"{run}/one", comm=SoloComm())
    raw = (remote_path(f"{run}/one") / "model.safetensors").read_bytes()
    assert torch.equal(load_bytes(raw)["w"], BIG)


def test_an_export_that_fails_on_one_rank_leaves_nothing(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RemoteSink.seal

    def refuse(sink: RemoteSink) -> None:
        if "00002-of" in str(sink._path):
            raise OSError(errno.EIO, "the store is gone")
        original(sink)

    def exported(comm: Comm) -> int | None:
        try:
            export_hf(f"{run}/step-00000001", f"{run}/hf", comm=comm, max_shard_size=40)
        except OSError as exc:
            return exc.errno
        return None

    monkeypatch.setattr(RemoteSink, "seal", refuse)
    assert run_threads(exported, 2) == [errno.EIO] * 2
    left = remote_path(f"{run}/hf")
    assert not left.exists() or left.names() == []


def test_an_altered_checkpoint_is_not_exported(run: str) -> None:
    folder = remote_path(f"{run}/step-00000001")
    (save_id,) = (name for name in folder.names() if name != "COMMITTED")
    path = folder / save_id / "model-r00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.put(bytes(raw))
    with pytest.raises(CheckpointError, match="altered"):
        export_hf(f"{run}/step-00000001", f"{run}/hf", comm=SoloComm())
    assert not remote_path(f"{run}/hf").exists()


def test_diff_and_convert(run: str, tmp_path: Path) -> None:
    first, second = f"{run}/step-00000001", f"{run}/step-00000002"
    assert [item.where for item in diff(first, second)] == ["model: s", "state['step']"]
    convert(first, tmp_path / "c")
    assert diff(first, tmp_path / "c") == ()
    convert(tmp_path / "c", f"{run}/back")
    assert diff(first, f"{run}/back") == ()
    assert verify(f"{run}/back") == ()
    with pytest.raises(FileExistsError, match="never replaced"):
        convert(tmp_path / "c", f"{run}/back")


def test_convert_to_torchs_format(run: str) -> None:
    convert(f"{run}/step-00000002", f"{run}/dcp", target_format="dcp")
    state = {"model": {"w": torch.zeros_like(BIG), "s": torch.tensor(0)}, "step": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp_load(state, storage_reader=FsspecReader(f"{run}/dcp"), no_dist=True)
    assert torch.equal(state["model"]["w"], BIG)  # type: ignore[index]
    assert state["step"] == 2
    with pytest.raises(FileExistsError, match="never replaced"):
        convert(f"{run}/step-00000002", f"{run}/dcp", target_format="dcp")
    with pytest.raises(ValueError, match="dcp is read from folders only; copy it to one"):
        convert(f"{run}/dcp", f"{run}/again", source_format="dcp")


def test_hugging_face_files_are_converted(run: str) -> None:
    export_hf(f"{run}/step-00000001", f"{run}/hf", comm=SoloComm())
    convert(f"{run}/hf", f"{run}/again")
    assert {item.what for item in diff(f"{run}/step-00000001", f"{run}/again")} == {"only in a"}
    convert(f"{run}/hf/model.safetensors", f"{run}/file")
    assert diff(f"{run}/file", f"{run}/again") == ()


def test_a_lost_index_and_marker(run: str) -> None:
    folder = remote_path(f"{run}/step-00000001")
    (save_id,) = (name for name in folder.names() if name != "COMMITTED")
    index, marker = folder / save_id / "index.json", folder / "COMMITTED"
    texts = index.read_bytes(), marker.read_bytes()
    assert reindex(str(folder)) is False
    index.remove()
    assert reindex(str(folder)) is True
    marker.remove()
    index.put(b"{}")
    with pytest.raises(CheckpointError, match="no COMMITTED marker, so it may never have been"):
        reindex(str(folder))
    assert reindex(str(folder), commit=True) is True
    assert (index.read_bytes(), marker.read_bytes()) == texts
    marker.remove()
    (folder / ("0" * 32)).make_folder()
    (folder / ("0" * 32) / "index.json").put(b"{}")
    with pytest.raises(CheckpointError, match="files of 2 saves, 0000"):
        reindex(str(folder), commit=True)
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        reindex(f"{run}/nowhere")


def test_commands(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", run, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in table["checkpoints"]] == ["step-00000001", "step-00000002"]
    assert main(["verify", f"{run}/step-00000001"]) == 0
    assert main(["inspect", f"{run}/step-00000001"]) == 0
    assert "I32" in capsys.readouterr().out
    assert main(["reindex", f"{run}/step-00000001"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["export", f"{run}/step-00000001", f"{run}/hf"]) == 0
    assert capsys.readouterr().out.strip().endswith("hf/model.safetensors")
    assert main(["convert", f"{run}/step-00000001", f"{run}/again"]) == 0
    assert main(["prune", run, "--keep", "1", "--dry-run"]) == 0
    assert "would remove step-00000001" in capsys.readouterr().out
    assert main(["prune", run, "--keep", "1"]) == 0
    assert remote_path(run).names() == ["again", "hf", "step-00000002"]
