"""Collectives started together, and reductions over a group of their own.

Gloo does not start several in one launch: what NCCL would be told is written down here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shard_comm import Checked, Comm, GroupComm, HostStaged, PlanComm, Recorded, comm_for
from shard_comm import _group as group_module
from shard_comm._launches import Launched, Launches
from shard_testing import run_ranks


class FakeGroup:
    """Writes down where a launch begins and ends."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.log.append(f"start on {device}")

    def _end_coalescing(self, device: torch.device) -> str:
        self.log.append("end")
        return "work of all"

    def call(self, name: str) -> Launched:
        def start() -> str:
            self.log.append(name)
            if name == "bad":
                raise RuntimeError("no such thing")
            return f"work of {name}"

        return Launched(start)


def launch(*names: str) -> tuple[list[str], list[Any]]:
    group = FakeGroup()
    launches = Launches(group, torch.device("cpu"))  # type: ignore[arg-type]
    called = [group.call(name) for name in names]
    for launched in called:
        launches.add(launched)
    assert group.log == []
    try:
        launches.start()
    except RuntimeError as error:
        group.log.append(str(error))
    launches.start()
    return group.log, [launched.work for launched in called]


def test_several_are_one_launch_with_one_work() -> None:
    assert launch("a", "b") == (["start on cpu", "a", "b", "end"], ["work of all"] * 2)
    assert launch("a") == (["a"], ["work of a"])
    assert launch() == ([], [])


def test_a_launch_ends_when_a_start_fails() -> None:
    log, _ = launch("a", "bad", "b")
    assert log == ["start on cpu", "a", "bad", "end", "no such thing"]


@contextmanager
def able() -> Iterator[list[str]]:
    """Let every group take launches of several; yield what it is told."""
    log: list[str] = []
    works: list[Any] = []
    gather = group_module._all_gather

    def noted(*args: Any, **kwargs: Any) -> Any:
        log.append("gather")
        works.append(gather(*args, **kwargs))
        return works[-1]

    class All:
        def wait(self, *_: object) -> None:
            for work in works:
                work.wait()

        def is_completed(self) -> bool:
            return False

    def end(*_: object) -> Any:
        log.append("end")
        return All()

    def begin(*_: object) -> None:
        log.append("start")

    backend = SimpleNamespace(supports_coalescing=True)
    group = dist.ProcessGroup
    with (
        mock.patch.object(group, "_get_backend", return_value=backend),
        mock.patch.object(group, "_start_coalescing", begin),
        mock.patch.object(group, "_end_coalescing", end),
        mock.patch.object(group_module, "_all_gather", noted),
    ):
        yield log


def check_coalesced(comm: GroupComm) -> None:
    outs = [torch.empty(2 * comm.size) for _ in range(3)]
    mine = [torch.full((2,), 10.0 * index + comm.rank) for index in range(3)]
    with able() as log:
        with Recorded(comm).coalesced():
            works = [
                comm.all_gather(out, inp, async_op=True)
                for out, inp in zip(outs, mine, strict=True)
            ]
            assert log == []
            with pytest.raises(RuntimeError, match=r"all_gather of 2 float32: waited for inside"):
                works[0].wait()
        assert log == ["start", "gather", "gather", "gather", "end"]
        for work in works[1:]:
            work.wait()
        assert [out.tolist() for out in outs] == [
            [10.0 * index + rank for rank in range(comm.size) for _ in range(2)]
            for index in range(3)
        ]
        log.clear()
        with Checked(comm).coalesced():
            Checked(comm).all_gather(outs[0], mine[0])
        assert log == ["gather", "gather"]  # the comparison, and what was compared


def check_an_error_in_the_block(comm: GroupComm) -> None:
    """What was called before it counts: the other ranks wait for it."""
    out, works = torch.empty(comm.size), []

    def err() -> None:
        with comm.coalesced():
            mine = torch.full((1,), float(comm.rank))
            works.append(comm.all_gather(out, mine, async_op=True))
            raise KeyError("mistake")

    with able() as log:
        with pytest.raises(KeyError, match="mistake"):
            err()
        assert log == ["gather"]
    works[0].wait()
    assert out.tolist() == [float(rank) for rank in range(comm.size)]
    comm.barrier()


def check_where_it_changes_nothing(comm: GroupComm) -> None:
    out = torch.empty(comm.size)
    with comm.coalesced():
        comm.all_gather(out, torch.full((1,), float(comm.rank)))
    assert out.tolist() == [float(rank) for rank in range(comm.size)]


def check_separate_reductions(comm: GroupComm) -> None:
    ours = comm_for(comm.group, shared_memory=False, separate_reductions=True)
    assert ours is comm_for(comm.group, shared_memory=False, separate_reductions=True)
    assert ours is not comm
    assert isinstance(ours, GroupComm)
    other = ours._reducing
    assert other is not None
    begun = ours._roll._begun, other._roll._begun
    total, slice_ = torch.full((4,), comm.rank + 1.0).bfloat16(), torch.empty(2)
    ours.all_reduce(total)
    ours.all_reduce(total, sum_dtype=torch.float32)
    ours.reduce_scatter(slice_, torch.ones(2 * comm.size), op="max")
    ours.reduce_scatter(slice_, torch.ones(2 * comm.size).bfloat16(), sum_dtype=torch.float32)
    assert total.tolist() == [6.0] * 4
    assert slice_.tolist() == [2.0] * 2
    out = torch.empty(comm.size)
    ours.all_gather(out, torch.full((1,), float(comm.rank)))
    ours.barrier()
    assert out.tolist() == [0.0, 1.0]
    assert (ours._roll._begun, other._roll._begun) == (begun[0] + 2, begun[1] + 4)
    part = ours.split(0)
    assert isinstance(part, GroupComm)
    assert part._reducing is not None
    assert part._reducing.group is not other.group
    ours.close()
    part.close()
    for each in (other, part._reducing):
        assert each.group not in dist.distributed_c10d._world.pg_map
    with pytest.raises(ValueError, match=r"expected a comm to reduce on that is like GroupComm"):
        GroupComm(comm.group, reducing=PlanComm(3))  # type: ignore[arg-type]


def check_all(comm: Comm) -> None:
    plain = comm_for(shared_memory=False)
    assert isinstance(plain, GroupComm)
    for check in (
        check_coalesced,
        check_an_error_in_the_block,
        check_where_it_changes_nothing,
        check_separate_reductions,
    ):
        check(plain)
    assert comm_for(separate_reductions=True).empty(1, torch.float32).numel() == 1
    for wrapper in (Checked(comm), Recorded(plain)):
        assert wrapper.process_group is dist.group.WORLD
    assert HostStaged(plain, "meta").process_group is None  # Gloo serves no meta tensors


def test_two_processes() -> None:
    run_ranks(check_all, 2)
