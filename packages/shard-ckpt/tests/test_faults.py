"""Saves that fail or die on the way: C1, C4."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer, _posix, load, save, verify
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_ranks, run_threads

Setter = Callable[[object, str, object], None]


def arm(setter: Setter, op: str, name: str, action: Callable[[], None]) -> None:
    """Have ``action`` run just before ``op`` is called for a path that ends in ``name``.

    For operations on descriptors the path is the one that the descriptor was made for.
    """
    paths: dict[int, str] = {}
    create, original = _posix.create, getattr(_posix, op)

    def noting_create(path: Path) -> int:
        fd = create(path)
        paths[fd] = str(path)
        return fd

    def trapped(*args: Any) -> Any:
        first = args[0]
        path = paths.get(first, "") if isinstance(first, int) else str(first)
        if path.endswith(name):
            action()
        return original(*args)

    setter(_posix, "create", noting_create)
    setter(_posix, op, trapped)


def make_state(comm: Comm, step: int) -> dict[str, Any]:
    full = torch.arange(1000.0) + step
    return {
        "model": {"w": shard_tensor(full, comm=comm, name="w")},
        "optim": {"m": shard_tensor(full, comm=comm, name="m"), "plain": full * 2},
        "step": step,
    }


def loaded_step(folder: Path, step: int) -> bool:
    """Whether a committed step loads whole and is the one asked for."""
    state = make_state(SoloComm(), 0)
    out = load(state, folder / f"step-{step:08d}", comm=SoloComm())
    want = torch.arange(1000.0) + step
    return out["step"] == step and all(
        torch.equal(got, expected)
        for got, expected in [
            (state["model"]["w"].local, want),
            (state["optim"]["m"].local, want),
            (state["optim"]["plain"], want * 2),
        ]
    )


FAILURES = [  # what no writer of a file meets; those are below
    ("sync_folder", "/run", errno.EIO),
    ("rename", "", errno.EIO),
    ("make_folder", "", errno.EROFS),
]


WRITERS = [
    *(
        f"{section}-r0000{rank}-of-00003.safetensors"
        for section in ("model", "optim")
        for rank in range(3)
    ),
    "extra-r00000.json",
    "index.json",
    "COMMITTED",
]

ERRORS = [
    ("create", errno.ENOSPC),
    ("write", errno.ENOSPC),
    ("write", errno.EIO),
    ("write", errno.EFBIG),
    ("fsync", errno.EIO),
    ("fsync", errno.ENOSPC),
    ("close", errno.EIO),
]


class TestCase1:
    """A failed writer is a failed save, on every rank."""

    @pytest.mark.parametrize(("op", "name", "number"), FAILURES)
    def test_the_error_is_raised_on_every_rank(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, name: str, number: int
    ) -> None:
        folder = tmp_path / "run"

        def rank(comm: Comm, step: int) -> int | None:
            try:
                Checkpointer(folder, comm=comm).save(step, make_state(comm, step))
            except OSError as exc:
                return exc.errno
            return None

        assert run_threads(rank, 3, 10) == [None] * 3

        def fail() -> None:
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            arm(patch.setattr, op, name, fail)
            assert run_threads(rank, 3, 20) == [number] * 3
        assert os.listdir(folder) == ["step-00000010"]
        assert loaded_step(folder, 10)
        assert run_threads(rank, 3, 20) == [None] * 3
        assert loaded_step(folder, 20)

    @pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
    @pytest.mark.parametrize("name", WRITERS)
    def test_every_writer_and_every_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, background: bool
    ) -> None:
        folder = tmp_path / "run"

        def rank(comm: Comm, step: int) -> int | None:
            checkpointer = Checkpointer(folder, comm=comm, async_=background)
            try:
                checkpointer.save(step, make_state(comm, step))
                checkpointer.wait()
            except OSError as exc:
                return exc.errno
            return None

        assert run_threads(rank, 3, 10) == [None] * 3
        for op, number in ERRORS:

            def fail(number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            with monkeypatch.context() as patch:
                arm(patch.setattr, op, name, fail)
                assert run_threads(rank, 3, 20) == [number] * 3, (op, number)
            assert os.listdir(folder) == ["step-00000010"], (op, number)
        assert loaded_step(folder, 10)

    def test_a_file_size_limit_of_one_process(self, tmp_path: Path) -> None:
        errors = run_ranks(save_under_a_limit, 2, str(tmp_path / "a"))
        assert errors[0] == errors[1]
        assert errors[0].startswith("[Errno 27] File too large (rank 1 of 2): ")
        assert errors[0].endswith("/model-r00001-of-00002.safetensors'")
        assert os.listdir(tmp_path) == []


def save_under_a_limit(comm: Comm, path: str) -> str:
    state = {"model": {"w": shard_tensor(torch.zeros(200_000), comm=comm)}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        save(state, path, comm=comm)
    except OSError as exc:
        return str(exc)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_and_die(
    comm: Comm, folder: str, dying_rank: int, op: str, name: str, background: bool = False
) -> None:
    checkpointer = Checkpointer(folder, comm=comm, keep=1, async_=background)
    if comm.rank == dying_rank:
        arm(setattr, op, name, die)
    checkpointer.save(20, make_state(comm, 20))
    checkpointer.wait()


# Every step of the protocol on rank 0, and all that rank 1 has a part in.
BEFORE_PUBLISHING = [
    (1, "create", "model-r00001-of-00002.safetensors"),  # data
    (1, "write", "optim-r00001-of-00002.safetensors"),
    (0, "write", "optim-r00000-of-00002.safetensors"),
    (1, "fsync", "optim-r00001-of-00002.safetensors"),
    (0, "fsync", "model-r00000-of-00002.safetensors"),
    (1, "sync_folder", ""),  # manifest: all data is there, nobody knows
    (0, "sync_folder", ""),
    (0, "create", "index.json"),
    (0, "write", "index.json"),
    (0, "fsync", "index.json"),
    (0, "create", "COMMITTED"),
    (0, "write", "COMMITTED"),
    (0, "fsync", "COMMITTED"),
    (0, "rename", ""),
]

IN_BACKGROUND = [
    (1, "write", "optim-r00001-of-00002.safetensors"),
    (0, "write", "optim-r00000-of-00002.safetensors"),
    (0, "fsync", "model-r00000-of-00002.safetensors"),
    (1, "sync_folder", ""),
    (0, "write", "index.json"),
    (0, "fsync", "COMMITTED"),
    (0, "rename", ""),
]


class TestCase4:
    """Killed on the way: the last committed step is found, and the log says what was skipped."""

    @pytest.mark.parametrize(
        ("rank", "op", "name", "background"),
        [
            *((*case, False) for case in BEFORE_PUBLISHING),
            *((*case, True) for case in IN_BACKGROUND),
        ],
    )
    def test_killed_before_publishing(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        rank: int,
        op: str,
        name: str,
        background: bool,
    ) -> None:
        checkpointer = Checkpointer(tmp_path, comm=SoloComm())
        checkpointer.save(10, make_state(SoloComm(), 10))
        with pytest.raises(RuntimeError, match="rank"):
            run_ranks(save_and_die, 2, str(tmp_path), rank, op, name, background)
        with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
            assert checkpointer.latest() == 10
        assert loaded_step(tmp_path, 10)
        drafts = [entry for entry in os.listdir(tmp_path) if not entry.startswith("step-")]
        if rank == 0:  # nobody is left to remove the folder
            assert any(entry.startswith(".tmp-step-00000020-") for entry in drafts)
            assert ": skipped: left by a save or removal that was cut off" in caplog.text
        checkpointer.save(20, make_state(SoloComm(), 20))
        assert sorted(os.listdir(tmp_path)) == ["step-00000010", "step-00000020"]

    @pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
    def test_killed_after_publishing(self, tmp_path: Path, background: bool) -> None:
        checkpointer = Checkpointer(tmp_path, comm=SoloComm())
        checkpointer.save(10, make_state(SoloComm(), 10))
        with pytest.raises(RuntimeError, match="of 2 failed"):
            run_ranks(save_and_die, 2, str(tmp_path), 0, "sync_folder", tmp_path.name, background)
        assert checkpointer.steps() == [10, 20]
        assert loaded_step(tmp_path, 20)

    @pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
    def test_killed_before_the_old_marker_is_removed(
        self, tmp_path: Path, background: bool
    ) -> None:
        checkpointer = Checkpointer(tmp_path, comm=SoloComm())
        checkpointer.save(10, make_state(SoloComm(), 10))
        with pytest.raises(RuntimeError, match="of 2 failed"):
            run_ranks(save_and_die, 2, str(tmp_path), 0, "unlink", "COMMITTED", background)
        assert checkpointer.steps() == [10, 20]
        assert verify(checkpointer.path(10)) == verify(checkpointer.path(20)) == ()

    @pytest.mark.parametrize("background", [False, True], ids=["save", "save_async"])
    def test_killed_after_the_old_marker_is_removed(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool
    ) -> None:
        checkpointer = Checkpointer(tmp_path, comm=SoloComm())
        checkpointer.save(10, make_state(SoloComm(), 10))
        with pytest.raises(RuntimeError, match="of 2 failed"):
            run_ranks(save_and_die, 2, str(tmp_path), 0, "rename", "step-00000010", background)
        with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
            assert checkpointer.steps() == [20]
        assert "step-00000010: skipped: " in caplog.text
        assert "no COMMITTED marker, so it is not a finished checkpoint" in caplog.text
        assert loaded_step(tmp_path, 20)
        state = make_state(SoloComm(), 0)
        restored = checkpointer.restore(state)
        assert restored is not None
        assert restored[0] == 20
