"""Arguments that do not fit are refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shard_comm import Comm, HostStaged, PlanComm, Recorded, Slices, SoloComm, ThreadComm
from shard_comm._checks import serves
from shard_testing import run_threads

ONES = torch.ones
BAD: dict[str, tuple[Callable[[Comm], object], str]] = {
    "gather_size": (
        lambda c: c.all_gather(ONES(5), ONES(2)),
        r"all_gather: expected 4 elements in out for 2 in inp, got 5 \(rank 0 of 2\)$",
    ),
    "gather_turned": (
        lambda c: c.all_gather(ONES(2), ONES(4)),
        r"8 elements in out for 4 in inp, got 2 .*; the result comes first, all_gather\(out, inp\)",
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
        "reduce_scatter: expected 4 elements in inp for 2 in out, got 3",
    ),
    "scatter_turned": (
        lambda c: c.reduce_scatter(ONES(4), ONES(2)),
        "expected 8 elements in inp for 4 in out, got 2 .*; the result comes first, reduce_scatter",
    ),
    "scatter_own_size": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[ONES(1), ONES(2)]),
        r"reduce_scatter: expected own to have 2 elements in all, got 3 \(rank 0 of 2\)",
    ),
    "scatter_own_dtype": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[ONES(2).double()]),
        r"reduce_scatter: expected own to be contiguous tensors \[n\] of torch.float32, got "
        r"torch.float64 of shape \[2\]",
    ),
    "scatter_own_strides": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[ONES(4)[::2]]),
        r"of shape \[2\], strides \(2,\)",
    ),
    "scatter_own_shape": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[ONES(2, 1)]),
        r"expected own to be contiguous tensors \[n\]",
    ),
    "scatter_own_device": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[ONES(2, device="meta")]),
        "reduce_scatter: expected own on cpu, got a tensor on meta",
    ),
    "scatter_own_is_out": (
        lambda c: c.reduce_scatter((out := ONES(2)), ONES(4), own=[out]),
        r"reduce_scatter: out and inp overlap in memory \(rank 0 of 2\)",
    ),
    "scatter_op": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), op="average"),
        r"reduce_scatter: expected op to be one of \('sum', 'mean', .*\), got 'average' \(rank 0",
    ),
    "scatter_dtype": (
        lambda c: c.reduce_scatter(ONES(2).double(), ONES(4)),
        r"reduce_scatter: expected one dtype, got torch.float32 and torch.float64 \(rank 0 of 2\)",
    ),
    "scatter_output_is_neither": (
        lambda c: c.reduce_scatter(ONES(2).half(), ONES(4).bfloat16(), sum_dtype=torch.float32),
        r"expected out to be one of \[torch.bfloat16, torch.float32\], got torch.float16",
    ),
    "scatter_narrow_sum": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), sum_dtype=torch.bfloat16),
        "reduce_scatter: expected a sum_dtype that holds every torch.float32, got torch.bfloat16",
    ),
    "scatter_no_sum": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), op="max", sum_dtype=torch.float64),
        "reduce_scatter: expected no sum_dtype with op='max', got torch.float64",
    ),
    "reduce_mean_of_integers": (
        lambda c: c.all_reduce(ONES(2).int(), op="mean"),
        "all_reduce: expected floating-point or complex numbers for op='mean', got torch.int32",
    ),
    "reduce_tiny_floats": (
        lambda c: c.all_reduce(ONES(2).to(torch.float8_e5m2)),
        r"expected a dtype that can be reduced, got torch.float8_e5m2 .*pass sum_dtype",
    ),
    "reduce_unordered": (
        lambda c: c.all_reduce(ONES(2, dtype=torch.complex64), op="max"),
        "all_reduce: expected ordered numbers, got torch.complex64",
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
    "broadcast_device": (
        lambda c: c.broadcast(ONES(2, device="meta"), src=0),
        r"broadcast: expected a tensor on cpu, got one on meta \(rank 0 of 2\)",
    ),
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
    "exchange_slices": (
        lambda c: c.all_to_all(ONES(2), ONES(3), slices=Slices((0, 2), (0, 2), 2)),
        "all_to_all: expected an inp of 2 elements, got 3",
    ),
    "exchange_slices_out": (
        lambda c: c.all_to_all(ONES(3), ONES(2), slices=Slices((0, 2), (0, 2), 2)),
        "all_to_all: expected 2 elements in out for 2 in inp, got 3",
    ),
    "exchange_slices_ranks": (
        lambda c: c.all_to_all(ONES(2), ONES(2), slices=Slices((2,), (0, 2), 2)),
        "all_to_all: expected slices of 2 lengths each way, none below 0, got",
    ),
    "exchange_slices_longest": (
        lambda c: c.all_to_all(ONES(2), ONES(2), slices=Slices((0, 2), (0, 2), 1)),
        "all_to_all: expected slices of at most 1, got",
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


def list_of_ones() -> Any:
    return [ONES(2), ONES(2)]


NO_TENSORS: dict[str, tuple[Callable[[Comm], object], str]] = {
    "gather": (lambda c: c.all_gather(list_of_ones(), ONES(2)), "all_gather: expected out .* list"),
    "gather_input": (lambda c: c.all_gather(ONES(4), list_of_ones()), "all_gather: expected inp"),
    "scatter": (
        lambda c: c.reduce_scatter(list_of_ones(), ONES(4)),
        "reduce_scatter: expected out",
    ),
    "scatter_input": (
        lambda c: c.reduce_scatter(ONES(2), list_of_ones()),
        r"reduce_scatter: expected inp to be a tensor, got list \(rank 0 of 2\); .* in one tensor",
    ),
    "scatter_own": (
        lambda c: c.reduce_scatter(ONES(2), ONES(4), own=[list_of_ones()]),
        "reduce_scatter: expected own",
    ),
    "reduce": (lambda c: c.all_reduce(list_of_ones()), "all_reduce: expected tensor .* list"),
    "broadcast": (lambda c: c.broadcast(list_of_ones(), src=0), "broadcast: expected tensor"),
    "exchange": (lambda c: c.all_to_all(list_of_ones(), ONES(4)), "all_to_all: expected out"),
    "exchange_input": (lambda c: c.all_to_all(ONES(4), list_of_ones()), "all_to_all: expected inp"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_lists_of_tensors_are_refused(name: str) -> None:
    call, message = NO_TENSORS[name]
    for comm in (PlanComm(2, 0, "cpu"), Recorded(PlanComm(2, 0, "cpu"))):
        with pytest.raises(TypeError, match=message):
            call(comm)


def test_tensors_on_another_device_of_the_same_kind_are_refused() -> None:
    """Ranks share a host: memory of a neighbour's device would be read without a word."""
    comm = SoloComm("cuda:1")
    devices = [torch.device(d) for d in ("cuda:1", "cuda:0", "cpu")]
    assert [serves(comm.device, device) for device in devices] == [True, False, False]
    assert serves(torch.device("cuda"), torch.device("cuda:3"))
    with pytest.raises(ValueError, match=r"expected an inner comm for CPU tensors, got SoloComm"):
        HostStaged(comm, "cuda:1")


CALLS: dict[str, Callable[[Comm], object]] = {
    "all_gather": lambda c: c.all_gather(ONES(c.size), ONES(1)),
    "reduce_scatter": lambda c: c.reduce_scatter(ONES(1), ONES(c.size)),
    "all_reduce": lambda c: c.all_reduce(ONES(1), op="mean"),
    "broadcast": lambda c: c.broadcast(ONES(1), src=0),
    "all_to_all": lambda c: c.all_to_all(ONES(c.size), ONES(c.size)),
    "barrier": lambda c: c.barrier(),
    "all_gather_object": lambda c: c.all_gather_object(1),
    "split": lambda c: c.split(0),
}

CLOSED: dict[str, Callable[[], Comm]] = {
    "solo": SoloComm,
    "threads": lambda: ThreadComm.group(2)[1],
    "recorded": lambda: Recorded(SoloComm()),
    "staged": lambda: HostStaged(SoloComm(), "meta"),
    "plan": lambda: PlanComm(3, 1, "cpu"),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_comm_refuses_every_call(name: str) -> None:
    comm = CLOSED[name]()
    assert not comm.closed
    comm.close()
    comm.close()
    assert comm.closed
    assert getattr(comm, "inner", comm).closed
    for op, call in CALLS.items():
        where = rf"\(rank {comm.rank} of {comm.size}\)"
        with pytest.raises(ValueError, match=f"^{op}: this comm is closed {where}; make a new"):
            call(comm)


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
