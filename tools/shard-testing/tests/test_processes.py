from __future__ import annotations

import os
import signal
import threading
from multiprocessing import active_children
from multiprocessing.util import Finalize
from pathlib import Path

import pytest
import torch

from shard_comm import Comm, SharedMemoryComm
from shard_testing import run_ranks


def report(comm: Comm, word: str, tensor: torch.Tensor) -> tuple[int, int, str, float, int]:
    assert isinstance(comm, SharedMemoryComm)
    total = tensor * (comm.rank + 1)
    comm.all_reduce(total)
    return comm.rank, comm.size, word, total.item(), torch.get_num_threads()


def test_results_come_in_rank_order() -> None:
    results = run_ranks(report, 2, "word", torch.tensor(2.0))
    assert results == [(0, 2, "word", 6.0, 1), (1, 2, "word", 6.0, 1)]


def process_id(comm: Comm) -> int:
    return os.getpid()


def test_ranks_are_processes_of_their_own_and_end_with_the_call() -> None:
    ids = run_ranks(process_id, 2)
    assert len({*ids, os.getpid()}) == 3
    assert not any(is_running(i) for i in ids)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def note_process(comm: Comm, folder: str) -> None:
    Path(folder, str(comm.rank)).write_text(str(os.getpid()), encoding="utf-8")
    comm.barrier()


def check_nothing_is_left(folder: Path, size: int) -> None:
    ids = [int(Path(folder, str(r)).read_text(encoding="utf-8")) for r in range(size)]
    assert not any(is_running(i) for i in ids)
    assert active_children() == []


def divide_by_zero(comm: Comm, folder: str) -> float:
    note_process(comm, folder)
    if comm.rank == 1:
        return 1 / 0
    comm.barrier()  # which never comes about
    return 0.0


def test_a_failing_ranks_traceback_comes_back(tmp_path: Path) -> None:
    """Rank 0 fails too, for want of its peer, and that is not the news."""
    message = r"(?s)^rank 1 of 2 failed:\nTraceback.* in divide_by_zero\n.*ZeroDivisionError"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(divide_by_zero, 2, str(tmp_path), timeout_s=60)
    check_nothing_is_left(tmp_path, 2)


def leave(comm: Comm, folder: str, how: str) -> None:
    note_process(comm, folder)
    if comm.rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("kill", -9)])
def test_a_dying_process_is_reported_with_its_exit_code(
    how: str, code: int, tmp_path: Path
) -> None:
    message = rf"rank 1 of 2 failed:\nthe process died without a traceback \(exit code {code}\)"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(leave, 2, str(tmp_path), how, timeout_s=60)
    check_nothing_is_left(tmp_path, 2)


def hang(comm: Comm, folder: str) -> None:
    note_process(comm, folder)
    threading.Event().wait()


def test_a_timeout_says_which_ranks_and_where_they_stood(tmp_path: Path) -> None:
    with pytest.raises(
        TimeoutError, match=r"^ranks \[0, 1\] of 2 did not finish within 3 s"
    ) as caught:
        run_ranks(hang, 2, str(tmp_path), timeout_s=3)
    assert str(caught.value).count("in hang\n") == 2
    check_nothing_is_left(tmp_path, 2)


def return_a_lock(comm: Comm) -> object:
    return threading.Lock()


def test_results_that_do_not_pickle_are_an_error_of_their_rank() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 failed:.*cannot pickle"):
        run_ranks(return_a_lock, 1)


def test_functions_that_a_new_process_cannot_find_are_refused() -> None:
    def nested(comm: Comm) -> None: ...

    with pytest.raises(ValueError, match=r"nested: expected a function at the top level"):
        run_ranks(nested, 1)
    with pytest.raises(ValueError, match=r"<lambda>: expected a function at the top level"):
        run_ranks(lambda comm: None, 1)
    assert active_children() == []


def test_world_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected world_size >= 1, got 0"):
        run_ranks(process_id, 0)


def lose_rank_1(comm: Comm, folder: str, how: str) -> int:
    note_process(comm, folder)
    if comm.rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()
    if how == "bad end" and comm.rank == 2:
        Finalize(None, os._exit, args=(3,), exitpriority=0)
    return comm.rank


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_lost_ranks_are_not_waited_for(how: str, tmp_path: Path) -> None:
    assert run_ranks(lose_rank_1, 3, str(tmp_path), how, lost=[1], timeout_s=60) == [0, None, 2]
    check_nothing_is_left(tmp_path, 3)


def test_the_others_must_end_well(tmp_path: Path) -> None:
    message = r"rank 2 returned, but its process did not end well within 5 s \(exit code 3\)"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(lose_rank_1, 3, str(tmp_path), "bad end", lost=[1], timeout_s=60)
    check_nothing_is_left(tmp_path, 3)
