from __future__ import annotations

import pytest
import torch

from shard_comm import Comm, PlanComm, Recorded, Slices
from shard_testing import run_threads

Counts = dict[str, tuple[int, int]]


def counts(comm: PlanComm | Recorded) -> Counts:
    return {op: (r.calls, r.payload_bytes) for op, r in comm.records.items()}


def step(comm: Comm) -> None:
    """What a rank of a sharded model calls, with memory where the comm wants it."""
    full, shard = comm.empty(12, torch.bfloat16), comm.empty(12 // comm.size, torch.bfloat16)
    comm.all_gather(full, shard, name="layers.0")
    comm.all_gather(full, shard.clone(), async_op=True).wait()
    comm.reduce_scatter(comm.empty(12 // comm.size, torch.float32), full, sum_dtype=torch.float32)
    comm.reduce_scatter(shard, full, op="mean")
    comm.all_reduce(comm.empty(7, torch.float64), op="premul_mean")
    comm.all_reduce(comm.empty(2, torch.bfloat16), op="mean", sum_dtype=torch.float32)
    comm.broadcast(comm.empty(4, torch.int64), src=comm.size - 1)
    comm.all_to_all(comm.empty(12, torch.int8), comm.empty(12, torch.int8))
    lengths = tuple(comm.rank * other for other in range(comm.size))
    numel, slices = sum(lengths), Slices(lengths, lengths, 4)
    inp, out = (comm.empty(numel, torch.float32) for _ in range(2))
    comm.all_to_all(out, inp, slices=slices)
    comm.barrier()
    comm.all_gather_object({"rank": comm.rank})


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_it_counts_what_a_group_of_that_size_counts(device: str) -> None:
    def run(comm: Comm) -> Counts:
        recorded = Recorded(comm)
        step(recorded)
        return counts(recorded)

    plan = PlanComm(3, 1, device)
    step(plan)
    assert counts(plan) == run_threads(run, 3)[1]
    assert plan.records["all_gather"].payload_bytes == 2 * 12 * 2
    plan.reset()
    assert counts(plan) == {}


def test_a_rank_of_many_thousands() -> None:
    plan = PlanComm(16_384, 16_383)
    assert (plan.rank, plan.size, plan.device) == (16_383, 16_384, torch.device("meta"))
    full = plan.empty(405_000 * plan.size, torch.bfloat16)
    plan.all_gather(full, plan.empty(405_000, torch.bfloat16))
    assert counts(plan) == {"all_gather": (1, 405_000 * 16_384 * 2)}
    assert len(plan.all_gather_object(0)) == 16_384


def test_what_results_hold() -> None:
    """Own slices; what would come from others stays as it was."""
    plan = PlanComm(3, 1, "cpu")
    out = torch.full((6,), -1.0)
    plan.all_gather(out, torch.tensor([1.0, 2.0]))
    assert out.tolist() == [-1.0, -1.0, 1.0, 2.0, -1.0, -1.0]
    version = out._version
    plan.all_gather(out, out[2:4])
    assert out._version == version
    inp = torch.arange(6.0)
    plan.all_to_all(out.fill_(-1), inp)
    assert out.tolist() == [-1.0, -1.0, 2.0, 3.0, -1.0, -1.0]
    out = torch.full((4,), -1.0)
    plan.all_to_all(out, inp[:3], slices=Slices((0, 2, 1), (1, 2, 1), 2))
    assert out.tolist() == [-1.0, 0.0, 1.0, -1.0]
    shard = torch.empty(2)
    plan.reduce_scatter(shard, inp.clone())
    assert shard.tolist() == [2.0, 3.0]
    for op in ("mean", "premul_mean"):
        plan.reduce_scatter(shard, inp.mul(3), op=op)
        assert shard.tolist() == [2.0, 3.0]
        plan.reduce_scatter(shard, inp.mul(3).half(), op=op, sum_dtype=torch.float32)
        assert shard.tolist() == [2.0, 3.0]
        total = torch.tensor([6.0])
        plan.all_reduce(total, op=op, sum_dtype=torch.float64)
        assert total.item() == 2.0
    plan.all_reduce(inp, op="max")
    plan.broadcast(inp, src=2)
    assert inp.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    mine = {"rank": 1}
    everyone = plan.all_gather_object(mine)
    assert everyone == [{"rank": 1}] * 3
    assert len({id(one) for one in [mine, *everyone]}) == 4


def test_parts() -> None:
    whole = PlanComm(6, 5).split(1)
    assert (type(whole), whole.rank, whole.size) == (PlanComm, 5, 6)
    plan = PlanComm(6, 5, "cpu", part_size=2)
    part = plan.split(5 // 2)
    assert isinstance(part, PlanComm)
    assert (part.rank, part.size, part.device) == (1, 2, torch.device("cpu"))
    part.all_reduce(torch.ones(2))
    assert (counts(plan), counts(part)) == ({}, {"all_reduce": (1, 8)})
    for bad in (4, 0, 7):
        with pytest.raises(ValueError, match=f"expected a part_size that divides 6, got {bad}"):
            PlanComm(6, part_size=bad)


def test_it_checks_as_any_comm_does() -> None:
    plan = PlanComm(3)
    with pytest.raises(ValueError, match=r"expected 6 elements .*, got 5"):
        plan.all_gather(plan.empty(5, torch.int8), plan.empty(2, torch.int8))
    with pytest.raises(ValueError, match="expected a tensor on meta, got one on cpu"):
        plan.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="expected timeout_s > 0, got 0"):
        plan.barrier(timeout_s=0)
    assert counts(plan) == {}
