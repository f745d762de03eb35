"""Ranks that hang, stop or die: the others say who and where, in time, and end."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from shard_comm import Comm, GroupComm, _roll
from shard_comm._roll import GRACE_S, Inquiry, Roll
from shard_testing import run_ranks

LIMIT_S = 2.0
CALLS: dict[str, tuple[Callable[[Comm], object], str]] = {
    "gather": (
        lambda c: c.all_gather(torch.empty(6), torch.ones(2), name="layers.8"),
        "all_gather of 2 float32 for layers.8",
    ),
    "scatter": (
        lambda c: c.reduce_scatter(torch.empty(2), torch.ones(6), name="layers.7.mlp"),
        "reduce_scatter sum of 6 float32 for layers.7.mlp",
    ),
    "reduce": (lambda c: c.all_reduce(torch.ones(2), op="max"), "all_reduce max of 2 float32"),
    "broadcast": (lambda c: c.broadcast(torch.ones(2), src=1), "broadcast of 2 float32"),
    "exchange": (lambda c: c.all_to_all(torch.empty(3), torch.ones(3)), "all_to_all of 3 float32"),
    "object": (
        lambda c: c.all_gather_object({}),
        "all_gather of 1 int64 (all_gather_object)",
    ),
    "barrier": (lambda c: c.barrier(), "barrier()"),
}


def go(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    signal.pause()


def lose_a_rank(comm: Comm, how: str) -> dict[str, tuple[str, float]]:
    """Call each kind of collective on a group of its own, all at once; rank 1 does not come."""
    ranks, limit = list(range(comm.size)), timedelta(seconds=LIMIT_S)
    comms = {kind: GroupComm(dist.new_group(ranks, limit)) for kind in CALLS}
    for each in comms.values():
        each.barrier()
    if comm.rank == 1:
        go(how)

    def call(kind: str) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            CALLS[kind][0](comms[kind])
        return str(caught.value), time.monotonic() - began

    with ThreadPoolExecutor(len(CALLS)) as pool:
        return dict(zip(CALLS, pool.map(call, CALLS), strict=True))


@pytest.mark.parametrize("how", ["hanging", "stopped", "killed"])
def test_a_lost_rank_is_named_by_all_others_in_time(how: str) -> None:
    results = run_ranks(lose_a_rank, 3, how, timeout_s=60, lost=[1])
    assert results[1] is None
    for rank in (0, 2):
        for kind, (message, waited_s) in results[rank].items():
            what = re.escape(CALLS[kind][1])
            assert re.match(
                rf"{what} failed on rank {rank} of 3 after \d\.\d s \(limit 2 s\); "
                rf"ranks \[0, 2\] arrived, rank 1 did not: ",
                message,
            ), message
            assert waited_s < LIMIT_S + GRACE_S + 1.5, kind
            if how != "killed":
                assert waited_s > LIMIT_S, kind


def rolls(size: int) -> list[Roll]:
    store = HashStore()
    return [Roll(store, rank, size) for rank in range(size)]


def test_who_waits_in_this_call_or_a_later_one_has_come() -> None:
    everyone = rolls(7)
    assert everyone[0].missing(1) == list(range(7))
    assert [everyone[0].begin(), everyone[0].begin(), everyone[1].begin()] == [1, 2, 1]
    for rank, call in [(0, 2), (1, 1), (3, 2), (4, 3), (6, 10)]:
        everyone[rank].write(call)
    assert everyone[0].missing(2) == [1, 2, 5]
    assert everyone[5].missing(1) == [2, 5]
    everyone[1].write(2)
    assert everyone[0].missing(2) == [2, 5]


def test_a_rank_that_speaks_late_is_heard() -> None:
    """It waits for less time than the one that gives up: within the grace it says so."""
    first, second = rolls(2)
    inquiry = Inquiry(first, 1, "barrier()")
    inquiry.start()
    heard: list[str] = []
    asking = threading.Thread(target=lambda: heard.append(inquiry.result()))
    asking.start()
    second.write(1)
    asking.join()
    assert heard == ["all ranks arrived"]


def test_many_ranks_are_not_all_listed() -> None:
    roll = rolls(40)[3]
    inquiry = Inquiry(roll, 1, "barrier()")
    inquiry.start()
    assert re.fullmatch(
        r"rank 3 arrived, 39 ranks \[0, 1, 2, 4, .*, 16\] and so on did not", inquiry.result()
    )


class Heard(logging.Handler):
    """Keeps what is logged, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()
        self.came.set()


def test_a_long_wait_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_roll, "_WARN_S", _roll.SLOW_S)
    heard = Heard()
    logger = logging.getLogger("shard_comm")
    logger.addHandler(heard)
    inquiry = Inquiry(rolls(3)[0], 1, "barrier()")
    try:
        inquiry.start()
        assert heard.came.wait(30)
    finally:
        logger.removeHandler(heard)
        inquiry.dismiss()
    assert heard.text == "barrier() on rank 0 of 3 waited 1 s for ranks [1, 2]"


class Deaf(Roll):
    """Its store is on a host that stopped."""

    def write(self, call: int) -> None:
        threading.Event().wait(60)


class Gone(Roll):
    """Its store is on a host that is gone."""

    def write(self, call: int) -> None:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize(
    ("kind", "why"), [(Deaf, "the store does not answer"), (Gone, "the store failed: Broken pipe")]
)
def test_a_store_that_is_gone_delays_nobody_for_long(kind: type[Roll], why: str) -> None:
    inquiry = Inquiry(kind(HashStore(), 0, 2), 1, "barrier()")
    inquiry.start()
    began = time.monotonic()
    assert inquiry.result() == (
        f"who arrived is not known, {why} (its host may be the one missing)"
    )
    assert time.monotonic() - began < GRACE_S + 2


def test_a_wait_that_ends_well_asks_nothing() -> None:
    first, _ = rolls(2)
    inquiry = Inquiry(first, 1, "barrier()")
    inquiry.start()
    inquiry.dismiss()
    inquiry.join(10)
    assert not inquiry.is_alive()
    assert inquiry._missing is None
