"""Threads as ranks: waiting, giving up, and calls that do not match."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from shard_comm import Comm, HostStaged, ThreadComm
from shard_testing import run_threads


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        call()
    return str(caught.value)


def test_a_group_is_made_in_rank_order() -> None:
    group = ThreadComm.group(3, timeout_s=5.0)
    assert [(c.rank, c.size, c.timeout_s) for c in group] == [(0, 3, 5.0), (1, 3, 5.0), (2, 3, 5.0)]
    assert repr(group[1]) == "ThreadComm(rank=1 of 3, device=cpu)"
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"expected size >= 1, got {size}"):
            ThreadComm.group(size)


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda c: c.all_reduce(torch.ones(2), timeout_s=0.1), "all_reduce sum of 2 float32"),
        (
            lambda c: c.broadcast(torch.ones(2), src=1, timeout_s=0.1),
            "broadcast from 1 of 2 float32",
        ),
        (
            lambda c: c.all_reduce(torch.ones(2), timeout_s=0.1, name="norm", op="mean"),
            r"all_reduce sum of 2 float32 \(mean\) for norm",
        ),
        (lambda c: c.barrier(timeout_s=0.1), r"barrier\(\)"),
        (lambda c: c.all_gather_object(1, timeout_s=0.1), r"all_gather_object\(\)"),
    ],
)
def test_a_timeout_names_the_missing_ranks(call: Callable[[Comm], object], what: str) -> None:
    """Ranks 1 and 3 never call; 0 and 2 hear of it, and so does whoever comes later."""
    group = ThreadComm.group(4)
    waiter = threading.Thread(target=lambda: heard.append(message_of(lambda: call(group[2]))))
    heard: list[str] = []
    waiter.start()
    heard.append(message_of(lambda: call(group[0])))
    waiter.join()
    heard.append(message_of(lambda: call(group[3])))
    assert heard[0] == heard[1] == heard[2]
    with pytest.raises(
        RuntimeError, match=rf"rank [02] of 4 waited 0\.1 s at {what} for ranks \[1, 3\]"
    ):
        call(group[1])


def test_the_groups_own_timeout_is_the_default() -> None:
    comm = ThreadComm.group(2, timeout_s=0.05)[0]
    assert message_of(comm.barrier) == "rank 0 of 2 waited 0.05 s at barrier() for ranks [1]"


MISMATCHES: dict[str, tuple[Callable[[Comm], object], Callable[[Comm], object], str]] = {
    "operation": (
        lambda c: c.all_reduce(torch.ones(2)),
        lambda c: c.all_gather(torch.ones(4), torch.ones(2)),
        "rank 0 calls all_reduce sum of 2 float32, rank 1 calls all_gather of 2 float32",
    ),
    "size": (
        lambda c: c.all_reduce(torch.ones(2)),
        lambda c: c.all_reduce(torch.ones(3)),
        "rank 0 calls all_reduce sum of 2 float32, rank 1 calls all_reduce sum of 3 float32",
    ),
    "dtype": (
        lambda c: c.reduce_scatter(torch.ones(1), torch.ones(2)),
        lambda c: c.reduce_scatter(torch.ones(1).int(), torch.ones(2).int()),
        "rank 0 calls reduce_scatter sum of 2 float32, rank 1 calls reduce_scatter sum of 2 int32",
    ),
    "reduction": (
        lambda c: c.all_reduce(torch.ones(2), op="max"),
        lambda c: c.all_reduce(torch.ones(2)),
        "rank 0 calls all_reduce max of 2 float32, rank 1 calls all_reduce sum of 2 float32",
    ),
    "source": (
        lambda c: c.broadcast(torch.ones(2), src=0),
        lambda c: c.broadcast(torch.ones(2), src=1),
        "rank 0 calls broadcast from 0 of 2 float32, rank 1 calls broadcast from 1 of 2 float32",
    ),
    "average": (
        lambda c: c.all_reduce(torch.ones(2), op="mean"),
        lambda c: c.all_reduce(torch.ones(2)),
        "rank 0 calls all_reduce sum of 2 float32 (mean), rank 1 calls all_reduce sum of 2 float32",
    ),
    "name": (
        lambda c: c.reduce_scatter(torch.ones(1), torch.ones(2), name="layers.7.mlp"),
        lambda c: c.all_gather(torch.ones(2), torch.ones(1), name="layers.8"),
        "rank 0 calls reduce_scatter sum of 2 float32 for layers.7.mlp, "
        "rank 1 calls all_gather of 1 float32 for layers.8",
    ),
    "names_alone": (
        lambda c: c.broadcast(torch.ones(1), src=0, name="a"),
        lambda c: HostStaged(c, "cpu").broadcast(torch.ones(1), src=0, name="b"),
        "rank 0 calls broadcast from 0 of 1 float32 for a, "
        "rank 1 calls broadcast from 0 of 1 float32 for b",
    ),
    "barrier": (
        lambda c: c.barrier(),
        lambda c: c.all_gather_object(1),
        "rank 0 calls barrier(), rank 1 calls all_gather_object()",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_calls_that_do_not_match_raise_on_every_rank_and_name_both(name: str) -> None:
    first, second, calls = MISMATCHES[name]

    def run(comm: Comm) -> list[str]:
        call = (first, second)[comm.rank]
        return [message_of(lambda: call(comm)), message_of(comm.barrier)]

    expected = f"ranks call different collectives: {calls}"
    assert run_threads(run, 2) == [[expected] * 2] * 2


def test_giving_up_wakes_the_others() -> None:
    def run(comm: ThreadComm) -> str:
        if comm.rank == 1:
            comm.abort("out of memory")
            comm.abort("and again")
        return message_of(lambda: comm.all_reduce(torch.ones(1)))

    assert run_threads(run, 3) == ["rank 1 of 3 gave up: out of memory"] * 3


def test_giving_up_wakes_those_who_wait_in_a_part() -> None:
    """Rank 2 waits with rank 0 only, and rank 1 is not of that part."""

    def run(comm: ThreadComm) -> str:
        part = comm.split(comm.rank % 2)
        if comm.rank == 1:
            comm.abort("done for")
        return message_of(part.barrier if comm.rank == 2 else comm.barrier)

    assert run_threads(run, 3, timeout_s=30.0) == ["rank 1 of 3 gave up: done for"] * 3


def test_one_rank_in_two_threads_is_noticed() -> None:
    """Else the second call would take the first one's place and both would wait for ever."""
    group = ThreadComm.group(2)
    heard: list[str] = []
    waiter = threading.Thread(target=lambda: heard.append(message_of(group[0].barrier)))
    waiter.start()
    meeting = group[0]._meeting
    with meeting._changed:
        assert meeting._changed.wait_for(lambda: 0 in meeting._arrived, 10)
    text = message_of(lambda: group[0].all_reduce(torch.ones(1)))
    waiter.join()
    expected = "rank 0 of 2 calls all_reduce sum of 1 float32 while it is still in barrier()"
    assert [text, *heard] == [expected] * 2


def test_many_collectives_in_a_row_do_not_mix() -> None:
    def run(comm: Comm) -> list[float]:
        results = []
        for step in range(200):
            tensor = torch.tensor([float(step * (comm.rank + 1))])
            comm.all_reduce(tensor, op="max" if step % 3 == 0 else "sum")
            results.append(tensor.item())
        return results

    expected = [float(3 * step if step % 3 == 0 else 6 * step) for step in range(200)]
    assert run_threads(run, 3) == [expected] * 3


def test_nobody_sees_a_tensor_half_written() -> None:
    """Each rank overwrites its input as soon as its own call returns; others have read it."""

    def run(comm: Comm) -> bool:
        good = True
        for step in range(100):
            own = torch.full((1000,), float(step))
            out = torch.empty(1000 * comm.size)
            comm.all_gather(out, own)
            own.fill_(-1)
            good = good and bool((out == step).all())
        return good

    assert run_threads(run, 3) == [True] * 3
