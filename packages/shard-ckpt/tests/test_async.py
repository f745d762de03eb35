"""Saves in the background: what they store, how they fail, whom they disturb."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer, PerRank, SaveHandle, _posix, inspect, load, save, save_async
from shard_ckpt._async import Saver
from shard_ckpt._commit import prepare
from shard_ckpt._snapshot import Staging
from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ParamSpec, ShardTensor, plan_layout, shard_tensor
from shard_testing import run_ranks, run_threads


def make_state(comm: Comm, value: float) -> dict[str, Any]:
    full = torch.arange(1000.0) + value
    return {
        "model": {"w": shard_tensor(full, comm=comm, name="w"), "tied": full, "again": full},
        "optim": {
            "state": {
                "w": {"exp_avg": shard_tensor(-full, comm=comm), "step": torch.tensor(value)}
            },
            "param_groups": [{"lr": value, "params": ["w"]}],
        },
        "big": {"split": torch.full((600, 600), value), "strided": full.view(10, 100).t()},
        "step": int(value),
        "rng": PerRank([comm.rank, value]),
    }


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    slots = state["optim"]["state"]["w"]
    return [*state["model"].values(), *slots.values(), *state["big"].values()]


def held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardTensor) else tensor


def spoil(state: dict[str, Any]) -> None:
    for tensor in tensors_of(state):
        held(tensor).fill_(99)
    state["step"] = state["optim"]["param_groups"][0]["lr"] = 99
    state["rng"].value[1] = 99


def matches(path: Path, comm: Comm, value: float) -> bool:
    template = make_state(comm, 0)
    out = load(template, path, comm=comm)
    expected = make_state(comm, value)
    pairs = zip(tensors_of(template), tensors_of(expected), strict=True)
    return (
        all(torch.equal(held(got), held(want)) for got, want in pairs)
        and out["step"] == value
        and out["optim"]["param_groups"] == expected["optim"]["param_groups"]
        and out["rng"] == [comm.rank, value]
    )


class Gate:
    """Holds every fsync until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        fsync = _posix.fsync

        def gated(fd: int) -> None:
            self.reached.set()
            assert self.opened.wait(30)
            fsync(fd)

        monkeypatch.setattr(_posix, "fsync", gated)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_state_of_the_call_is_stored(tmp_path: Path, world_size: int) -> None:
    def rank(comm: Comm) -> list[bool]:
        state = make_state(comm, 5)
        handle = save_async(state, tmp_path / "a", comm=comm)
        spoil(state)
        handle.wait()
        return [handle.done(), matches(tmp_path / "a", comm, 5)]

    assert run_threads(rank, world_size) == [[True, True]] * world_size


def test_the_files_are_those_of_a_plain_save(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        save(make_state(comm, 5), tmp_path / "plain", comm=comm)
        save_async(make_state(comm, 5), tmp_path / "async", comm=comm).wait()

    run_threads(rank, 2)
    ids = {name: inspect(tmp_path / name).save_id.encode() for name in ("plain", "async")}
    names = sorted(os.listdir(tmp_path / "plain"))
    assert names == sorted(os.listdir(tmp_path / "async"))
    assert len([name for name in names if name.endswith(".safetensors")]) >= 5
    for name in set(names) - {"index.json", "COMMITTED"}:
        plain, other = ((tmp_path / side / name).read_bytes() for side in ("plain", "async"))
        assert plain == other.replace(ids["async"], ids["plain"]), name


def test_replicas_each_write_a_part(tmp_path: Path) -> None:
    """Hybrid: 2 groups of 2 shards; every element is stored once."""
    full = torch.arange(4000.0)

    def rank(comm: Comm) -> float:
        shards = comm.split(comm.rank // 2)
        state = {"m": {"w": shard_tensor(full, comm=shards, name="w")}}
        handle = save_async(state, tmp_path / "a", comm=comm)
        held(state["m"]["w"]).zero_()
        handle.wait()
        template = {"m": {"w": torch.zeros(4000)}}
        load(template, tmp_path / "a", comm=comm)
        return float((template["m"]["w"] - full).abs().sum())

    assert run_threads(rank, 4) == [0.0] * 4
    (record,) = inspect(tmp_path / "a").tensors
    assert [(part.start, part.stop) for part in record.ranges] == [
        (0, 1000),
        (1000, 2000),
        (2000, 3000),
        (3000, 4000),
    ]


def test_the_copy_holds_this_ranks_part_and_is_used_again() -> None:
    layout = plan_layout([ParamSpec("a", (3, 5), torch.float32)], 2)

    def rank(comm: Comm) -> tuple[int, bool, bool]:
        local = torch.ones(layout.pieces(comm.rank)[0].numel)
        sharded = ShardTensor(local, layout.shard_spec(comm.rank, 0), comm=comm)
        whole = torch.full((1 << 20,), float(comm.rank))  # 4 MiB, cut in two
        state = {"m": {"a": sharded, "whole": whole, "tied": whole}}
        staging = Staging()
        first = staging.copy(prepare(state, comm=comm), comm=comm)
        pointers = [leaf.tensor.data_ptr() for leaf in first.leaves]
        nbytes = staging.nbytes
        second = staging.copy(prepare(state, comm=comm), comm=comm)
        again = [leaf.tensor.data_ptr() for leaf in second.leaves] == pointers
        owned = {leaf.tensor.data_ptr() for leaf in second.leaves}
        return nbytes, again, whole.data_ptr() in owned or local.data_ptr() in owned

    for nbytes, again, shared in run_threads(rank, 2):
        assert (1 << 21) + 28 <= nbytes <= (1 << 21) + 4096
        assert again
        assert not shared


def test_it_grows_and_takes_tensors_of_inference_mode() -> None:
    staging = Staging()
    with torch.inference_mode():
        small = staging.copy(prepare({"m": {"w": torch.ones(3)}}, comm=SoloComm()), comm=SoloComm())
    assert small.leaves[0].tensor.tolist() == [1, 1, 1]
    large = staging.copy(prepare({"m": {"w": torch.ones(5000)}}, comm=SoloComm()), comm=SoloComm())
    assert float(large.leaves[0].tensor.sum()) == 5000
    empty = staging.copy(prepare({"m": {"w": torch.ones(0)}}, comm=SoloComm()), comm=SoloComm())
    assert empty.leaves[0].tensor.tolist() == []
    assert staging.nbytes == 20480


def test_the_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    handle = save_async({"m": {"w": torch.ones(3)}}, "run/a", comm=SoloComm())
    assert gate.reached.wait(30)
    monkeypatch.chdir("elsewhere")
    gate.opened.set()
    handle.wait()
    assert os.listdir() == []
    assert inspect(tmp_path / "run" / "a").tensors[0].name == "w"


def test_training_goes_on_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)

    def rank(comm: Comm) -> tuple[float, bool, str, list[str]]:
        recorded = Recorded(comm)
        handle = save_async(make_state(comm, 5), tmp_path / "a", comm=recorded)
        total = torch.ones(1)
        for _ in range(20):
            recorded.all_reduce(total)
        assert gate.reached.wait(30)
        running = handle.done()
        try:
            handle.wait(0.01)
        except TimeoutError as exc:
            late = str(exc)
        comm.barrier()
        gate.opened.set()
        handle.wait()
        return float(total), running, late.partition(": ")[2], list(recorded.records)

    expected = (2.0**20, False, "still being saved after 0.01 s", ["all_reduce"])
    assert run_threads(rank, 2) == [expected] * 2
    assert run_threads(lambda comm: matches(tmp_path / "a", comm, 5), 2) == [True] * 2


def test_the_next_save_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch)
    comm = SoloComm()
    first = save_async(make_state(comm, 1), tmp_path / "1", comm=comm)
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.opened.set).start()
    second = save_async(make_state(comm, 2), tmp_path / "2", comm=comm)
    assert first.done()
    second.wait()
    first.wait()
    assert matches(tmp_path / "1", comm, 1)
    assert matches(tmp_path / "2", comm, 2)


def refuse_on(rank: int, monkeypatch: pytest.MonkeyPatch, *, op: str = "write") -> None:
    """Fail every operation on a file of the rank."""
    create, original = _posix.create, getattr(_posix, op)
    doomed: set[int] = set()

    def noting(path: Path) -> int:
        fd = create(path)
        (doomed.add if f"-r{rank:05d}-" in path.name else doomed.discard)(fd)
        return fd

    def refusing(fd: int, *args: Any) -> Any:
        if fd in doomed:
            raise OSError(errno.ENOSPC, "full")
        return original(fd, *args)

    monkeypatch.setattr(_posix, "create", noting)
    monkeypatch.setattr(_posix, op, refusing)


def code_of(work: Callable[[], object]) -> int | str | None:
    try:
        work()
    except OSError as exc:
        return exc.errno
    except (RuntimeError, ValueError, TypeError) as exc:
        return str(exc)
    return None


class TestCase1:
    """A failed writer is a failed save, on every rank, also in the background."""

    @pytest.mark.parametrize("op", ["write", "fsync", "close"])
    @pytest.mark.parametrize("failing", [0, 1, 2])
    def test_wait_raises_everywhere(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, op: str, failing: int
    ) -> None:
        def rank(comm: Comm, name: str) -> list[int | str | None]:
            handle = save_async(make_state(comm, 5), tmp_path / name, comm=comm)
            return [code_of(handle.wait), code_of(handle.wait)]

        with monkeypatch.context() as patch:
            refuse_on(failing, patch, op=op)
            assert run_threads(rank, 3, "a") == [[errno.ENOSPC] * 2] * 3
        assert os.listdir(tmp_path) == []
        assert run_threads(rank, 3, "a") == [[None] * 2] * 3

    def test_the_next_save_raises_what_nobody_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        failing = monkeypatch.context()

        def rank(comm: Comm) -> list[int | str | None]:
            if comm.rank == 0:
                refuse_on(1, patch)
            comm.barrier()
            lost = save_async(make_state(comm, 1), tmp_path / "1", comm=comm)
            assert lost._finished.wait(30)
            comm.barrier()
            if comm.rank == 0:
                patch.undo()
            comm.barrier()
            found = [
                code_of(lambda: save_async(make_state(comm, 2), tmp_path / "2", comm=comm).wait())
            ]
            save_async(make_state(comm, 3), tmp_path / "3", comm=comm).wait()
            return found

        with failing as patch:
            assert run_threads(rank, 2) == [[errno.ENOSPC]] * 2
        assert os.listdir(tmp_path) == ["3"]

    def test_one_rank_waited_and_one_did_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "1").mkdir()

        def rank(comm: Comm) -> list[int | str | None]:
            found = []
            for name in ("1", "2", "3"):
                waits = comm.rank == 0 or name != "1"

                def work(name: str = name, waits: bool = waits) -> None:
                    handle = save_async(make_state(comm, 1), tmp_path / name, comm=comm)
                    if waits:
                        handle.wait()

                found.append(code_of(work))
            return found

        first, second = run_threads(rank, 2)
        assert first == [errno.EEXIST, errno.EEXIST, None]
        assert second == [None, errno.EEXIST, None]
        assert sorted(os.listdir(tmp_path)) == ["1", "3"]

    def test_what_one_rank_cannot_store_stops_all(self, tmp_path: Path) -> None:
        def rank(comm: Comm) -> tuple[str, int | str | None, int | str | None]:
            state = make_state(comm, 1)
            state["odd"] = object() if comm.rank == 0 else 1
            try:
                handle = save_async(state, tmp_path / "a", comm=comm)
            except TypeError as exc:
                return (
                    "at once",
                    str(exc),
                    code_of(save_async(make_state(comm, 1), tmp_path / "b", comm=comm).wait),
                )
            told = code_of(handle.wait)
            return (
                "later",
                told,
                code_of(save_async(make_state(comm, 1), tmp_path / "b", comm=comm).wait),
            )

        first, second = run_threads(rank, 2)
        assert first[0] == "at once"
        assert second == ("later", f"{first[1]} (rank 0 of 2)", None)
        assert first[2] is None
        assert os.listdir(tmp_path) == ["b"]


def test_a_save_whose_thread_cannot_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpointer = Checkpointer(tmp_path, comm=SoloComm(), async_=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            checkpointer.save(1, {"m": {"w": torch.ones(3)}})
    checkpointer.wait()  # for nothing
    checkpointer.save(2, {"m": {"w": torch.ones(3)}})
    checkpointer.wait()
    assert checkpointer.steps() == [2]


def test_a_dropped_handle_logs_its_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").mkdir()
    saver = Saver(SoloComm())
    handle = saver.start(make_state(SoloComm(), 1), tmp_path / "a")
    assert handle._finished.wait(30)
    assert caplog.text == ""
    del handle, saver
    gc.collect()
    assert f"{tmp_path / 'a'}: not saved, and nobody waited for it: " in caplog.text
    assert "never replaced" in caplog.text


SCRIPT = """
import sys, torch
from shard_ckpt import save_async
from shard_comm import SoloComm
state = {"m": {"w": torch.ones(100_000)}}
handle = save_async(state, sys.argv[1], comm=SoloComm())
state["m"]["w"].zero_()
"""


def run_script(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_interpreter_exits_after_the_save(tmp_path: Path) -> None:
    result = run_script(SCRIPT, tmp_path / "a")
    assert (result.returncode, result.stderr) == (0, "")
    template = {"m": {"w": torch.zeros(100_000)}}
    load(template, tmp_path / "a", comm=SoloComm())
    assert float(template["m"]["w"].sum()) == 100_000


def test_an_error_is_logged_at_exit(tmp_path: Path) -> None:
    result = run_script(SCRIPT + "raise SystemExit(3)\n", tmp_path)
    assert result.returncode == 3
    assert f"{tmp_path}: not saved, and nobody waited for it: " in result.stderr


def test_a_forked_child_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SoloComm()
    parent = os.getpid()
    handle = save_async(make_state(comm, 1), tmp_path / "a", comm=comm)
    handle.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        with pytest.raises(RuntimeError, match=f"process {parent} saves this, not its child"):
            handle.wait()
        save_async(make_state(comm, 2), tmp_path / "b", comm=comm).wait()
    assert matches(tmp_path / "b", comm, 2)


def train_and_save(comm: Comm, folder: str) -> list[float]:
    state = make_state(comm, 0)
    checkpointer = Checkpointer(folder, comm=comm, keep=2, async_=True)
    sums = []
    for step in range(1, 6):
        for tensor in tensors_of(state):
            held(tensor).add_(1)
        state["step"] = state["optim"]["param_groups"][0]["lr"] = step
        state["rng"].value[1] = step
        checkpointer.save(step, state)
        total = torch.full((100,), float(comm.rank + step))
        comm.all_reduce(total)
        sums.append(float(total[0]))
    checkpointer.wait()
    return sums


def test_processes_over_gloo(tmp_path: Path) -> None:
    assert run_ranks(train_and_save, 2, str(tmp_path)) == [[3.0, 5.0, 7.0, 9.0, 11.0]] * 2
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]
    template = make_state(SoloComm(), 0)
    out = load(template, tmp_path / "step-00000005", comm=SoloComm())
    assert out["step"] == 5
    assert torch.equal(template["big"]["split"], torch.full((600, 600), 5.0))
    # "tied" and "again" are one memory, to which every step adds twice
    assert held(template["model"]["w"])[:3].tolist() == [5, 6, 7]
    assert template["model"]["again"][:2].tolist() == template["model"]["tied"][:2].tolist()


class TestCheckpointer:
    """``async_`` and ``every``."""

    def test_restore_waits_for_the_save_under_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(monkeypatch)
        comm = SoloComm()
        checkpointer = Checkpointer(tmp_path, comm=comm, async_=True)
        assert checkpointer.save(3, make_state(comm, 3))
        assert gate.reached.wait(30)
        assert checkpointer.latest() is None
        threading.Timer(0.1, gate.opened.set).start()
        restored = checkpointer.restore(make_state(comm, 0))
        assert restored is not None
        assert restored[0] == restored[1]["step"] == 3

    def test_wait_raises_the_error(self, tmp_path: Path) -> None:
        def rank(comm: Comm) -> list[int | str | None]:
            checkpointer = Checkpointer(tmp_path, comm=comm, async_=True)
            checkpointer.save(3, make_state(comm, 3))
            checkpointer.wait()
            checkpointer.save(3, make_state(comm, 3))
            return [code_of(checkpointer.wait), code_of(lambda: checkpointer.save(4, {}))]

        assert run_threads(rank, 2) == [[errno.EEXIST, None]] * 2

    def test_steps_that_are_not_due_cost_nothing(self, tmp_path: Path) -> None:
        checkpointer = Checkpointer(tmp_path, comm=SoloComm(), every=3)
        due = [checkpointer.save(step, {"step": step}) for step in range(8)]
        assert due == [True, False, False, True, False, False, True, False]
        assert checkpointer.steps() == [0, 3, 6]
        assert [checkpointer.due(step) for step in (8, 9)] == [False, True]
        with pytest.raises(ValueError, match="every: expected at least 1, or None for all, got 0"):
            Checkpointer(tmp_path, comm=SoloComm(), every=0)


def test_a_handle_is_what_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shard_ckpt"):
        handle = save_async({"step": 1}, tmp_path / "a", comm=SoloComm())
        handle.wait()
    assert isinstance(handle, SaveHandle)
    assert f"{tmp_path / 'a'}: copied in 0." in caplog.text
