"""GroupComm over NCCL, one rank for each device: values, launches, memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from shard_comm import Comm, GroupComm
from shard_testing import run_ranks


def nccl_comms(comm: Comm) -> tuple[GroupComm, GroupComm]:
    """Return a comm for this rank's device, and one whose reductions have a group of their own."""
    torch.cuda.set_device(comm.rank)
    ranks = list(range(comm.size))
    groups = [dist.new_group(ranks, backend="nccl") for _ in range(2)]
    plain, other = (GroupComm(group, device="cuda") for group in groups)
    return plain, GroupComm(groups[0], device="cuda", reducing=other)


def check_values(comm: GroupComm) -> None:
    out = comm.empty(2 * comm.size, torch.float32)
    comm.all_gather(out, torch.full((2,), float(comm.rank), device=comm.device))
    assert out.tolist() == [float(rank) for rank in range(comm.size) for _ in range(2)]
    inp = comm.empty(3 * comm.size, torch.bfloat16).fill_(comm.rank + 1)
    shard = torch.empty(3, device=comm.device)
    comm.reduce_scatter(shard, inp, op="mean", sum_dtype=torch.float32)
    assert shard.tolist() == [(comm.size + 1) / 2] * 3
    total = torch.full((4,), comm.rank + 1.0, device=comm.device)
    comm.all_reduce(total)
    assert total.tolist() == [comm.size * (comm.size + 1) / 2] * 4
    comm.all_reduce(total.fill_(comm.rank), op="max")
    assert total.tolist() == [comm.size - 1.0] * 4
    exchanged = torch.empty(comm.size, device=comm.device)
    comm.all_to_all(exchanged, torch.full((comm.size,), float(comm.rank), device=comm.device))
    assert exchanged.tolist() == [float(rank) for rank in range(comm.size)]
    comm.broadcast(total.fill_(comm.rank), src=comm.size - 1)
    assert total.tolist() == [comm.size - 1.0] * 4
    assert comm.all_gather_object({"rank": comm.rank})[-1] == {"rank": comm.size - 1}
    comm.barrier()


def check_coalesced(comm: GroupComm) -> None:
    """Gathers of three dtypes and a reduction are called in one block; streams see the results."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64)
    numels = (1 << 20, 1000, 7)
    outs = [comm.empty(n * comm.size, d) for n, d in zip(numels, dtypes, strict=True)]
    inps = [
        torch.full((n,), comm.rank + 1, dtype=d, device=comm.device)
        for n, d in zip(numels, dtypes, strict=True)
    ]
    shard = torch.empty(5, device=comm.device)
    with comm.coalesced():
        works = [
            comm.all_gather(out, inp, async_op=True) for out, inp in zip(outs, inps, strict=True)
        ]
        ones = torch.ones(5 * comm.size, device=comm.device)
        works.append(comm.reduce_scatter(shard, ones, async_op=True))
    for work in works:
        work.wait()
    for out, numel in zip(outs, numels, strict=True):
        rows = out.view(comm.size, numel)
        assert [row.unique().tolist() for row in rows] == [[r + 1] for r in range(comm.size)]
    assert shard.tolist() == [float(comm.size)] * 5


def check_registered(comm: GroupComm, records: list[str]) -> None:
    """After the first collective memory comes from the pool, or the log has said why not."""
    memory: Any = comm._memory
    comm.empty(1, torch.float32)
    if memory._pool is None:
        assert len([text for text in records if "is not registered with NCCL: " in text]) == 1
        return
    before = len(memory._pool.snapshot())
    held = comm.empty(64 << 20, torch.uint8)
    assert len(memory._pool.snapshot()) > before
    comm.all_reduce(held.fill_(1), op="max")
    assert held.unique().tolist() == [1]


def check_all(comm: Comm) -> list[str]:
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shard_comm")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    plain, separate = nccl_comms(comm)
    for each in (plain, separate):
        check_values(each)
        check_coalesced(each)
        records.clear()
    fresh = GroupComm(plain.group, device="cuda")
    check_registered(fresh, records)
    for each in (fresh, separate, plain):
        torch.cuda.synchronize()
        each.close()
    return records


def test_one_rank_for_each_device() -> None:
    said = run_ranks(check_all, torch.cuda.device_count())
    assert all(each == said[0] for each in said)
