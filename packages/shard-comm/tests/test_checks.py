"""Arguments that do not fit are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shard_comm import Comm, SoloComm, ThreadComm
from shard_testing import run_threads

ONES = torch.ones
BAD: dict[str, tuple[Callable[[Comm], object], str]] = {
    "gather_size": (
        lambda c: c.all_gather(ONES(5), ONES(2)),
        r"all_gather: expected 4 elements beside 2 .*, got 5 \(rank 0 of 2\)",
    ),
    "gather_dtype": (
        lambda c: c.all_gather(ONES(4), ONES(2).double()),
        r"all_gather: expected one dtype, got torch.float32 and torch.float64 \(rank 0 of 2\)",
    ),
    "gather_strides": (
        lambda c: c.all_gather(ONES(8)[::2], ONES(2)),
        r"all_gather: expected a contiguous tensor, got strides \(2,\) .*; call contiguous\(\)",
    ),
    "gather_input_strides": (lambda c: c.all_gather(ONES(4), ONES(4)[::2]), "contiguous"),
    "gather_device": (
        lambda c: c.all_gather(ONES(4, device="meta"), ONES(2)),
        "all_gather: expected a tensor on cpu, got one on meta",
    ),
    "gather_into_anothers_slice": (
        lambda c: c.all_gather((out := ONES(4)), out[2:]),
        r"all_gather: out and inp overlap in memory \(rank 0 of 2\)",
    ),
    "gather_half_a_slice": (lambda c: c.all_gather((out := ONES(4)), out[1:3]), "overlap"),
    "scatter_size": (
        lambda c: c.reduce_scatter(ONES(2), ONES(3)),
        "reduce_scatter: expected 4 elements beside 2 .*, got 3",
    ),
    "scatter_op": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), op="mean"),
        r"reduce_scatter: expected op to be one of \('sum', 'max', 'min'\), got 'mean'",
    ),
    "scatter_into_input": (
        lambda c: c.reduce_scatter((inp := ONES(4))[:2], inp),
        "reduce_scatter: out and inp overlap",
    ),
    "reduce_op": (
        lambda c: c.all_reduce(ONES(2), op="avg"),
        "all_reduce: expected op to be one of .*, got 'avg'",
    ),
    "reduce_strides": (lambda c: c.all_reduce(ONES(2, 3).t()), "all_reduce: expected a contiguous"),
    "broadcast_src": (
        lambda c: c.broadcast(ONES(2), src=2),
        r"broadcast: expected src in \[0, 2\), got 2",
    ),
    "broadcast_negative_src": (lambda c: c.broadcast(ONES(2), src=-1), "got -1"),
    "exchange_size": (lambda c: c.all_to_all(ONES(2), ONES(4)), "all_to_all: expected 4 elements"),
    "exchange_uneven": (
        lambda c: c.all_to_all(ONES(3), ONES(3)),
        "all_to_all: expected a multiple of 2 elements, got 3",
    ),
    "exchange_in_place": (lambda c: c.all_to_all((both := ONES(4)), both), "all_to_all: .*overlap"),
    "timeout": (
        lambda c: c.all_reduce(ONES(2), timeout_s=0),
        r"all_reduce: expected timeout_s > 0, got 0 \(rank 0 of 2\)",
    ),
    "gather_timeout": (lambda c: c.all_gather(ONES(4), ONES(2), timeout_s=-1), "timeout_s > 0"),
    "scatter_timeout": (lambda c: c.reduce_scatter(ONES(2), ONES(4), timeout_s=0), "timeout_s > 0"),
    "exchange_timeout": (lambda c: c.all_to_all(ONES(2), ONES(2), timeout_s=0), "timeout_s > 0"),
    "broadcast_timeout": (lambda c: c.broadcast(ONES(2), src=0, timeout_s=0), "timeout_s > 0"),
    "barrier_timeout": (lambda c: c.barrier(timeout_s=0), "barrier: expected timeout_s > 0"),
    "object_timeout": (
        lambda c: c.all_gather_object(1, timeout_s=float("nan")),
        "all_gather_object: expected timeout_s > 0, got nan",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_and_the_group_goes_on(name: str) -> None:
    """The other rank never heard of it: its next collective meets this rank's next one."""
    call, message = BAD[name]

    def run(comm: Comm) -> float:
        if comm.rank == 0:
            with pytest.raises(ValueError, match=message):
                call(comm)
        total = ONES(1)
        comm.all_reduce(total)
        return total.item()

    assert run_threads(run, 2, timeout_s=10.0) == [2.0, 2.0]


def test_one_rank_may_reduce_in_place() -> None:
    """Nobody else reads, and nothing is copied that is in place."""
    comm = SoloComm()
    data = torch.arange(4.0)
    version = data._version
    comm.all_gather(data, data)
    comm.reduce_scatter(data, data)
    comm.all_to_all(data, data)
    comm.all_reduce(data)
    comm.broadcast(data, src=0)
    assert data.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert data._version == version
    other = torch.empty(4)
    comm.reduce_scatter(other, data)
    assert other.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ranks_and_timeouts_of_a_comm() -> None:
    meeting = ThreadComm.group(2)[0]._meeting
    with pytest.raises(ValueError, match=r"expected a rank in \[0, 2\), got 2"):
        ThreadComm(2, meeting, timeout_s=1.0)
    with pytest.raises(ValueError, match="expected timeout_s > 0, got 0"):
        ThreadComm(1, meeting, timeout_s=0.0)
