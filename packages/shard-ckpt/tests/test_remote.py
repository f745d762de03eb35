"""Checkpoints behind URLs: no rename, the marker last, keys that carry the save's id."""

from __future__ import annotations

import errno
import logging
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import (
    Checkpointer,
    CheckpointError,
    PerRank,
    inspect,
    load,
    save,
    save_async,
    verify,
)
from shard_ckpt._blocks import BLOCK_BYTES
from shard_ckpt._remote import RemotePath, RemoteSink, remote_path
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads


@pytest.fixture(params=["memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    if remote_path(url).exists():
        remote_path(url).remove()


def names_in(url: str) -> list[str]:
    return remote_path(url).names()


def make_state(comm: Comm, value: float) -> dict[str, Any]:
    full = torch.arange(1000.0) + value
    return {
        "model": {"w": shard_tensor(full, comm=comm), "plain": full * 2},
        "step": int(value),
        "rng": PerRank(comm.rank),
    }


def loaded(comm: Comm, url: str, value: float) -> bool:
    state, want = make_state(comm, 0), make_state(comm, value)
    out = load(state, url, comm=comm)
    return (
        torch.equal(state["model"]["w"].local, want["model"]["w"].local)
        and torch.equal(state["model"]["plain"], want["model"]["plain"])
        and out["step"] == value
    )


@pytest.mark.parametrize("saved_at", [1, 2, 3])
def test_any_world_reads_any_other(root: str, saved_at: int) -> None:
    url = f"{root}/a"
    run_threads(lambda comm: save(make_state(comm, 5), url, comm=comm), saved_at)
    for loaded_at in (1, 2, 3):
        assert run_threads(loaded, loaded_at, url, 5) == [True] * loaded_at
    assert verify(url) == ()


def test_keys_carry_the_id_and_the_marker_stands_above(root: str) -> None:
    url = f"{root}/a"
    save(make_state(SoloComm(), 5), url, comm=SoloComm())
    info = inspect(url)
    assert info.path == url
    assert info.values["step"] == 5
    assert names_in(url) == sorted(["COMMITTED", info.save_id])
    assert names_in(f"{url}/{info.save_id}") == [
        "extra-r00000.json",
        "index.json",
        "model-r00000-of-00001.safetensors",
    ]


def test_files_of_several_blocks(root: str) -> None:
    weight = torch.arange(BLOCK_BYTES // 2, dtype=torch.float32)  # two blocks and a header
    save({"m": {"w": weight, "b": torch.ones(3)}}, f"{root}/a", comm=SoloComm())
    template = {"m": {"w": torch.zeros_like(weight), "b": torch.zeros(3)}}
    load(template, f"{root}/a", comm=SoloComm())
    assert torch.equal(template["m"]["w"], weight)
    assert template["m"]["b"].tolist() == [1, 1, 1]


def test_a_copy_on_this_system_loads(tmp_path: Path) -> None:
    save(make_state(SoloComm(), 5), f"file://{tmp_path}/a", comm=SoloComm())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert loaded(SoloComm(), str(tmp_path / "b"), 5)
    assert verify(tmp_path / "b") == ()
    save(make_state(SoloComm(), 6), tmp_path / "c", comm=SoloComm())
    assert loaded(SoloComm(), f"file://{tmp_path}/c", 6)  # and the other way round


def test_a_target_is_never_replaced(root: str) -> None:
    save(make_state(SoloComm(), 5), f"{root}/a", comm=SoloComm())
    before = names_in(f"{root}/a")
    with pytest.raises(FileExistsError, match="never replaced"):
        save(make_state(SoloComm(), 6), f"{root}/a", comm=SoloComm())
    assert names_in(f"{root}/a") == before
    assert loaded(SoloComm(), f"{root}/a", 5)


def test_of_two_saves_the_first_to_publish_wins(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RemotePath.create

    def lose(path: RemotePath, data: bytes) -> None:
        monkeypatch.setattr(RemotePath, "create", create)
        save(make_state(SoloComm(), 7), f"{root}/a", comm=SoloComm())
        create(path, data)

    monkeypatch.setattr(RemotePath, "create", lose)
    with pytest.raises(FileExistsError, match="never replaced"):
        save(make_state(SoloComm(), 6), f"{root}/a", comm=SoloComm())
    assert loaded(SoloComm(), f"{root}/a", 7)
    assert names_in(f"{root}/a") == sorted(["COMMITTED", inspect(f"{root}/a").save_id])


def test_what_a_dead_save_left_is_removed_by_the_next(root: str) -> None:
    dead = remote_path(f"{root}/a/{'0' * 32}")
    dead.make_folder()
    (dead / "model-r00000-of-00001.safetensors").create(b"half")
    with pytest.raises(CheckpointError, match="no COMMITTED marker"):
        load({}, f"{root}/a", comm=SoloComm())
    save(make_state(SoloComm(), 5), f"{root}/a", comm=SoloComm())
    assert loaded(SoloComm(), f"{root}/a", 5)
    assert dead.name not in names_in(f"{root}/a")


@pytest.mark.parametrize("op", ["write", "seal"])
def test_a_failed_upload_is_raised_on_every_rank(
    root: str, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    original = getattr(RemoteSink, op)

    def refuse(sink: RemoteSink, *args: Any) -> Any:
        if "model-r00001" in str(sink._path):
            raise OSError(errno.EIO, "the store is gone")
        return original(sink, *args)

    def rank(comm: Comm) -> list[int | None]:
        found: list[int | None] = []
        for saver in (save, lambda *a, **k: save_async(*a, **k).wait()):
            try:
                saver(make_state(comm, 6), f"{root}/b", comm=comm)
            except OSError as exc:
                found.append(exc.errno)
        return found

    run_threads(lambda comm: save(make_state(comm, 5), f"{root}/a", comm=comm), 3)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteSink, op, refuse)
        assert run_threads(rank, 3) == [[errno.EIO] * 2] * 3
    assert not (remote_path(f"{root}/b") / "COMMITTED").exists()
    assert loaded(SoloComm(), f"{root}/a", 5)
    run_threads(lambda comm: save(make_state(comm, 6), f"{root}/b", comm=comm), 3)
    assert loaded(SoloComm(), f"{root}/b", 6)


@pytest.mark.parametrize("name", ["COMMITTED", "index.json", "model-r00000-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "cut", "lose"])
def test_damage_is_refused(root: str, name: str, damage: str) -> None:
    save(make_state(SoloComm(), 5), f"{root}/a", comm=SoloComm())
    path = remote_path(f"{root}/a")
    path = path / name if name == "COMMITTED" else path / inspect(f"{root}/a").save_id / name
    raw = bytearray(path.read_bytes())
    path.remove()
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
    if damage != "lose":
        path.create(bytes(raw[: len(raw) // 2] if damage == "cut" else raw))
    state = make_state(SoloComm(), 9)
    with pytest.raises(CheckpointError, match=name.partition("-")[0]):
        load(state, f"{root}/a", comm=SoloComm())
    assert torch.equal(state["model"]["plain"], make_state(SoloComm(), 9)["model"]["plain"])
    assert verify(f"{root}/a") != ()


def test_a_folder_of_steps(root: str, caplog: pytest.LogCaptureFixture) -> None:
    def rank(comm: Comm) -> tuple[list[int], int | None, bool]:
        checkpointer = Checkpointer(f"{root}/run", comm=comm, keep=2, every=10, async_=True)
        assert checkpointer.latest() is None
        for step in range(0, 50, 5):
            checkpointer.save(step, make_state(comm, step))
        checkpointer.wait()
        comm.barrier()
        restored = checkpointer.restore(make_state(comm, 0))
        assert restored is not None
        whole = loaded(comm, checkpointer.location(30), 30)
        return checkpointer.steps(), restored[1]["step"], whole

    assert run_threads(rank, 2) == [([30, 40], 40, True)] * 2
    assert names_in(f"{root}/run") == ["step-00000030", "step-00000040"]
    (remote_path(f"{root}/run/step-00000040") / "COMMITTED").remove()
    checkpointer = Checkpointer(f"{root}/run", comm=SoloComm())
    with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
        assert checkpointer.latest() == 30
    assert "step-00000040: skipped: " in caplog.text
    with pytest.raises(ValueError, match="is no path of this system; use location"):
        checkpointer.path(30)


def test_stores_that_are_not_installed_are_named() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        save({}, "nowhere://a", comm=SoloComm())
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load({}, "memory://not/there", comm=SoloComm())
