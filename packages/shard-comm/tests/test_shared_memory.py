"""Ranks that share memory: values are those of threads, whatever lies where and waits when."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, SharedMemoryComm, SoloComm, _arena, _engine, _shared_memory
from shard_comm._board import SLOTS
from shard_comm._mapping import LARGE_PAGE, pages_of
from shard_comm._patience import SPINS, Patience
from shard_comm._turn import Body
from shard_testing import logged, run_ranks, run_threads

MIB = 1 << 20
LARGE = 1_100_001
"""Elements of an fp32 input that passes through staging in several chunks, the last one odd."""


def inputs(
    comm: Comm, numel: int, *, where: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Random numbers of this rank in memory of the comm, elsewhere, or each in turn by rank."""
    generator = torch.Generator().manual_seed(comm.rank)
    values = torch.randn(numel, generator=generator).mul_(1000).to(dtype)
    if where == "comm" or (where == "mixed" and comm.rank % 2 == 0):
        return comm.empty(numel, dtype).copy_(values)
    return values


def large_values(comm: Comm, where: str) -> list[bytes]:
    """Every collective on tensors of several chunks; returns their bits in digest."""
    n = LARGE
    wide = inputs(comm, n * comm.size, where=where)
    gathered, scattered = torch.empty(n * comm.size), torch.empty(n)
    exchanged, reduced, sent = torch.empty(n * comm.size), wide[:n].clone(), wide[n:][:n].clone()
    largest, narrow = torch.empty(n), inputs(comm, n * comm.size, where=where, dtype=torch.bfloat16)
    summed, total = torch.empty(n), narrow[:n].clone()
    comm.all_gather(gathered, wide[:n])
    comm.all_to_all(exchanged, wide)
    comm.all_reduce(reduced)
    comm.broadcast(sent, src=comm.size - 1)
    comm.reduce_scatter(largest, wide.clone(), op="max")
    comm.reduce_scatter(scattered, wide)
    comm.all_reduce(total, op="premul_mean", sum_dtype=torch.float32)
    comm.all_reduce(narrow.view(comm.size, n)[-1], op="mean", sum_dtype=torch.bfloat16)
    comm.reduce_scatter(summed, narrow, sum_dtype=torch.float32)
    results = [gathered, exchanged, reduced, sent, largest, scattered, summed, total.float()]
    return [_digest(result) for result in results]


def _digest(tensor: torch.Tensor) -> bytes:
    words = tensor.view(torch.int32).to(torch.int64)
    weights = torch.arange(words.numel()) % 1009 + 1
    return pickle.dumps([int((words * weights).sum()), words[:4].tolist(), words[-4:].tolist()])


def check_large(comm: Comm) -> None:
    """The same bits from staging, in place, and with some ranks here and some there."""
    results = [large_values(comm, where) for where in ("elsewhere", "comm", "mixed")]
    assert results[1] == results[0]
    assert results[2] == results[0]


def taken_bytes(comm: SharedMemoryComm) -> int:
    comm._engine.collect()
    return comm._engine.arena.taken_bytes


def check_in_place(comm: SharedMemoryComm) -> None:
    """Memory of the comm is not staged; other inputs take two chunks, however large they are."""
    out = torch.empty(4 * MIB * comm.size)
    comm.barrier()
    before = taken_bytes(comm)
    inp = comm.empty(4 * MIB, torch.float32)
    assert taken_bytes(comm) - before == 16 * MIB
    work = comm.all_gather(out, inp, async_op=True)
    assert taken_bytes(comm) - before == 16 * MIB
    work.wait()
    work = comm.all_gather(out, torch.ones(4 * MIB), async_op=True)
    assert taken_bytes(comm) - before == 16 * MIB + 8 * MIB
    work.wait()
    assert out.sum().item() == 4 * MIB * comm.size
    del inp
    comm.barrier()  # all have read, so that the staging memory is free
    assert taken_bytes(comm) == before


def check_wide_sums_are_not_staged(comm: SharedMemoryComm) -> None:
    """256, 1 and so on in bfloat16, added where they lie, in float32: 257, or 259 of 4 ranks."""
    comm.barrier()
    inp = comm.empty(MIB, torch.bfloat16).fill_(256 if comm.rank == 0 else 1)
    before = taken_bytes(comm)
    out = torch.empty(MIB // comm.size)
    work = comm.reduce_scatter(out, inp, sum_dtype=torch.float32, async_op=True)
    assert taken_bytes(comm) == before
    work.wait()
    assert out.unique().tolist() == [255.0 + comm.size]
    work = comm.all_reduce(inp, sum_dtype=torch.float32, async_op=True)
    assert taken_bytes(comm) == before
    work.wait()
    assert inp.unique().tolist() == [{2: 256.0, 4: 260.0}[comm.size]]  # rounded to even, once
    del inp
    comm.barrier()


def check_input_is_free_after_the_wait(comm: Comm) -> None:
    """Rank 0 overwrites its input as soon as it may; the others look when it has."""
    for inp in (comm.empty(1000, torch.float32), torch.empty(1000)):
        inp.fill_(comm.rank)
        out, total = torch.empty(1000 * comm.size), torch.full((1000,), float(comm.rank))
        works = [
            comm.all_gather(out, inp, async_op=True),
            comm.all_reduce(total, async_op=True),
        ]
        if comm.rank == 0:
            works.pop(0).wait()
            inp.fill_(-1)
        comm.barrier()
        for work in works:
            work.wait()
        assert out.view(comm.size, 1000)[:, 7].tolist() == list(range(comm.size))
        assert total[3].item() == sum(range(comm.size))


def check_block_in_flight_is_not_taken(comm: SharedMemoryComm) -> None:
    """The caller drops its input at once; what others still read is not given out."""
    comm.barrier()
    before = taken_bytes(comm)
    inp = comm.empty(MIB, torch.float32).fill_(comm.rank + 1)
    address, out = inp.data_ptr(), torch.zeros(MIB * comm.size)
    work = comm.all_gather(out, inp, async_op=True)
    del inp
    other = comm.empty(MIB, torch.float32).fill_(-1)
    assert other.data_ptr() != address
    comm.barrier()
    work.wait()
    assert taken_bytes(comm) == before + 4 * MIB  # of the other one
    sums = out.view(comm.size, MIB).sum(1).tolist()
    assert sums == [(rank + 1) * MIB for rank in range(comm.size)]


def check_given_input_is_waited_for_by_nobody(comm: SharedMemoryComm) -> None:
    """Rank 0 is done with an input that the others read only later, and find as it was."""
    comm.barrier()
    before = taken_bytes(comm)
    numel = 1000 * comm.size
    inp = comm.empty(numel, torch.float32).fill_(comm.rank + 1)
    own, out = [torch.full((1000,), comm.rank + 1.0)], torch.empty(1000)
    work = comm.reduce_scatter(out, inp, own=own, op="mean", async_op=True)
    del inp
    if comm.rank == 0:
        work.wait()
        comm.empty(numel, torch.float32).fill_(-1)
        dist.barrier()  # nothing of the comm is done in there
    else:
        dist.barrier()
        work.wait()
    assert out.tolist() == [(comm.size + 1) / 2] * 1000
    del work
    comm.barrier()
    comm.trim()
    assert taken_bytes(comm) == before


def check_own_contributions(comm: SharedMemoryComm) -> None:
    """In memory of the comm and elsewhere, in one piece and in chunks, own parts are read apart."""
    for where in ("comm", "elsewhere", "mixed"):
        plain = inputs(comm, LARGE * comm.size, where=where)
        apart = inputs(comm, LARGE * comm.size, where=where)
        row = apart.view(comm.size, LARGE)[comm.rank]
        own = list(row.clone().split([10, LARGE - 10]))
        row.fill_(torch.nan)
        expected, out = torch.empty(LARGE), torch.empty(LARGE)
        comm.reduce_scatter(expected, plain, op="mean")
        comm.reduce_scatter(out, apart, op="mean", own=own)
        assert torch.equal(out, expected), where


def check_many_under_way(comm: Comm) -> None:
    """More than there are slots, waited for in an order of each rank's own."""
    count = 2 * SLOTS + 3
    part = comm.split(0)
    results, works = [], []
    for number in range(count):
        out = torch.empty(comm.size)
        results.append(out)
        place = comm if number % 3 else part
        works.append(
            place.all_gather(out, torch.tensor([float(100 * comm.rank + number)]), async_op=True)
        )
    order = list(range(count))
    if comm.rank % 2:
        order.reverse()
    for index, number in enumerate(order):
        works[number].wait()
        if index == 50:
            part.barrier()
    for number, out in enumerate(results):
        assert out.tolist() == [100 * rank + number for rank in range(comm.size)]


def check_uneven_progress(comm: Comm) -> None:
    """Rank 0 waits in one comm while the others wait for it in another."""
    part = comm.split(0)
    inp = comm.empty(LARGE, torch.float32).fill_(comm.rank)
    out = torch.empty(LARGE * comm.size)
    work = comm.all_gather(out, inp, async_op=True)
    if comm.rank == 0:
        work.wait()
        part.barrier()
    else:
        part.barrier()
        work.wait()
    assert out[::LARGE].tolist() == list(range(comm.size))


def check_mismatch(comm: Comm) -> None:
    part = comm.split(0)
    wide = torch.ones(2 * comm.size).bfloat16()
    calls: list[Callable[[], object]] = [
        lambda: part.all_gather(torch.empty(2 * comm.size), torch.ones(2)),
        part.barrier,
        lambda: part.reduce_scatter(wide[:1].clone(), wide[: comm.size]),
    ]
    with pytest.raises(RuntimeError) as caught:
        calls[min(comm.rank, 2)]()
    said = comm.all_gather_object(str(caught.value))
    expected = "ranks call different collectives: rank 0 calls all_gather of 2 float32, rank 1 "
    expected += "calls barrier()"
    for rank in range(2, comm.size):
        expected += f", rank {rank} calls reduce_scatter sum of {comm.size} bfloat16"
    assert said == [expected] * comm.size
    for call in (part.barrier, lambda: part.empty(1, torch.float32), lambda: part.split(0)):
        with pytest.raises(RuntimeError, match="ranks call different collectives: rank 0 calls"):
            call()
    part = comm.split(0)
    with pytest.raises(RuntimeError, match=r"rank 1 calls all_reduce sum of 6 float32"):
        part.all_reduce(torch.ones(6 if comm.rank == 1 else 5))
    part = comm.split(0)
    with pytest.raises(RuntimeError, match=r"rank 0 calls broadcast from 0 .*from 1 of 1 float32"):
        part.broadcast(torch.ones(1), src=min(comm.rank, 1))


def check_ranks_that_wait_for_each_other(comm: Comm) -> None:
    """Rank 0 is at an array, the others at a barrier: all hear of it long before the timeout."""
    part = comm.split(0)
    array = part.shared(4 * comm.size, torch.float32, name="layers.0")
    assert array is not None
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        array.publish().wait() if comm.rank == 0 else part.barrier()
    assert time.monotonic() - began < part.timeout_s / 4
    said = comm.all_gather_object(str(caught.value))
    expected = "ranks wait for each other: rank 0 is in publish of the shared array layers.0 "
    expected += f"[{4 * comm.size}], rank "
    assert said[0].startswith(expected)
    assert "is in barrier()" in said[0]
    assert said == [said[0]] * comm.size


def check_claims_without_a_release(comm: Comm) -> None:
    """Nobody has released: no claim returns, and the error says what would let it."""
    array = comm.split(0).shared(comm.size, torch.float32)
    assert array is not None
    array.publish().wait()
    with pytest.raises(RuntimeError, match=r"ranks wait .* all ranks have called release\(\)$"):
        array.claim()


def check_sizes_of_a_shared_array(comm: Comm) -> None:
    mine = 2 if comm.rank == 1 else 1
    others = [rank for rank in range(comm.size) if rank != 1]
    text = (
        f"shared: expected one size and dtype on all ranks, got {comm.size} of torch.int64 on "
        f"ranks {others}, {2 * comm.size} of torch.int64 on ranks [1] (rank {comm.rank} of "
        f"{comm.size})"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        comm.shared(mine * comm.size, torch.int64)


def check_waiting_in_turns(comm: Comm) -> None:
    """Ranks in step wait for what others do next, and look at each other all the time."""
    usual, _engine._LOOK_S = _engine._LOOK_S, 0.0
    try:
        found = large_values(comm.split(0), "elsewhere")
    finally:
        _engine._LOOK_S = usual
    assert found == large_values(comm, "elsewhere")


def check_long_wait(comm: Comm) -> None:
    """Rank 0 waits, and its warning is what the others wait for before they come."""
    store = dist.distributed_c10d._get_default_store()
    logger, handler, said = logging.getLogger("shard_comm"), logging.Handler(), []

    def emit(record: logging.LogRecord) -> None:
        said.append(record.getMessage())
        store.set("warned", "")

    handler.emit = emit  # type: ignore[method-assign]
    part = comm.split(0)
    if comm.rank == 0:
        usual, _engine._WARN_S = _engine._WARN_S, 0.1
        logger.addHandler(handler)
        part.barrier()
        logger.removeHandler(handler)
        _engine._WARN_S = usual
        size, others = comm.size, list(range(1, comm.size))
        awaited = f"barrier() on rank 0 of {size} waited 0.1 s for ranks {others}"
        assert said == [f"{awaited}; ranks [0] had arrived"]
    else:
        store.wait(["warned"])
        part.barrier()


def check_failing_at_once(comm: Comm) -> None:
    """Each rank finds a reason of its own at the same moment: all raise the same one."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    part.barrier()
    error = part._engine.failure(f"rank {part.rank} has had enough")
    said = comm.all_gather_object(str(error))
    assert said == [said[0]] * comm.size
    assert said[0] in {f"rank {rank} has had enough" for rank in range(comm.size)}
    with pytest.raises(RuntimeError, match=said[0]):
        part.barrier()


def check_names(comm: Comm) -> None:
    """Same sizes, other names: the sums would have been mixed up. Of long names the start shows."""
    part = comm.split(0)
    with pytest.raises(RuntimeError) as caught:
        part.all_reduce(torch.ones(2), op="mean", name=f"layers.{min(comm.rank, 1)}")
    said = comm.all_gather_object(str(caught.value))
    expected = "ranks call different collectives: rank 0 calls all_reduce sum of 2 float32 (mean) "
    expected += "for layers.0"
    for rank in range(1, comm.size):
        expected += f", rank {rank} calls all_reduce sum of 2 float32 (mean) for layers.1"
    assert said == [expected] * comm.size
    part = comm.split(0)
    with pytest.raises(RuntimeError, match=r" for x{123}(, rank 1|$)"):
        part.barrier() if comm.rank == 1 else part.all_gather(
            torch.empty(comm.size), torch.ones(1), name="x" * 200
        )
    part = comm.split(0)
    if comm.rank != 1:
        what = r"reduce_scatter sum of \d int8 \(int32 sums\) for norm on rank \d of .* ranks \[1\]"
        inp, out = torch.ones(comm.size, dtype=torch.int8), torch.empty(1, dtype=torch.int32)
        with pytest.raises(RuntimeError, match=what):
            part.reduce_scatter(out, inp, sum_dtype=torch.int32, name="norm", timeout_s=0.1)
    comm.barrier()


def check_closing(comm: Comm) -> None:
    """A closed comm refuses calls; who still waits for it hears that it is gone."""
    part = comm.split(0)
    array = part.shared(part.size, torch.float32)
    assert array is not None
    memory = part.empty(3, torch.float32).fill_(comm.rank)
    out = torch.empty(3 * comm.size)
    part.all_gather(out, memory)
    pending = part.all_gather(torch.empty(comm.size), torch.ones(1), async_op=True)
    if comm.rank == 1:
        part.close()
        part.close()
        where = rf"this comm is closed \(rank 1 of {comm.size}\); make a new one"
        calls: dict[str, Callable[[], object]] = {
            "barrier: ": part.barrier,
            "all_gather_object: ": lambda: part.all_gather_object(1),
            "split: ": lambda: part.split(0),
            "shared: ": lambda: part.shared(part.size, torch.float32),
            r"claim of the shared array \[\d\]: ": array.claim,
        }
        for op, call in calls.items():
            with pytest.raises(ValueError, match=f"^{op}{where}"):
                call()
        with pytest.raises(RuntimeError, match=f"^{where}"):
            pending.wait()
        assert memory.tolist() == [1.0] * 3
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) is gone"):
            part.barrier()
    assert out.tolist() == [float(rank) for rank in range(comm.size) for _ in range(3)]
    comm.barrier()


def check_closing_ends_a_wait(comm: Comm) -> None:
    """Another thread of the rank waits in a barrier when the comm is closed."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    if comm.rank == 0:
        said: list[str] = []

        def wait() -> None:
            with pytest.raises(RuntimeError) as caught:
                part.barrier()
            said.append(str(caught.value))

        called = part._engine._seq
        waiting = threading.Thread(target=wait)
        waiting.start()
        while part._engine._seq == called:
            os.sched_yield()
        part.close()
        waiting.join()
        assert said == [f"this comm is closed (rank 0 of {comm.size}); make a new one"]
    comm.barrier()


def check_absent_rank(comm: Comm) -> None:
    """Rank 1 comes when the others have given up: it hears why, from whoever was first."""
    part = comm.split(0)
    others = [rank for rank in range(comm.size) if rank != 1]
    if comm.rank != 1:
        with pytest.raises(RuntimeError) as caught:
            part.all_reduce(torch.ones(3), timeout_s=0.2)
    comm.barrier()
    if comm.rank == 1:
        part.all_reduce(torch.ones(3))  # all have come to this one
        with pytest.raises(RuntimeError) as caught:
            part.barrier()
    reasons = {
        f"all_reduce sum of 3 float32 on rank {rank} of {comm.size} waited 0.2 s for ranks [1]; "
        f"ranks {others} had arrived"
        for rank in others
    }
    assert set(comm.all_gather_object(str(caught.value))) <= reasons


def check_last_calls(comm: Comm) -> None:
    """One of the ranks that give up logs the last calls of all, those of the absent one too."""
    part = comm.split(0)
    for step in range(70):
        part.all_reduce(torch.ones(3), op="max", name=f"step {step}")
    with logged("shard_comm") as records:
        if comm.rank != 1:
            with pytest.raises(RuntimeError, match=r"waited 0\.2 s for ranks"):
                part.all_reduce(torch.ones(2), name="norm", timeout_s=0.2)
    told = comm.all_gather_object(records)
    (speaker,) = [rank for rank, records in enumerate(told) if records]
    assert len(told[speaker]) == comm.size
    for rank, text in enumerate(told[speaker]):
        head, *calls = text.split("\n")
        assert head == f"the last calls of rank {rank} of {comm.size}:"
        assert len(calls) == 64
    of_speaker, of_absent = (told[speaker][rank].split(": ")[-1] for rank in (speaker, 1))
    assert of_speaker == "all_reduce sum of 2 float32 for norm, 8 bytes, arrived"
    assert of_absent == "all_reduce max of 3 float32 for step 69, 12 bytes, done"


def check_input_of_a_rank_that_gave_up(comm: Comm) -> None:
    """It may be overwritten while it is read: who reads it raises as well."""
    part = comm.split(0)
    inp = part.empty(1, torch.float32) if comm.rank == 0 else torch.empty(1)
    out = torch.empty(comm.size)
    reason = rf"all_gather of 1 float32 on rank 0 of {comm.size} waited 0\.1 s"
    if comm.rank == 0:
        with pytest.raises(RuntimeError, match=reason):
            part.all_gather(out, inp, timeout_s=0.1)
    comm.barrier()
    if comm.rank != 0:
        with pytest.raises(RuntimeError, match=reason):
            part.all_gather(out, inp)
    comm.barrier()


def check_failure_in_the_middle(comm: Comm) -> None:
    """A rank that cannot do its part says so to the others."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    if comm.rank == 0:
        part._engine.arena._stop = 0
    out = torch.empty(20 * MIB * comm.size)
    with pytest.raises(RuntimeError, match=r"all_gather of .* failed on rank 0 of .*shared memory"):
        part.all_gather(out, torch.ones(20 * MIB))


def check_interrupt(comm: Comm) -> None:
    """An interrupt in the middle of a copy is no result."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    work = part.all_gather(torch.empty(comm.size), torch.ones(1), async_op=True)
    if comm.rank == 0:
        turn = next(iter(part._engine._under_way.values()))

        def interrupted() -> Body:
            yield 1
            raise KeyboardInterrupt

        turn.body = interrupted()
        next(turn.body)
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
            work.wait()
    comm.barrier()


def check_full(comm: SharedMemoryComm) -> None:
    """Without memory to share, ordinary memory serves, and the log says so once."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    part.all_reduce(torch.ones(1))
    part._engine.arena._stop = 0
    with logged("shard_comm") as records:
        for _ in range(2):
            part.empty(64 * MIB, torch.uint8).fill_(1)
    assert records == [
        "no shared memory left for 67108864 bytes; ordinary memory serves, more slowly"
    ]
    out = torch.empty(comm.size)
    part.all_gather(out, part.empty(64 * MIB, torch.float32).fill_(2)[:1])
    assert out.tolist() == [2.0] * comm.size


def check_forked_child(comm: SharedMemoryComm) -> None:
    """A child is no rank, and holds none of the memory."""
    array = comm.shared(comm.size, torch.float32)
    assert array is not None
    work = comm.all_gather(torch.empty(comm.size), torch.ones(1), async_op=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (comm.barrier, work.wait, array.release, lambda: array.publish()):
                with pytest.raises(RuntimeError, match=r"was forked from rank . of .*no rank"):
                    call()
            assert held() == 0
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    work.wait()
    comm.barrier()


def held() -> int:
    """Mappings and descriptors of shared memory that this process has."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").count("shard-comm")
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in _fds()]
    return maps + sum("memfd:shard-comm" in link for link in links)


def _fds() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def check_nothing_stays(comm: SharedMemoryComm) -> None:
    gc.collect()
    before = held()
    part = comm.split(0)
    memory = part.empty(100, torch.float32)
    part.all_gather(torch.empty(100 * comm.size), memory)
    array = part.shared(comm.size, torch.float32)
    assert held() > before
    part.barrier()
    del part, array
    assert held() == before + 1  # the mapping that memory lies in
    assert memory.fill_(2).sum().item() == 200
    del memory
    assert held() == before
    comm.barrier()


def check_gone_member(comm: Comm) -> None:
    """A rank that let go of the comm is known to be gone, though its process lives."""
    part = comm.split(0)
    part.barrier()
    if comm.rank == 1:
        del part
    else:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) is gone|rank 0 of"):
            part.barrier()
        assert time.monotonic() - began < 5
    comm.barrier()


def check_parts(comm: SharedMemoryComm) -> None:
    part = comm.split(comm.rank // 2)
    assert isinstance(part, SharedMemoryComm)
    assert (part.size, part.timeout_s) == (2, comm.timeout_s)
    alone = comm.split(comm.rank)
    assert isinstance(alone, SoloComm)
    assert part.all_gather_object(comm.rank) == [comm.rank // 2 * 2, comm.rank // 2 * 2 + 1]
    if comm.rank == 0:
        with pytest.raises(ValueError, match=r"two or more ranks for CPU tensors, got SoloComm"):
            SharedMemoryComm.join(alone)


def check_large_pages_of_an_array(comm: Comm) -> None:
    """Of an array of 13 MiB six pages are large; one rank asks for each, near what it writes."""
    asked: list[memoryview] = []
    with mock.patch.object(_shared_memory, "make_large", asked.append):
        array = comm.shared(13 * MIB, torch.uint8)
    assert array is not None
    start = array.data.data_ptr()
    assert start % LARGE_PAGE == 0
    mine = [page - start // LARGE_PAGE for page in pages_of(asked[0], LARGE_PAGE)]
    first = comm.rank * 13 // comm.size // 2
    assert mine == list(range(first, (comm.rank + 1) * 13 // comm.size // 2))
    everyone = comm.all_gather_object(mine)
    assert sorted(page for pages in everyone for page in pages) == [0, 1, 2, 3, 4, 5]


def check_memory_in_use_comes_to_lie_on_large_pages(comm: Comm) -> None:
    """What a call reads does when it is announced; what it wrote does when it is used again."""
    part = comm.split(0)  # nothing of its memory is in use yet
    inp = part.empty(2 * MIB, torch.float32).fill_(comm.rank)
    out = part.empty(2 * MIB * comm.size, torch.float32)
    asked: list[int] = []
    with mock.patch.object(_arena, "make_large", lambda v: asked.extend(pages_of(v, LARGE_PAGE))):
        for tensors in ([inp], [inp, out], [inp, out]):
            part.all_gather(out, inp)
            assert sorted(asked) == sorted(page for t in tensors for page in large_pages(t))
    assert out[:: 2 * MIB].tolist() == list(range(comm.size))


def large_pages(tensor: torch.Tensor) -> range:
    start = tensor.data_ptr()
    return range(-(-start // LARGE_PAGE), (start + tensor.nbytes) // LARGE_PAGE)


class Reads(TorchDispatchMode):
    """Counts the elements that operations take from some memory, by rank; views take none."""

    def __init__(self, memory: dict[int, tuple[int, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.counts = dict.fromkeys(memory, 0)

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for read in args:
                for rank, (low, high) in self._memory.items():
                    if isinstance(read, torch.Tensor) and low <= read.data_ptr() < high:
                        self.counts[rank] += read.numel()
        return func(*args, **(kwargs or {}))


def check_crowded_ranks_spin_nowhere(comm: Comm) -> None:
    """With a processor less than there are ranks a barrier looks once, then yields."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    engine, asked = part._engine, []
    meet = engine.board.meet

    def late(seq: int, rounds: int) -> bool:
        asked.append(rounds)
        meet(seq, rounds)
        return False

    for processors, rounds in ((part.size - 1, 0), (part.size, SPINS)):
        with mock.patch.object(engine.board, "processors", return_value=processors):
            engine.begin()
        with (
            mock.patch.object(engine.board, "meet", late),
            mock.patch.object(_engine, "Patience", wraps=Patience) as patience,
        ):
            part.barrier()
        assert asked.pop() == rounds
        patience.assert_called_once_with(crowded=rounds == 0)


def check_a_reduction_reads_each_slice_once(comm: Comm) -> None:
    """Of every rank's input this one reads its own slice, once, whatever is to be computed."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    numel = 100_003
    for op, dtype, sum_dtype, own in (
        ("max", torch.float32, None, False),
        ("sum", torch.float32, None, False),
        ("mean", torch.float32, None, True),
        ("mean", torch.bfloat16, torch.float32, False),
    ):
        inp = part.empty(numel * part.size, dtype).fill_(part.rank + 1)
        apart = [torch.full((numel,), part.rank + 1.0)] if own else None
        out = torch.empty(numel)
        reduce = partial(part.reduce_scatter, out, inp, op=op, sum_dtype=sum_dtype, own=apart)
        reduce()  # maps what the others put there
        memory = {
            segment: (window.data_ptr(), window.data_ptr() + window.nbytes)
            for segment, window in part._engine._windows._maps.items()
        }
        assert len(memory) == part.size - 1
        with Reads(memory) as reads:
            reduce()
        assert reads.counts == dict.fromkeys(memory, numel)
        total = part.size * (part.size + 1) / 2
        expected = {"max": float(part.size), "sum": total, "mean": total / part.size}[op]
        assert out.unique().tolist() == [expected]


def check_marks_of_an_array_are_fenced(comm: Comm) -> None:
    """Each wait ends with a fence, and each change of a mark has one on either side."""
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    array = part.shared(part.size, torch.float32)
    assert array is not None
    fences: list[str] = []
    part._engine.board._fence = lambda: fences.append("")  # type: ignore[assignment]
    counts = []
    array.claim()
    counts.append(len(fences))
    work = array.publish()
    counts.append(len(fences))
    work.wait()
    counts.append(len(fences))
    array.release()
    counts.append(len(fences))
    assert counts == [1, 3, 4, 6]
    comm.barrier()


def check_barrier_is_a_barrier(comm: Comm) -> None:
    """Counters of all ranks, each written before a barrier, are there after it."""
    array = comm.shared(comm.size, torch.int64)
    assert array is not None
    array.data.fill_(-1) if comm.rank == 0 else None
    comm.barrier()
    for number in range(500):
        array.own.fill_(number)
        comm.barrier()
        assert array.data.tolist() == [number] * comm.size
        comm.barrier()


CHECKS = [
    check_large,
    check_in_place,
    check_wide_sums_are_not_staged,
    check_input_is_free_after_the_wait,
    check_block_in_flight_is_not_taken,
    check_many_under_way,
    check_uneven_progress,
    check_given_input_is_waited_for_by_nobody,
    check_own_contributions,
    check_mismatch,
    check_ranks_that_wait_for_each_other,
    check_claims_without_a_release,
    check_sizes_of_a_shared_array,
    check_waiting_in_turns,
    check_long_wait,
    check_failing_at_once,
    check_names,
    check_closing,
    check_closing_ends_a_wait,
    check_absent_rank,
    check_last_calls,
    check_input_of_a_rank_that_gave_up,
    check_failure_in_the_middle,
    check_interrupt,
    check_full,
    check_forked_child,
    check_nothing_stays,
    check_gone_member,
    check_parts,
    check_large_pages_of_an_array,
    check_memory_in_use_comes_to_lie_on_large_pages,
    check_crowded_ranks_spin_nowhere,
    check_a_reduction_reads_each_slice_once,
    check_marks_of_an_array_are_fenced,
    check_barrier_is_a_barrier,
]


def check_all(comm: Comm) -> list[bytes]:
    assert isinstance(comm, SharedMemoryComm)
    for check in CHECKS:
        check(comm)
    return large_values(comm, "elsewhere")


@pytest.mark.parametrize("size", [2, 4])
def test_processes_that_share_memory(size: int) -> None:
    results = run_ranks(check_all, size)
    assert results == run_threads(large_values, size, "elsewhere")
