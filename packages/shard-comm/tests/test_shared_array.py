"""One array that all ranks fill, between threads and between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shard_comm import (
    Checked,
    Comm,
    HostStaged,
    OpRecord,
    PlanComm,
    Quantized,
    Recorded,
    SharedArray,
    SharedMemoryComm,
    SoloComm,
    ThreadComm,
)
from shard_comm._shared_array import MarkedArray
from shard_testing import run_ranks, run_threads


def shared(comm: Comm, numel: int, dtype: torch.dtype = torch.float32) -> SharedArray:
    array = comm.shared(numel, dtype, name="layer.0")
    assert array is not None
    return array


def check_a_gather_is_no_copy(comm: Comm) -> None:
    """Every rank reads what the others wrote, where they wrote it."""
    array = shared(comm, 3 * comm.size, torch.bfloat16)
    assert (array.data.shape, array.own.shape) == ((3 * comm.size,), (3,))
    assert array.own.data_ptr() == array.data.data_ptr() + 6 * comm.rank
    array.claim()
    array.own.fill_(comm.rank + 1)
    array.publish().wait()
    assert array.data.tolist() == [rank + 1 for rank in range(comm.size) for _ in range(3)]
    array.release()


def check_nobody_sees_a_torn_array(comm: Comm) -> None:
    """Two hundred generations: whoever reads finds one of them in all slices, start to end."""
    array = shared(comm, 1000 * comm.size, torch.int64)
    for generation in range(200):
        array.claim()
        array.own.fill_(generation)
        array.publish().wait()
        for _ in range(comm.rank + 1):  # some read for longer
            assert array.data.eq(generation).all()
        array.release()


def check_a_reader_holds_the_writers_up(comm: Comm) -> None:
    """Rank 1 does not release: no claim returns, and what it reads stays as it was."""
    part = comm.split(0)
    array = shared(part, part.size)
    array.own.fill_(1)
    array.publish().wait()
    if comm.rank != 1:
        array.release()
        message = r"claim of the shared array layer\.0 \[\d\].* for ranks \[1\]"
        with pytest.raises(RuntimeError, match=message):
            array.claim(timeout_s=0.2)
    comm.barrier()
    if comm.rank == 1:
        assert array.data.tolist() == [1.0] * comm.size
    comm.barrier()


def check_a_release_lets_the_writers_go_on(comm: Comm) -> None:
    """All but rank 0 read on after rank 0 wants to write; it gets there when they release."""
    array = shared(comm, comm.size)
    array.own.fill_(1)
    array.publish().wait()
    if comm.rank == 0:
        array.release()
        array.claim()
        array.own.fill_(2)
        array.publish()
    else:
        for _ in range(100):
            assert array.data.tolist() == [1.0] * comm.size
        array.release()
        array.publish().wait()
        assert array.data.tolist() == [2.0] + [1.0] * (comm.size - 1)
    comm.barrier()


def check_an_unchanged_slice_needs_no_claim(comm: Comm) -> None:
    array = shared(comm, comm.size).data
    again = shared(comm, comm.size)
    assert again.data.data_ptr() != array.data_ptr()
    again.own.fill_(comm.rank)
    for _ in range(5):
        again.publish().wait()
        assert again.data.tolist() == list(range(comm.size))
    again.release()
    again.claim()


def check_who_asks_knows_whether_all_have_released(comm: Comm) -> None:
    array = shared(Recorded(Checked(comm)), comm.size)
    assert array.is_unread()
    array.publish().wait()
    for last in range(comm.size):  # one after the other, this rank itself among them
        assert not array.is_unread()
        comm.barrier()
        if comm.rank == last:
            array.release()
        comm.barrier()
    assert array.is_unread()
    comm.barrier()


def check_a_late_rank_is_named(comm: Comm) -> None:
    part = comm.split(0)
    array = shared(part, part.size)
    if comm.rank != 0:
        work = array.publish(timeout_s=0.2)
        with pytest.raises(RuntimeError, match=r"publish of the shared array layer\.0 .*ranks \[0"):
            work.wait()
    comm.barrier()
    with pytest.raises(RuntimeError, match=r"publish of the shared array layer\.0 \[\d\]"):
        part.barrier()
    if isinstance(comm, SharedMemoryComm):
        assert not array.is_unread()  # nobody knows what the others still do


def check_arguments(comm: Comm) -> None:
    message = rf"shared x: expected a positive multiple of {comm.size} elements, got {{}} "
    for numel in (0, comm.size + 1):
        with pytest.raises(ValueError, match=message.format(numel)):
            comm.shared(numel, torch.float32, name="x")
    part = comm.split(0)
    with pytest.raises(RuntimeError, match=r"float32.*float64|float64.*float32"):
        part.shared(part.size, torch.float32 if comm.rank else torch.float64)
    array = shared(comm, comm.size)
    with pytest.raises(ValueError, match=r"claim of the shared array .*: expected timeout_s > 0"):
        array.claim(timeout_s=0)


def check_versions(comm: Comm) -> None:
    """A rank's write does not look to autograd like a change of what another rank saved."""
    array = shared(comm, 2 * comm.size)
    before = array.data._version
    comm.barrier()
    if comm.rank == 0:
        array.own.fill_(1)
    comm.barrier()
    assert array.data._version == before + (comm.rank == 0)


def check_counts(comm: Comm) -> None:
    recorded = Recorded(Checked(comm))
    array = recorded.shared(4 * comm.size, torch.float32, name="w")
    assert array is not None
    assert array.name == "w"
    array.claim()
    array.own.fill_(comm.rank)
    for _ in range(3):
        array.publish().wait()
    array.release()
    array.claim()
    record = recorded.records["all_gather"]
    assert (record.calls, record.payload_bytes) == (3, 3 * 16 * comm.size)
    assert record.wait_s > 0
    assert array.data[::4].tolist() == list(range(comm.size))


def check_all(comm: Comm) -> None:
    check_a_gather_is_no_copy(comm)
    check_nobody_sees_a_torn_array(comm)
    check_a_reader_holds_the_writers_up(comm)
    check_a_release_lets_the_writers_go_on(comm)
    check_an_unchanged_slice_needs_no_claim(comm)
    check_who_asks_knows_whether_all_have_released(comm)
    check_a_late_rank_is_named(comm)
    check_arguments(comm)
    check_versions(comm)
    check_counts(comm)
    comm.barrier()


@pytest.mark.parametrize("size", [2, 3])
def test_threads(size: int) -> None:
    run_threads(check_all, size, shares_memory=True)


def test_processes() -> None:
    run_ranks(check_all, 3)


class Marks(list[int]):
    """Counts that write down when they change, and when they are looked at as a whole."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__([0, 0])
        self._log = log
        self._name = name

    def __setitem__(self, at: Any, count: Any) -> None:
        self._log.append(f"{self._name} {count}")
        super().__setitem__(at, count)

    def __iter__(self) -> Iterator[int]:
        self._log.append(f"look at {self._name}")
        return super().__iter__()


def test_memory_is_in_order_on_both_sides_of_a_mark() -> None:
    """What is written before a publish, or read before a release, is done when others see it."""
    log: list[str] = []

    def wait(behind: Callable[[], list[int]], what: str, timeout_s: float | None) -> None:
        assert behind() == [1], what

    array = MarkedArray(
        torch.zeros(4),
        0,
        published=Marks(log, "published"),
        released=Marks(log, "released"),
        wait=wait,
        changed=lambda: log.append("order"),
        name="",
    )
    array.publish().wait()
    assert log == ["order", "published 1", "order", "look at published"]
    log.clear()
    array.release()
    assert log == ["order", "released 1", "order"]
    log.clear()
    assert not array.is_unread()
    array.claim()
    assert log == ["look at released"] * 2
    array._released[1] = 1
    log.clear()
    assert array.is_unread()
    assert log == ["look at released", "order"]


def test_other_transports_have_none() -> None:
    comm = Recorded(SoloComm())
    assert comm.shared(4, torch.float32) is None
    assert comm.records["all_gather"] == OpRecord()
    sharing = ThreadComm.group(1, shares_memory=True)[0]
    for other in (Quantized(sharing), HostStaged(sharing, "cpu"), PlanComm(2), Checked(comm)):
        assert other.shared(4, torch.float32) is None
    one = ThreadComm.group(1, shares_memory=True)[0].shared(4, torch.float32)
    assert one is not None
    one.claim()
    one.publish().wait()
