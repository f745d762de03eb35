"""Every collective on every transport, with the same values asked of each."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shard_comm import (
    Checked,
    Comm,
    GroupComm,
    HostStaged,
    Quantized,
    Recorded,
    SharedMemoryComm,
    Slices,
    SoloComm,
    comm_for,
)
from shard_testing import logged, run_ranks, run_threads

MOVED_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
SUMMED_DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]
ODD = [1.0, 3.0, 5.0, 7.0, 9.0]
SQUARES = [1.0, 4.0, 9.0, 16.0, 25.0]
"""Sums of the first odd numbers."""
TENS = [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]


def check_gather(comm: Comm) -> None:
    expected = TENS[: 2 * comm.size]
    for dtype in MOVED_DTYPES:
        mine = torch.tensor([10 * comm.rank, 10 * comm.rank + 1]).to(dtype)
        out = torch.zeros(2 * comm.size).to(dtype)
        comm.all_gather(out, mine)
        assert torch.equal(
            out.to(torch.complex64), torch.tensor(expected).to(dtype).to(torch.complex64)
        ), dtype
    rows = torch.zeros(comm.size, 2)
    comm.all_gather(rows, torch.tensor([[10.0 * comm.rank, 10.0 * comm.rank + 1]]))
    assert rows.flatten().tolist() == expected


def check_gather_in_place(comm: Comm) -> None:
    out = comm.empty(2 * comm.size, torch.float32).fill_(-1)
    own = out[2 * comm.rank : 2 * comm.rank + 2]
    own.copy_(torch.tensor([10.0 * comm.rank, 10.0 * comm.rank + 1]))
    comm.all_gather(out, own)
    assert out.tolist() == TENS[: 2 * comm.size]


def check_broadcast(comm: Comm) -> None:
    for dtype in MOVED_DTYPES:
        for src in range(comm.size):
            tensor = torch.full((2, 3), comm.rank).to(dtype)
            comm.broadcast(tensor, src=src)
            assert (
                tensor.to(torch.complex64).flatten().tolist()
                == [torch.tensor(src).to(dtype).to(torch.complex64).item()] * 6
            )


def check_all_to_all(comm: Comm) -> None:
    """Rank r sends 10 r + s to rank s."""
    expected = [10 * sender + comm.rank for sender in range(comm.size)]
    for dtype in MOVED_DTYPES:
        inp = torch.tensor([10 * comm.rank + s for s in range(comm.size)]).to(dtype)
        out = torch.zeros_like(inp)
        comm.all_to_all(out, inp)
        assert torch.equal(
            out.to(torch.complex64), torch.tensor(expected).to(dtype).to(torch.complex64)
        ), dtype


def slices_of(comm: Comm) -> Slices:
    """Rank r sends ``r * s`` elements to rank s: rank 0 sends and receives none."""
    lengths = tuple(comm.rank * other for other in range(comm.size))
    return Slices(lengths, lengths, (comm.size - 1) ** 2)


def check_ragged(comm: Comm) -> None:
    """All of what rank r sends to rank s is 10 r + s."""
    slices = slices_of(comm)
    for dtype in MOVED_DTYPES:
        sent = [10 * comm.rank + s for s, n in enumerate(slices.sent) for _ in range(n)]
        inp = torch.tensor(sent).to(dtype)
        out = torch.zeros(sum(slices.received), dtype=dtype)
        comm.all_to_all(out, inp, slices=slices, async_op=True).wait()
        received = [10 * s + comm.rank for s, n in enumerate(slices.received) for _ in range(n)]
        expected = torch.tensor(received).to(dtype)
        assert torch.equal(out.to(torch.complex64), expected.to(torch.complex64)), dtype


def check_reduce(comm: Comm) -> None:
    mine, total = ODD[comm.rank], SQUARES[comm.size - 1]
    for dtype in SUMMED_DTYPES:
        tensor = torch.tensor([[mine], [-mine]]).to(dtype)
        comm.all_reduce(tensor)
        assert tensor.flatten().tolist() == [total, -total]
        comm.all_reduce(tensor.fill_(mine), op="max")
        assert tensor.flatten().tolist() == [ODD[comm.size - 1]] * 2
        comm.all_reduce(tensor.fill_(mine), op="min")
        assert tensor.flatten().tolist() == [1.0] * 2
        inp = torch.tensor([mine * (s + 1) for s in range(comm.size) for _ in range(3)]).to(dtype)
        out = torch.empty(3, dtype=dtype)
        comm.reduce_scatter(out, inp)
        assert out.tolist() == [total * (comm.rank + 1)] * 3
        inp = torch.tensor([mine * (s + 1) for s in range(comm.size)]).to(dtype)
        comm.reduce_scatter(out[:1], inp, op="max")
        assert out[0].item() == ODD[comm.size - 1] * (comm.rank + 1)
    anyone = torch.tensor([comm.rank == 0, False])
    comm.all_reduce(anyone, op="max")
    assert anyone.tolist() == [True, False]


def check_mean_is_no_sum(comm: Comm) -> None:
    """Local gradients 1, 3, 5, ... of four elements: means 1, 2, 3, ..."""
    for dtype in (torch.float32, torch.bfloat16):
        local = torch.full((4 * comm.size,), ODD[comm.rank], dtype=dtype)
        shard, total = torch.empty(4, dtype=dtype), local[:3].clone()
        comm.reduce_scatter(shard, local.clone(), op="mean")
        assert shard.tolist() == [float(comm.size)] * 4
        comm.all_reduce(total, op="mean")
        assert total.tolist() == [float(comm.size)] * 3
        wide = torch.empty(4)
        comm.reduce_scatter(wide, local, op="mean", sum_dtype=torch.float32)
        assert wide.tolist() == [float(comm.size)] * 4


def check_scalar_and_parameter(comm: Comm) -> None:
    scalar = torch.tensor(ODD[comm.rank])
    comm.all_reduce(scalar)
    assert scalar.item() == SQUARES[comm.size - 1]
    param = torch.nn.Parameter(torch.full((2,), ODD[comm.rank]))
    comm.all_reduce(param, async_op=True).wait()
    assert param.tolist() == [SQUARES[comm.size - 1]] * 2
    assert param.is_leaf
    assert param.requires_grad


def check_not_a_number_wins(comm: Comm) -> None:
    for op in ("sum", "max", "min"):
        for rank in range(comm.size):
            tensor = torch.tensor([math.nan if comm.rank == rank else 1.0, 2.0])
            comm.all_reduce(tensor, op=op)
            assert math.isnan(tensor[0])
            assert not math.isnan(tensor[1])


def check_nothing_to_move(comm: Comm) -> None:
    nothing = torch.empty(0)
    comm.all_gather(nothing, torch.empty(0))
    comm.reduce_scatter(nothing, torch.empty(0))
    comm.all_reduce(nothing)
    comm.broadcast(nothing, src=0)
    comm.all_to_all(nothing, torch.empty(0))
    none = (0,) * comm.size
    comm.all_to_all(nothing, torch.empty(0), slices=Slices(none, none, 0))
    assert nothing.numel() == 0


def check_two_under_way(comm: Comm) -> None:
    """Begun in one order, waited for in the other, a third one in between."""
    gathered, scattered = torch.zeros(2 * comm.size), torch.empty(1)
    first = comm.all_gather(
        gathered, torch.tensor([10.0 * comm.rank, 10.0 * comm.rank + 1]), async_op=True
    )
    second = comm.reduce_scatter(scattered, torch.full((comm.size,), ODD[comm.rank]), async_op=True)
    reduced = torch.full((1000,), ODD[comm.rank])
    third = comm.all_reduce(reduced, async_op=True)
    second.wait()
    assert scattered.item() == SQUARES[comm.size - 1]
    comm.barrier()
    first.wait()
    assert gathered.tolist() == TENS[: 2 * comm.size]
    third.wait()
    third.wait()
    assert reduced.tolist() == [SQUARES[comm.size - 1]] * 1000


def check_objects(comm: Comm) -> None:
    mine = {
        "rank": comm.rank,
        "text": "x" * 1000 * comm.rank,
        "tensor": torch.full((2,), comm.rank),
    }
    everyone = comm.all_gather_object(mine)
    assert [(o["rank"], len(o["text"])) for o in everyone] == [
        (r, 1000 * r) for r in range(comm.size)
    ]
    assert [o["tensor"].tolist() for o in everyone] == [[r, r] for r in range(comm.size)]
    everyone[comm.rank]["rank"] = -1
    assert comm.size == 1 or mine["rank"] == comm.rank  # copies, as between processes
    assert comm.all_gather_object(None, timeout_s=30) == [None] * comm.size


def check_split(comm: Comm) -> None:
    """Even ranks and odd ranks; each part has an order and values of its own."""
    part = comm.split(comm.rank % 2)
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    assert part.all_gather_object(comm.rank) == members
    total = torch.tensor([ODD[comm.rank]])
    part.all_reduce(total)
    assert total.item() == sum(ODD[rank] for rank in members)
    comm.barrier()


def check_memory(comm: Comm) -> None:
    memory = comm.empty(5, torch.bfloat16)
    assert (memory.shape, memory.dtype, memory.device) == ((5,), torch.bfloat16, comm.device)
    assert memory.untyped_storage().nbytes() == 10
    assert memory.fill_(3).tolist() == [3.0] * 5
    assert comm.empty(0, torch.float32).numel() == 0


def gathered(comm: Comm, shard: torch.Tensor) -> torch.Tensor:
    out = torch.empty(comm.size * shard.numel(), dtype=shard.dtype)
    comm.all_gather(out, shard)
    return out


def random_sums(comm: Comm) -> list[bytes]:
    """Sums whose bits depend on the order of addition."""
    results = []
    generator = torch.Generator().manual_seed(comm.rank)
    for dtype in (torch.float32, torch.bfloat16):
        data = torch.randn(60 * comm.size, generator=generator).mul_(1000).to(dtype)
        scattered = torch.empty(60, dtype=dtype)
        wide = torch.empty(60, dtype=torch.float64)
        comm.reduce_scatter(wide, data.clone(), sum_dtype=torch.float64)
        results.append(bytes(gathered(comm, wide).view(torch.uint8).tolist()))
        comm.reduce_scatter(scattered, data.clone())
        comm.all_reduce(data)
        assert torch.equal(data.view(comm.size, -1)[comm.rank], scattered)
        results.append(bytes(data.view(torch.uint8).tolist()))
    return results


def check_all(comm: Comm) -> list[bytes]:
    check_gather(comm)
    check_gather_in_place(comm)
    check_broadcast(comm)
    check_all_to_all(comm)
    check_ragged(comm)
    check_reduce(comm)
    check_mean_is_no_sum(comm)
    check_scalar_and_parameter(comm)
    check_not_a_number_wins(comm)
    check_nothing_to_move(comm)
    check_two_under_way(comm)
    check_objects(comm)
    check_split(comm)
    check_memory(comm)
    comm.barrier(timeout_s=30)
    return random_sums(comm)


def check_recorded(comm: Comm) -> list[bytes]:
    return check_all(Recorded(Checked(comm)))


@pytest.mark.parametrize("wrap", [Quantized, lambda comm: HostStaged(comm, "cpu")])
def test_ragged_through_wrappers(wrap: Callable[[Comm], Comm]) -> None:
    run_threads(lambda comm: check_ragged(wrap(comm)), 3)


def test_one_rank() -> None:
    comm = SoloComm()
    assert (comm.rank, comm.size, comm.device) == (0, 1, torch.device("cpu"))
    check_all(comm)
    check_recorded(comm)


@pytest.mark.parametrize("size", range(1, 6))
def test_threads(size: int) -> None:
    plain, recorded = run_threads(check_all, size), run_threads(check_recorded, size)
    assert all(bits == plain[0] for bits in plain + recorded)


def check_processes(comm: Comm) -> list[bytes]:
    """All that needs processes, in one go: starting them costs more than all collectives."""
    plain = comm_for(shared_memory=False)
    bits = check_all(plain)
    assert check_recorded(plain) == bits
    assert check_all(comm) == bits
    assert check_recorded(comm) == bits
    check_picks(comm)
    check_closing(plain)
    check_late_rank(plain)
    comm.barrier()
    return bits


@pytest.mark.parametrize("size", [2, 3])
def test_processes_add_as_threads_do(size: int) -> None:
    results = run_ranks(check_processes, size)
    assert all(bits == results[0] for bits in results)
    assert results[0] == run_threads(check_all, size)[0]


def check_picks(comm: Comm) -> None:
    assert isinstance(comm, SharedMemoryComm)
    assert comm_for() is comm
    assert comm_for(dist.group.WORLD) is comm
    assert comm_for(comm) is comm
    assert comm_for(device="cpu") is comm
    assert repr(comm) == f"SharedMemoryComm(rank={comm.rank} of {comm.size}, device=cpu)"
    plain = comm_for(shared_memory=False)
    assert isinstance(plain, GroupComm)
    assert comm_for(shared_memory=False) is plain
    mesh = init_device_mesh("cpu", (comm.size,), mesh_dim_names=("shard",))
    assert comm_for(mesh) is comm_for(mesh)
    assert (comm_for(mesh).rank, comm_for(mesh).size) == (comm.rank, comm.size)
    grid = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"expected a 1-D mesh, got .* as in mesh\['shard'\]"):
        comm_for(grid)
    assert isinstance(comm_for(grid["shard"]), SoloComm)
    assert comm_for(grid["replicate"]).size == comm.size
    first = dist.new_group([0])
    if comm.rank == 0:
        assert isinstance(comm_for(first), SoloComm)
    else:
        with pytest.raises(ValueError, match="this process is not part of the group"):
            comm_for(first)
    check_group_is_let_go(comm)


def check_group_is_let_go(comm: Comm) -> None:
    """A destroyed group is not kept alive, with its threads and sockets, by what was picked."""
    group = dist.new_group(list(range(comm.size)), timeout=timedelta(seconds=7))
    picked = comm_for(group)
    assert picked.timeout_s == 7.0
    assert comm_for(group) is picked
    picked.barrier()
    reference = weakref.ref(group)
    dist.destroy_process_group(group)
    del group, picked
    gc.collect()
    assert reference() is None


def check_closing(comm: Comm) -> None:
    """A part's group goes with its comm; a group that the caller made stays."""
    part = comm.split(0)
    assert isinstance(part, GroupComm)
    part.barrier()
    part.close()
    part.close()
    assert part.group not in dist.distributed_c10d._world.pg_map
    with pytest.raises(ValueError, match=r"all_reduce: this comm is closed \(rank"):
        part.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="split: this comm is closed"):
        part.split(0)
    part = comm.split(0)
    assert isinstance(part, GroupComm)
    dist.destroy_process_group(part.group)
    part.close()  # nothing is left to destroy
    group = dist.new_group(list(range(comm.size)))
    for shared_memory in (False, True):
        picked = comm_for(group, shared_memory=shared_memory)
        picked.close()
        again = comm_for(group, shared_memory=shared_memory)
        assert again is not picked
        assert again is comm_for(group, shared_memory=shared_memory)
        assert isinstance(again, SharedMemoryComm) is shared_memory
        total = torch.ones(1)
        again.all_reduce(total, op="sum")
        assert total.item() == comm.size
    dist.destroy_process_group(group)


def check_late_rank(comm: Comm) -> None:
    """Rank 0 gives up on the others, who come when it has: it names what it waited for."""
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(2)
    if comm.rank == 0:
        work = comm.all_reduce(tensor, async_op=True, timeout_s=0.2)
        with logged("shard_comm") as said:
            for _ in range(2):
                with pytest.raises(
                    RuntimeError,
                    match=r"all_reduce sum of 2 float32 failed on rank 0 of .* 0\.2 s",
                ):
                    work.wait()
        store.set("rank 0 gave up", "")
        (text,) = said
        head, *calls = text.split("\n")
        assert head == f"the last calls of rank 0 of {comm.size}:"
        assert ", done, " in calls[0]
        assert re.fullmatch(
            r"  \d+: all_reduce sum of 2 float32, 8 bytes, failed, \d\.\d{3} s", calls[-1]
        )
    else:
        store.wait(["rank 0 gave up"])
        comm.all_reduce(tensor)
