"""Ranks on several hosts: declared to be apart, though one machine holds them."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from hashlib import blake2b

import pytest
import torch
import torch.distributed as dist

from shard_comm import (
    Checked,
    Comm,
    GroupComm,
    HierarchicalComm,
    SharedMemoryComm,
    Slices,
    SoloComm,
    _shared_file,
    comm_for,
)
from shard_comm._hierarchical import _let_go, through_memory
from shard_testing import logged, run_ranks, run_threads

SIZES = (1, 7, 20_000, 300_001)
"""Elements: sent whole, in parts, in several chunks of staging memory."""
SUMMED = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64)
TWO_BY_TWO = [0, 0, 1, 1]
LOST = 3
LIMIT_S = 2.0
NOTICED_S = 15.0


def on_hosts(comm: Comm, layout: Sequence[int], limit_s: float = 60.0) -> Comm:
    """Return the comm of a new group whose ranks declare these hosts."""
    os.environ["SHARD_HOST"] = f"host {layout[comm.rank]}"
    return comm_for(dist.new_group(list(range(comm.size)), timeout=timedelta(seconds=limit_s)))


def draw(comm: Comm, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random numbers of this rank, every second time in memory of the comm."""
    generator = torch.Generator().manual_seed(100 * seed + comm.rank)
    values = torch.randn(numel, generator=generator).mul_(1000).to(dtype)
    return comm.empty(numel, dtype).copy_(values) if seed % 2 else values


def bits_of(comm: Comm) -> list[str]:
    """A digest of each collective's result on this rank."""
    results: list[torch.Tensor] = []
    for seed, numel in enumerate(SIZES):
        for dtype in SUMMED if numel < 10_000 else SUMMED[:2]:
            wide = draw(comm, numel * comm.size, dtype, seed)
            for op in ("sum", "max", "min", "mean", "premul_mean") if numel < 10_000 else ("sum",):
                if (dtype.is_complex and op in ("max", "min")) or (
                    dtype == torch.int64 and "mean" in op
                ):
                    continue
                scattered, reduced = torch.empty(numel, dtype=dtype), wide[:numel].clone()
                comm.reduce_scatter(scattered, wide.clone(), op=op)
                comm.all_reduce(reduced, op=op)
                results += [scattered, reduced]
            gathered = torch.empty(numel * comm.size, dtype=dtype)
            exchanged, sent = torch.empty_like(gathered), wide[:numel].clone()
            comm.all_gather(gathered, wide[:numel])
            comm.all_to_all(exchanged, wide)
            lengths = tuple(comm.rank * other for other in range(comm.size))  # none of rank 0
            slices = Slices(lengths, lengths, (comm.size - 1) ** 2)
            ragged = torch.empty(sum(lengths), dtype=dtype)
            comm.all_to_all(ragged, draw(comm, sum(lengths), dtype, 5), slices=slices)
            for src in range(comm.size):
                comm.broadcast(sent.add_(comm.rank), src=src)
            results += [gathered, exchanged, ragged, sent]
        narrow = draw(comm, numel * comm.size, torch.bfloat16, seed)
        for wider in (torch.float32, torch.float64, torch.bfloat16):
            for op in ("sum", "mean", "premul_mean") if numel < 10_000 else ("premul_mean",):
                summed = torch.empty(numel, dtype=wider)
                total = narrow[:numel].clone()
                comm.reduce_scatter(summed, narrow.clone(), op=op, sum_dtype=wider)
                comm.all_reduce(total, op=op, sum_dtype=wider)
                results += [summed, total]
    return [digest(result) for result in results]


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return blake2b(raw, digest_size=8).hexdigest()


def check_bits(comm: Comm, layout: Sequence[int]) -> list[str]:
    """All results; on two hosts of two, all else as well, lest there be more processes."""
    ours = on_hosts(comm, layout)
    assert isinstance(ours, HierarchicalComm)
    assert ours.hosts.of == tuple(layout)
    results = bits_of(ours)
    if layout == TWO_BY_TWO:
        for check in CHECKS:
            check(ours)
    return results


@pytest.mark.parametrize(
    "layout",
    [TWO_BY_TWO, [0, 0, 0, 1], [0, 1, 0, 1], [0, 1, 1, 2, 2]],
    ids=["2+2", "3+1", "in turns", "1+2+2"],
)
def test_bits_are_those_of_threads(layout: list[int]) -> None:
    assert run_ranks(check_bits, len(layout), layout) == run_threads(bits_of, len(layout))


def check_what_it_is(comm: HierarchicalComm) -> None:
    group = comm.process_group
    assert comm_for(group) is comm
    assert isinstance(comm_for(group, shared_memory=False), GroupComm)
    assert repr(comm) == f"HierarchicalComm(rank={comm.rank} of 4, device=cpu)"
    assert comm.timeout_s == 60.0
    assert comm.shared(8, torch.float32) is None
    memory = comm.empty(5, torch.bfloat16)
    assert comm._engine.arena.find(memory.data_ptr()) is not None


def check_parts(comm: HierarchicalComm) -> None:
    """A part is what its own ranks can be."""
    kinds = {
        SharedMemoryComm: comm.split(comm.rank // 2),
        GroupComm: comm.split(comm.rank % 2),
        SoloComm: comm.split(comm.rank),
        HierarchicalComm: comm.split(0),
    }
    members = {
        SharedMemoryComm: [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1],
        GroupComm: [comm.rank % 2, comm.rank % 2 + 2],
        SoloComm: [comm.rank],
        HierarchicalComm: [0, 1, 2, 3],
    }
    for kind, part in kinds.items():
        assert type(part) is kind
        assert part.all_gather_object(comm.rank) == members[kind]
        group = part.process_group
        assert (group is None) == (kind is SoloComm)
        assert group is None or dist.get_process_group_ranks(group) == members[kind]
        comm.barrier()
        part.close()
        assert group not in dist.distributed_c10d._world.pg_map


def check_any_order(comm: HierarchicalComm) -> None:
    """Ranks wait for works, and for others elsewhere, each in an order of its own."""
    elsewhere = comm_for(comm.process_group, shared_memory=False)
    outs = [torch.empty(4) for _ in range(20)]
    works = [
        comm.all_gather(out, torch.tensor([10.0 * number + comm.rank]), async_op=True)
        for number, out in enumerate(outs)
    ]
    scattered = torch.empty(1000)
    works.append(comm.reduce_scatter(scattered, torch.ones(4000), async_op=True))
    if comm.rank % 2:
        works.reverse()
        elsewhere.barrier()
    for work in works:
        work.wait()
    if comm.rank % 2 == 0:
        elsewhere.barrier()
    assert [out.tolist() for out in outs] == [
        [10.0 * number + rank for rank in range(4)] for number in range(20)
    ]
    assert scattered.unique().tolist() == [4.0]


def check_inference_tensors(comm: HierarchicalComm) -> None:
    """Made in inference mode, filled in it and outside of it, by a thread that is not in it."""
    with torch.inference_mode():
        out, total = torch.zeros(8), torch.tensor([1.0, 2.0]).bfloat16()
        comm.all_gather(out, torch.full((2,), float(comm.rank)))
        comm.all_reduce(total, sum_dtype=torch.float32)
        shard, large = torch.zeros(3), torch.ones(20_000)
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert total.tolist() == [4.0, 8.0]
    comm.all_reduce(total)
    assert total.tolist() == [16.0, 32.0]
    comm.reduce_scatter(shard, torch.ones(12))
    assert shard.tolist() == [4.0] * 3
    comm.all_reduce(large)
    assert large.unique().tolist() == [4.0]
    comm.broadcast(out, src=2)
    comm.all_gather(out, torch.full((2,), float(-comm.rank)))
    assert out.tolist() == [0.0, 0.0, -1.0, -1.0, -2.0, -2.0, -3.0, -3.0]


def check_mistakes_break_nothing(comm: HierarchicalComm) -> None:
    with pytest.raises(ValueError, match=r"12 elements in out for 3 in inp, .* \(rank \d of 4\)"):
        comm.all_gather(torch.empty(8), torch.empty(3))
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        comm.all_gather_object(lambda: None)
    with pytest.raises(ValueError, match=r"of several ranks, for CPU tensors, got Hierarchical"):
        HierarchicalComm.join(comm)
    alone = GroupComm(dist.new_group([comm.rank], use_local_synchronization=True))
    with pytest.raises(ValueError, match=r"of several ranks.* got GroupComm\(rank=0 of 1"):
        HierarchicalComm.join(alone)
    assert comm.all_gather_object(comm.rank) == [0, 1, 2, 3]


def check_checked(comm: HierarchicalComm) -> None:
    """Ranks of different hosts that call different things hear of it."""
    checked = Checked(comm)
    with pytest.raises(
        RuntimeError,
        match=r"ranks \[0, 1\] call barrier\(\) \(call 1\), ranks \[2, 3\] call all_reduce sum",
    ):
        checked.barrier() if comm.rank < 2 else checked.all_reduce(torch.ones(1))
    comm.barrier()


def check_forked_child(comm: HierarchicalComm) -> None:
    work = comm.all_gather(torch.empty(4), torch.ones(1), async_op=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(RuntimeError, match=rf"was forked from rank {comm.rank} of 4"):
                comm.barrier()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.wait()


def check_declared_host(comm: HierarchicalComm) -> None:
    """Named by an argument, and kept by parts."""
    plain = comm_for(comm.process_group, shared_memory=False)
    ours = HierarchicalComm.join(plain, host="ab"[comm.rank // 3], timeout_s=7.0)
    assert ours.hosts.of == (0, 0, 0, 1)
    assert ours.timeout_s == 7.0
    part = ours.split(int(comm.rank > 0))
    if comm.rank > 0:
        assert isinstance(part, HierarchicalComm)
        assert part.hosts.of == (0, 0, 1)
        total = torch.ones(1)
        part.all_reduce(total)
        assert total.item() == 3.0
    ours.barrier()
    ours.close()


def check_one_host(comm: HierarchicalComm) -> None:
    """Nothing goes between hosts then."""
    plain = comm_for(comm.process_group, shared_memory=False)
    ours = HierarchicalComm.join(plain, host="one")
    assert ours.hosts.of == (0, 0, 0, 0)
    values = torch.full((2,), float(comm.rank))
    ours.broadcast(values, src=3)
    ours.all_reduce(values)
    assert values.tolist() == [12.0, 12.0]
    ours.barrier()
    ours.close()


def check_done_as_a_wait_gives_up(comm: HierarchicalComm) -> None:
    """What is done by the time that it is asked for has not failed."""
    waits = iter([RuntimeError("timed out"), None])

    class Late:
        def wait(self, timeout: timedelta) -> None:
            error = next(waits)
            if error is not None:
                raise error

        def is_completed(self) -> bool:
            return True

    comm._net._wait_until(Late(), time.monotonic() + 60.0, None)
    assert list(waits) == []


def check_no_memory_on_one_host(comm: HierarchicalComm) -> None:
    """Then Gloo serves all, and rank 0 says why."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("not allowed")

    plain = comm_for(comm.process_group, shared_memory=False)
    assert isinstance(plain, GroupComm)
    with logged("shard_comm") as records, pytest.MonkeyPatch.context() as patch:
        if comm.rank == 3:
            patch.setattr(_shared_file, "_open", refuse)
        assert through_memory(plain) is plain
    reason = "the ranks cannot open memory of one another: rank 3: not allowed"
    said = [f"4 ranks of 2 hosts go through Gloo: {reason}; {reason}"]
    assert records == (said if comm.rank == 0 else [])


def check_closing(comm: HierarchicalComm) -> None:
    """Everything goes, and who waits for a rank that has closed hears of it."""
    part = comm.split(0)
    assert isinstance(part, HierarchicalComm)
    total = torch.ones(100_000)
    part.all_reduce(total)
    thread, group = part._worker._thread, part._net.group
    if comm.rank == 1:
        part.close()
        part.close()
        assert not thread.is_alive()
        assert group not in dist.distributed_c10d._world.pg_map
        calls: dict[str, Callable[[], object]] = {
            "barrier": part.barrier,
            "all_gather_object": lambda: part.all_gather_object(1),
            "all_reduce": lambda: part.all_reduce(total),
            "split": lambda: part.split(0),
            "shared": lambda: part.shared(4, torch.float32),
        }
        for op, call in calls.items():
            with pytest.raises(ValueError, match=rf"^{op}: this comm is closed \(rank 1 of 4\)"):
                call()
    else:
        with pytest.raises(RuntimeError) as caught:
            part.reduce_scatter(torch.empty(1), torch.ones(4))
        with pytest.raises(RuntimeError) as again:
            part.barrier()
        assert str(again.value) == str(caught.value)
        what = r"rank 1 \(process \d+\) is gone|this comm is closed \(rank 1 of 4\)"
        assert re.search(what, str(caught.value))
    comm.barrier()


def check_end_of_a_process(comm: HierarchicalComm) -> None:
    """What is under way is given up, so that no thread is left in it, and others hear why."""
    part = comm.split(0)
    assert isinstance(part, HierarchicalComm)
    part.barrier()
    out, mine = torch.empty(4), torch.ones(1)
    if comm.rank == 2:
        work = part.all_gather(out, mine, async_op=True)
        _let_go(part._engine, part._worker, part._where)
        assert not part._worker._thread.is_alive()
        with pytest.raises(RuntimeError, match=r"this comm is gone \(rank 2 of 4\)"):
            work.wait()
    comm.barrier()
    if comm.rank != 2:
        heard = r"this comm is gone \(rank 2 of 4\)|rank 2 \(process \d+\) is gone"
        with pytest.raises(RuntimeError, match=heard):
            part.reduce_scatter(mine, torch.ones(4))
    comm.barrier()


CHECKS = [
    check_what_it_is,
    check_parts,
    check_any_order,
    check_inference_tensors,
    check_mistakes_break_nothing,
    check_checked,
    check_forked_child,
    check_declared_host,
    check_one_host,
    check_done_as_a_wait_gives_up,
    check_no_memory_on_one_host,
    check_closing,
    check_end_of_a_process,
]

CALLS: dict[str, tuple[Callable[[Comm, float], object], str]] = {
    "gather": (
        lambda c, t: c.all_gather(torch.empty(8), torch.ones(2), name="layers.8", timeout_s=t),
        "all_gather of 2 float32 for layers.8",
    ),
    "scatter": (
        lambda c, t: c.reduce_scatter(torch.empty(2), torch.ones(8), name="norm", timeout_s=t),
        "reduce_scatter sum of 8 float32 for norm",
    ),
    "reduce": (
        lambda c, t: c.all_reduce(torch.ones(100_000), op="max", timeout_s=t),
        "all_reduce max of 100000 float32",
    ),
    "broadcast": (
        lambda c, t: c.broadcast(torch.ones(2), src=3, timeout_s=t),
        "broadcast of 2 float32",
    ),
    "exchange": (
        lambda c, t: c.all_to_all(torch.empty(4), torch.ones(4), timeout_s=t),
        "all_to_all of 4 float32",
    ),
    "object": (
        lambda c, t: c.all_gather_object("x", timeout_s=t),
        "all_gather of 1 int64 (all_gather_object)",
    ),
    "barrier": (lambda c, t: c.barrier(timeout_s=t), "barrier()"),
}


def lose_a_rank(comm: Comm, how: str) -> dict[str, tuple[str, float]]:
    """Call each kind of collective on a group of its own, all at once; rank 3 does not come."""
    ours = on_hosts(comm, TWO_BY_TWO)
    parts = {kind: ours.split(0) for kind in CALLS}
    for part in parts.values():
        part.barrier()
    if comm.rank == LOST:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    def call(kind: str) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            CALLS[kind][0](parts[kind], LIMIT_S if how == "hanging" else 60.0)
        took_s = time.monotonic() - began
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(caught.value))}$"):
            parts[kind].barrier()
        return str(caught.value), took_s

    with ThreadPoolExecutor(len(CALLS)) as pool:
        said = dict(zip(CALLS, pool.map(call, CALLS), strict=True))
    # A process that ends would tell the others by that alone.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"rank {comm.rank} heard", "")
    store.wait([f"rank {rank} heard" for rank in range(LOST)])
    return said


@pytest.mark.parametrize("how", ["killed", "hanging"])
def test_ranks_of_both_hosts_hear_of_a_lost_one(how: str) -> None:
    """In time, with the operation, and rank 3 named; on its host by itself where that is known."""
    results = run_ranks(lose_a_rank, 4, how, lost=[LOST])
    for rank, said in enumerate(results[:LOST]):
        for kind, (_, what) in CALLS.items():
            message, took_s = said[kind]
            assert took_s < LIMIT_S + NOTICED_S, (rank, message)
            inside = r"rank 3 \(process \d+\) is gone|waited 2 s for ranks \[3\]; ranks \[2\] had"
            across = r"rank 3 did not|ranks \[2, 3\] did not"
            if kind in ("scatter", "reduce"):
                across = across if rank < 2 else inside
            assert message.startswith(what), message
            assert re.search(rf"on rank [012] of 4\b.*({across})", message), message
