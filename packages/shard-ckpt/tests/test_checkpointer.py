from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer, CheckpointError, _posix, save
from shard_ckpt._places import names_in
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads


def make_state(comm: Comm, step: int) -> dict[str, Any]:
    return {"model": {"w": shard_tensor(torch.full((10,), float(step)), comm=comm)}, "step": step}


def test_the_newest_step_is_restored_at_any_world(tmp_path: Path) -> None:
    def saved(comm: Comm) -> list[int]:
        checkpointer = Checkpointer(tmp_path / "run", comm=comm)
        for step in (5, 120, 30):
            checkpointer.save(step, make_state(comm, step))
        return checkpointer.steps()

    def restored(comm: Comm) -> tuple[int, int, float]:
        checkpointer = Checkpointer(tmp_path / "run", comm=comm)
        state = make_state(comm, 0)
        result = checkpointer.restore(state)
        assert result is not None
        return result[0], result[1]["step"], float(state["model"]["w"].full_tensor().sum())

    assert run_threads(saved, 2) == [[5, 30, 120]] * 2
    assert sorted(os.listdir(tmp_path / "run")) == [
        "step-00000005",
        "step-00000030",
        "step-00000120",
    ]
    assert run_threads(restored, 3) == [(120, 120, 1200.0)] * 3


def test_a_step_can_be_chosen(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    for step in (1, 2):
        checkpointer.save(step, make_state(SoloComm(), step))
    result = checkpointer.restore(make_state(SoloComm(), 0), step=1)
    assert result is not None
    assert result[0] == result[1]["step"] == 1
    with pytest.raises(FileNotFoundError, match="step-00000003"):
        checkpointer.restore(make_state(SoloComm(), 0), step=3)


def test_nothing_to_restore(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "none", comm=SoloComm())
    state = make_state(SoloComm(), 4)
    assert checkpointer.latest() is None
    assert checkpointer.steps() == []
    assert checkpointer.restore(state) is None
    assert state["model"]["w"].local.tolist() == [4.0] * 10
    assert not (tmp_path / "none").exists()


def test_only_markers_count_and_the_reason_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    checkpointer.save(1, make_state(SoloComm(), 1))
    checkpointer.save(2, make_state(SoloComm(), 2))
    (checkpointer.path(2) / "COMMITTED").unlink()
    checkpointer.path(3).mkdir()
    (checkpointer.path(3) / "COMMITTED").write_text("{}")
    (tmp_path / "step-00000004").write_text("a file")
    for name in ("step-5", "notes", "step-00000006.old"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
        assert checkpointer.steps() == [1]
        assert checkpointer.latest() == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "step-00000002: skipped: " in messages[0]
    assert "no COMMITTED marker" in messages[0]
    assert "expected format version 2, got None" in messages[1]
    assert "step-00000004: skipped: " in messages[2]


def test_a_live_save_is_not_taken_for_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    checkpointer.save(1, make_state(SoloComm(), 1))
    seen: list[list[int]] = []
    rename = _posix.rename

    def look_first(source: Path, target: Path) -> None:
        seen.append(checkpointer.steps())
        rename(source, target)

    monkeypatch.setattr(_posix, "rename", look_first)
    checkpointer.save(2, make_state(SoloComm(), 2))
    assert seen == [[1]]
    assert "skipped: a save is writing it" in caplog.text
    assert checkpointer.steps() == [1, 2]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    def saved(comm: Comm) -> None:
        checkpointer = Checkpointer(tmp_path, comm=comm, keep=2)
        for step in (1, 2, 3, 4):
            checkpointer.save(step, make_state(comm, step))

    run_threads(saved, 2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_the_step_just_saved_is_kept_and_uncommitted_ones_do_not_count(tmp_path: Path) -> None:
    every = Checkpointer(tmp_path, comm=SoloComm())
    for step in (100, 200, 300):
        every.save(step, make_state(SoloComm(), step))
    (every.path(300) / "COMMITTED").unlink()
    Checkpointer(tmp_path, comm=SoloComm(), keep=1).save(50, make_state(SoloComm(), 50))
    assert every.steps() == [50, 200]
    assert every.path(300).is_dir()


def test_a_removal_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm(), keep=1)
    checkpointer.save(1, make_state(SoloComm(), 1))

    def refuse(path: Path) -> None:
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(_posix, "unlink", refuse)
    checkpointer.save(2, make_state(SoloComm(), 2))
    assert "step-00000001: could not be removed" in caplog.text
    assert checkpointer.steps() == [1, 2]


def test_a_committed_step_that_is_damaged_is_an_error(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    for step in (1, 2):
        checkpointer.save(step, make_state(SoloComm(), step))
    os.truncate(checkpointer.path(2) / "model-r00000-of-00001.safetensors", 5000)
    with pytest.raises(CheckpointError, match=r"step-00000002/model-r00000.*got 5000"):
        checkpointer.restore(make_state(SoloComm(), 0))
    assert checkpointer.restore(make_state(SoloComm(), 0), step=1) is not None


def test_a_step_is_never_replaced(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    checkpointer.save(1, make_state(SoloComm(), 1))
    with pytest.raises(FileExistsError, match="never replaced"):
        checkpointer.save(1, make_state(SoloComm(), 2))


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep: expected at least 1, or None for all, got 0"):
        Checkpointer(tmp_path, comm=SoloComm(), keep=0)
    for step in (-1, True, 1.0):
        with pytest.raises(ValueError, match=f"step: expected an int of at least 0, got {step}"):
            Checkpointer(tmp_path, comm=SoloComm()).path(step)  # type: ignore[arg-type]


def test_a_step_has_one_spelling(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, comm=SoloComm())
    checkpointer.save(7, make_state(SoloComm(), 7))
    checkpointer.save(123456789, make_state(SoloComm(), 9))
    save(make_state(SoloComm(), 8), tmp_path / "step-000000008", comm=SoloComm())
    assert checkpointer.steps() == [7, 123456789]


def test_the_folder_stays_the_same_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer("run", comm=SoloComm())
    checkpointer.save(1, make_state(SoloComm(), 1))
    monkeypatch.chdir("elsewhere")
    checkpointer.save(2, make_state(SoloComm(), 2))
    assert checkpointer.steps() == [1, 2]
    assert os.listdir() == []


def test_a_step_that_is_published_while_others_go_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = Checkpointer(tmp_path, comm=SoloComm(), keep=1)
    writer.save(1, make_state(SoloComm(), 1))
    reader = Checkpointer(tmp_path, comm=SoloComm())
    listings = []

    def list_then_save(place: Path) -> list[str]:
        listings.append(names_in(place))
        if len(listings) < 3:
            writer.save(len(listings) + 1, make_state(SoloComm(), 2))
        return listings[-1]

    writer._names = lambda: names_in(tmp_path)  # type: ignore[method-assign]
    monkeypatch.setattr("shard_ckpt._checkpointer.names_in", list_then_save)
    assert reader.latest() == 3
    assert listings == [["step-00000001"], ["step-00000002"], ["step-00000003"]]
