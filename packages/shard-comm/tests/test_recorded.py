from __future__ import annotations

import pytest
import torch

from shard_comm import Comm, OpRecord, Recorded, SoloComm, ThreadComm
from shard_testing import run_threads

Counts = dict[str, tuple[int, int]]


def counts(comm: Recorded) -> Counts:
    return {op: (r.calls, r.payload_bytes) for op, r in comm.records.items()}


def test_every_operation_counts_its_larger_side() -> None:
    def run(comm: Comm) -> Counts:
        recorded = Recorded(comm)
        recorded.all_gather(torch.empty(6), torch.ones(3))  # 24 bytes out
        recorded.all_gather(torch.empty(6).bfloat16(), torch.ones(3).bfloat16())  # 12 bytes out
        recorded.reduce_scatter(torch.empty(5), torch.ones(10))  # 40 bytes in
        recorded.all_reduce(torch.ones(7).double(), op="max")  # 56 bytes
        recorded.broadcast(torch.ones(2, 2), src=1)  # 16 bytes
        recorded.all_to_all(torch.empty(4), torch.ones(4))  # 16 bytes
        recorded.barrier()
        recorded.all_gather_object("anything")
        recorded.all_gather_object("else")
        return counts(recorded)

    expected = {
        "all_gather": (2, 36),
        "reduce_scatter": (1, 40),
        "all_reduce": (1, 56),
        "broadcast": (1, 16),
        "all_to_all": (1, 16),
        "barrier": (1, 0),
        "all_gather_object": (2, 0),
    }
    assert run_threads(run, 2) == [expected] * 2


def test_calls_count_when_they_begin_and_seconds_when_they_end() -> None:
    recorded = Recorded(SoloComm())
    work = recorded.all_reduce(torch.ones(4), async_op=True)
    record = recorded.records["all_reduce"]
    assert (record.calls, record.payload_bytes, record.wait_s) == (1, 16, 0.0)
    work.wait()
    waited_s = record.wait_s
    assert waited_s > 0
    work.wait()
    assert record.wait_s == waited_s
    recorded.barrier()
    assert recorded.records["barrier"].wait_s > 0


def test_refused_calls_do_not_count() -> None:
    recorded = Recorded(SoloComm())
    with pytest.raises(ValueError, match="all_gather: expected 2 elements"):
        recorded.all_gather(torch.ones(3), torch.ones(2))
    assert counts(recorded) == {}
    assert recorded.records["all_gather"] == OpRecord(0, 0, 0.0)


def test_reset_and_nesting() -> None:
    inner = Recorded(SoloComm())
    outer = Recorded(inner)
    outer.all_reduce(torch.ones(1))
    outer.reset()
    outer.all_reduce(torch.ones(2))
    assert counts(outer) == {"all_reduce": (1, 8)}
    assert counts(inner) == {"all_reduce": (2, 12)}


def test_it_is_the_inner_comm_to_look_at() -> None:
    inner = ThreadComm.group(3, timeout_s=4.0)[2]
    recorded = Recorded(inner)
    assert (recorded.rank, recorded.size, recorded.timeout_s) == (2, 3, 4.0)
    assert (recorded.device, recorded.inner) == (inner.device, inner)
    assert recorded.empty(3, torch.int64).shape == (3,)


def test_a_part_is_counted_on_its_own() -> None:
    def run(comm: Comm) -> tuple[Counts, Counts]:
        recorded = Recorded(comm)
        part = recorded.split(comm.rank % 2)
        assert isinstance(part, Recorded)
        part.all_reduce(torch.ones(1))
        return counts(recorded), counts(part)

    assert run_threads(run, 3) == [({}, {"all_reduce": (1, 4)})] * 3
