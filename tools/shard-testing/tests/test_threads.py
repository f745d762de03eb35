from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from shard_comm import Comm, ThreadComm
from shard_testing import run_threads


def test_results_come_in_rank_order() -> None:
    def run(comm: Comm, base: int, marks: list[int]) -> tuple[int, str]:
        marks.append(comm.rank)
        return base + comm.rank, threading.current_thread().name

    marks: list[int] = []
    results = run_threads(run, 3, 10, marks)
    assert results == [(10, "rank-0"), (11, "rank-1"), (12, "rank-2")]
    assert sorted(marks) == [0, 1, 2]


def test_ranks_talk_to_each_other() -> None:
    def run(comm: Comm) -> float:
        total = torch.tensor([comm.rank + 1.0])
        comm.all_reduce(total)
        return total.item()

    assert run_threads(run, 4) == [10.0] * 4


def test_the_first_failure_comes_back_as_it_was_raised() -> None:
    """The others wait at a barrier for it; they are told, and their errors are not the news."""

    def run(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise KeyError("the cause")
        comm.barrier()

    with pytest.raises(KeyError, match="the cause") as caught:
        run_threads(run, 3, timeout_s=30.0)
    assert [entry.name for entry in caught.traceback][-1] == "run"
    assert not _rank_threads()


def test_the_others_hear_who_gave_up_and_why() -> None:
    heard: list[str] = []

    def run(comm: ThreadComm) -> None:
        if comm.rank == 0:
            raise ValueError("no data")
        try:
            comm.barrier()
        except RuntimeError as error:
            heard.append(str(error))
            raise

    with pytest.raises(ValueError, match="no data"):
        run_threads(run, 2, timeout_s=30.0)
    assert heard == ["rank 0 of 2 gave up: ValueError: no data"]


def test_a_rank_that_never_comes_is_named() -> None:
    def run(comm: Comm) -> None:
        if comm.rank != 1:
            comm.barrier()

    with pytest.raises(RuntimeError, match=r"waited 0\.1 s at barrier\(\) for ranks \[1\]"):
        run_threads(run, 3, timeout_s=0.1)
    assert not _rank_threads()


def test_world_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="expected size >= 1, got 0"):
        run_threads(lambda comm: None, 0)


def _rank_threads() -> list[Any]:
    return [t for t in threading.enumerate() if t.name.startswith("rank-")]
