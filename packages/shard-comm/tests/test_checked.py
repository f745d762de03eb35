"""Ranks that compare their calls: what differs is named on every rank, and so is who is missing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch

from shard_comm import (
    CallEntry,
    Checked,
    Comm,
    GroupComm,
    HostStaged,
    Recorded,
    SharedMemoryComm,
    Slices,
    SoloComm,
    ThreadComm,
    comm_for,
)
from shard_testing import run_ranks, run_threads

ONES = torch.ones


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


Call = Callable[[Comm], object]
MISMATCHES: dict[str, tuple[Call, Call, str]] = {
    "operation": (
        lambda c: c.all_gather(ONES(3).bfloat16(), ONES(1).bfloat16(), name="layers.8"),
        lambda c: c.reduce_scatter(ONES(1), ONES(3), name="layers.7.mlp"),
        "ranks [0, 2] call all_gather of 1 bfloat16 for layers.8 (call 2), "
        "rank 1 calls reduce_scatter sum of 3 float32 for layers.7.mlp (call 2)",
    ),
    "elements": (
        lambda c: c.all_reduce(ONES(2)),
        lambda c: c.all_reduce(ONES(3)),
        "ranks [0, 2] call all_reduce sum of 2 float32 (call 2), "
        "rank 1 calls all_reduce sum of 3 float32 (call 2)",
    ),
    "dtype": (
        lambda c: c.all_to_all(torch.empty(3), ONES(3)),
        lambda c: c.all_to_all(torch.empty(3).int(), ONES(3).int()),
        "ranks [0, 2] call all_to_all of 3 float32 (call 2), "
        "rank 1 calls all_to_all of 3 int32 (call 2)",
    ),
    "slices": (
        lambda c: c.all_to_all(ONES(0), ONES(0), slices=Slices((0,) * 3, (0,) * 3, 5)),
        lambda c: c.all_to_all(ONES(0), ONES(0), slices=Slices((0,) * 3, (0,) * 3, 6)),
        "ranks [0, 2] call all_to_all by slices of 5 float32 (call 2), "
        "rank 1 calls all_to_all by slices of 6 float32 (call 2)",
    ),
    "reduction": (
        lambda c: c.reduce_scatter(ONES(1), ONES(3), op="mean"),
        lambda c: c.reduce_scatter(ONES(1), ONES(3), op="mean", sum_dtype=torch.float64),
        "ranks [0, 2] call reduce_scatter sum of 3 float32 (mean) (call 2), "
        "rank 1 calls reduce_scatter sum of 3 float32 (mean, float64 sums) (call 2)",
    ),
    "source": (
        lambda c: c.broadcast(ONES(1), src=0),
        lambda c: c.broadcast(ONES(1), src=1),
        "ranks [0, 2] call broadcast from 0 of 1 float32 (call 2), "
        "rank 1 calls broadcast from 1 of 1 float32 (call 2)",
    ),
    "name": (
        lambda c: c.all_reduce(ONES(1), op="max", name="layers.0"),
        lambda c: c.all_reduce(ONES(1), op="max", name="layers.1"),
        "ranks [0, 2] call all_reduce max of 1 float32 for layers.0 (call 2), "
        "rank 1 calls all_reduce max of 1 float32 for layers.1 (call 2)",
    ),
    "control": (
        lambda c: c.barrier(),
        lambda c: c.all_gather_object(1),
        "ranks [0, 2] call barrier() (call 2), rank 1 calls all_gather_object() (call 2)",
    ),
    "split": (
        lambda c: c.split(0),
        lambda c: c.all_reduce(ONES(1), sum_dtype=torch.float64),
        "ranks [0, 2] call split() (call 2), "
        "rank 1 calls all_reduce sum of 1 float32 (float64 sums) (call 2)",
    ),
}


def differ(comm: Comm, name: str) -> tuple[str, float]:
    """Rank 1 makes another call than the others; then all go on as if nothing had been."""
    checked = Checked(comm)
    checked.barrier()
    common, other, _ = MISMATCHES[name]
    call = other if comm.rank == 1 else common
    message = message_of(lambda: call(checked))
    total = ONES(1)
    checked.all_reduce(total)
    return message, total.item()


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_differs_is_named_on_every_rank_and_the_group_goes_on(name: str) -> None:
    expected = f"ranks call different collectives: {MISMATCHES[name][2]}"
    assert run_threads(differ, 3, name) == [(expected, 3.0)] * 3


def test_a_call_more_on_one_rank_is_found_at_the_next_one() -> None:
    """Same operation, same size, another parameter: the sums would have been mixed up."""

    def run(comm: Comm) -> str:
        checked = Checked(comm)
        for layer in range(comm.rank, 2):
            checked.all_reduce(ONES(2), name=f"layers.{layer}")
        return ""

    with pytest.raises(
        RuntimeError, match=r"rank 0 calls .* for layers\.0 \(call 1\), rank 1 calls .*layers\.1 "
    ):
        run_threads(run, 2)


def test_rank_0_logs_the_last_calls_of_all(caplog: pytest.LogCaptureFixture) -> None:
    def run(comm: Comm) -> None:
        checked = Checked(comm)
        for step in range(70):
            checked.all_reduce(ONES(2), name=f"step {step}")
        with pytest.raises(RuntimeError, match="different collectives"):
            checked.all_reduce(ONES(2), name=f"last of {comm.rank}")

    with caplog.at_level(logging.ERROR, "shard_comm"):
        run_threads(run, 3)
    assert len(caplog.messages) == 3
    for rank, text in enumerate(caplog.messages):
        first, *lines = text.split("\n")
        assert first == f"the last calls of rank {rank} of 3:"
        assert len(lines) == 64
        assert re.fullmatch(
            r"  8: all_reduce sum of 2 float32 for step 7, 8 bytes, done, 0\.\d{3} s", lines[0]
        )
        assert re.fullmatch(
            rf"  71: all_reduce sum of 2 float32 for last of {rank}, 8 bytes, failed, 0\.\d+ s",
            lines[-1],
        )


def test_who_does_not_come_is_named_with_the_call(caplog: pytest.LogCaptureFixture) -> None:
    def run(comm: Comm) -> str:
        checked = Checked(comm)
        checked.barrier()
        if comm.rank == 1:
            return ""
        return message_of(
            lambda: checked.reduce_scatter(ONES(2), ONES(6), name="layers.7", timeout_s=0.2)
        )

    with caplog.at_level(logging.ERROR, "shard_comm"):
        messages = run_threads(run, 3)
    for rank in (0, 2):
        assert re.fullmatch(
            rf"reduce_scatter sum of 6 float32 for layers\.7 \(call 2\): rank {rank} of 3 waited "
            r"0\.\d s for all ranks to make the same call: rank [02] of 3 waited 0\.2 s at "
            r"all_gather of 1 int64 \(check\) for ranks \[1\]",
            messages[rank],
        ), messages[rank]
    logged = sorted(caplog.messages)
    assert [text.split("\n")[0] for text in logged] == [
        f"the last calls of rank {rank} of 3:" for rank in (0, 2)
    ]
    assert all(
        "\n  2: reduce_scatter sum of 6 float32 for layers.7, 24 bytes, fai" in text
        for text in logged
    )


def test_entries_say_what_was_called_and_how_it_went() -> None:
    checked = Checked(SoloComm())
    checked.barrier()
    checked.all_reduce(ONES(2).bfloat16(), op="mean", name="norm")
    work = checked.all_gather(ONES(3), ONES(3), async_op=True)
    states = [entry.state for entry in checked.entries]
    assert states == ["done", "done", "running"]
    work.wait()
    reduced, gathered = checked.entries[1:]
    assert reduced == CallEntry(
        2,
        "all_reduce sum of 2 bfloat16 (mean) for norm",
        "all_reduce sum",
        "norm",
        2,
        torch.bfloat16,
        4,
        reduced.seconds,
        "done",
    )
    assert gathered.state == "done"
    assert gathered.seconds > 0
    assert (checked.entries[0].numel, checked.entries[0].dtype) == (0, None)


class _Faulty(HostStaged):
    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> None:  # type: ignore[override]
        raise RuntimeError("the cable is out")


def test_a_call_that_fails_inside_leaves_its_entry(caplog: pytest.LogCaptureFixture) -> None:
    checked = Checked(_Faulty(SoloComm(), "cpu"))
    assert message_of(lambda: checked.all_reduce(ONES(1))) == "the cable is out"
    assert [entry.state for entry in checked.entries] == ["failed"]
    assert "1: all_reduce sum of 1 float32, 4 bytes, failed" in caplog.text


def test_counting_outside_counts_no_checks() -> None:
    def run(comm: Comm) -> dict[str, int]:
        recorded = Recorded(Checked(comm))
        part = recorded.split(0)
        part.all_reduce(ONES(1))
        assert isinstance(part, Recorded)
        assert isinstance(part.inner, Checked)
        return {op: record.calls for op, record in part.records.items()}

    assert run_threads(run, 2) == [{"all_reduce": 1}] * 2


def test_an_array_that_all_map_is_compared_and_kept() -> None:
    """Rank 1 publishes another layer; the claims, which need not be the same, are kept."""

    def run(comm: Comm) -> tuple[str, list[str]]:
        checked = Checked(comm)
        arrays = [checked.shared(4, torch.float32, name=f"layers.{n}") for n in (0, 1)]
        first, second = arrays
        assert first is not None
        assert second is not None
        if comm.rank == 0:
            first.claim()
        first.own.fill_(comm.rank + 1)
        first.publish().wait()
        assert first.data.tolist() == [1.0, 1.0, 2.0, 2.0]
        first.release()
        message = message_of((first, second)[comm.rank].publish)
        return message, [str(entry).split(", ")[0] for entry in checked.entries]

    (first, calls), (second, fewer) = run_threads(run, 2, shares_memory=True)
    assert first == second
    assert first == (
        "ranks call different collectives: rank 0 calls publish of 4 float32 for layers.0 (call 4),"
        " rank 1 calls publish of 4 float32 for layers.1 (call 4)"
    )
    assert calls == [
        "1: shared of 4 float32 for layers.0",
        "2: shared of 4 float32 for layers.1",
        "2: claim of 4 float32 for layers.0",
        "3: publish of 4 float32 for layers.0",
        "4: publish of 4 float32 for layers.0",
    ]
    assert fewer == [*calls[:2], calls[3], "4: publish of 4 float32 for layers.1"]


def test_an_array_of_a_closed_comm_is_refused() -> None:
    checked = Checked(ThreadComm.group(1, shares_memory=True)[0])
    array = checked.shared(4, torch.float32)
    assert array is not None
    checked.close()
    calls: dict[str, Callable[[], object]] = {
        "claim": array.claim,
        "publish": array.publish,
        "shared": lambda: checked.shared(4, torch.float32),
    }
    for op, call in calls.items():
        with pytest.raises(
            ValueError, match=rf"^{op}: this comm is closed \(rank 0 of 1\); make a"
        ):
            call()


def check_processes(comm: Comm) -> None:
    """All mismatches in shared memory and over Gloo, and a rank that does not come."""
    gloo = comm_for(shared_memory=False)
    assert isinstance(gloo, GroupComm)
    assert isinstance(comm, SharedMemoryComm)
    for transport in (comm, gloo):
        for name, (_, _, who) in MISMATCHES.items():
            expected = (f"ranks call different collectives: {who}", 3.0)
            assert differ(transport, name) == expected
    checked = Checked(comm)
    if comm.rank != 1:
        message = message_of(lambda: checked.all_reduce(ONES(2), name="norm", timeout_s=0.5))
        assert re.match(
            rf"all_reduce sum of 2 float32 for norm \(call 1\): rank {comm.rank} of 3 waited .* s "
            r"for all ranks to make the same call: all_gather of 1 int64 \(check\) on rank [02] of "
            r"3.* rank(s \[1\]| 1 \(process \d+\) is gone).*; ranks \[0, 2\] had arrived",
            message,
        ), message
    checked = Checked(gloo)
    if comm.rank != 1:
        message = message_of(lambda: checked.all_reduce(ONES(2), name="norm", timeout_s=0.5))
        assert re.match(
            rf"all_reduce sum of 2 float32 for norm \(call 1\): rank {comm.rank} of 3 waited .* s "
            rf"for all ranks to make the same call: all_gather of 1 int64 \(check\) failed on rank "
            rf"{comm.rank} of 3 .*; ranks \[0, 2\] arrived, rank 1 did not",
            message,
        ), message


def test_processes() -> None:
    run_ranks(check_processes, 3, timeout_s=30, lost=[1])
