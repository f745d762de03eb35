"""A rank is killed, stopped or stays away at each kind of collective."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from shard_comm import SharedArray, SharedMemoryComm, Work

SIZE = 3
VICTIM = 1
LIMIT_S = 0.3
NOTICED_S = 1.0
DEADLINE_S = 60.0
ALWAYS_S = 1000.0


class Stage:
    """One comm of the ranks, with what a call needs made beforehand."""

    def __init__(self, comm: SharedMemoryComm) -> None:
        array = comm.shared(2 * SIZE, torch.float32, name="blocks.3")
        assert array is not None
        self.comm = comm
        self.array: SharedArray = array
        self.wide = torch.ones(2 * SIZE)
        self.shared = comm.empty(2 * SIZE, torch.float32).fill_(1)
        self.narrow = comm.empty(2, torch.float32).fill_(1)


Call = Callable[[Stage, float], object]
CALLS: dict[str, tuple[Call, str]] = {
    "barrier": (lambda s, t: s.comm.barrier(timeout_s=t), "barrier()"),
    "all_gather": (
        lambda s, t: s.comm.all_gather(s.wide, s.narrow, timeout_s=t),
        "all_gather of 2 float32",
    ),
    "reduce_scatter": (
        lambda s, t: s.comm.reduce_scatter(s.narrow, s.wide, timeout_s=t),
        "reduce_scatter sum of 6 float32",
    ),
    "all_reduce": (
        lambda s, t: s.comm.all_reduce(s.wide, op="max", timeout_s=t),
        "all_reduce max of 6 float32",
    ),
    "broadcast": (
        lambda s, t: s.comm.broadcast(s.wide, src=VICTIM, timeout_s=t),
        "broadcast from 1 of 6 float32",
    ),
    "all_to_all": (
        lambda s, t: s.comm.all_to_all(torch.empty(6), s.wide, timeout_s=t),
        "all_to_all of 6 float32",
    ),
    "all_gather_object": (
        lambda s, t: s.comm.all_gather_object("x", timeout_s=t),
        "all_gather_object()",
    ),
    "publish": (
        lambda s, t: s.array.publish(timeout_s=t).wait(),
        "publish of the shared array blocks.3 [6]",
    ),
    "claim": (
        lambda s, t: s.array.claim(timeout_s=t),
        "claim of the shared array blocks.3 [6]",
    ),
}


LAUNCHED: dict[str, tuple[Call, str]] = {
    "all_gather": (
        lambda s, t: s.comm.all_gather(s.wide, s.narrow, async_op=True, timeout_s=t),
        "all_gather of 2 float32",
    ),
    "reduce_scatter": (
        lambda s, t: s.comm.reduce_scatter(torch.empty(2), s.shared, async_op=True, timeout_s=t),
        "reduce_scatter sum of 6 float32",
    ),
    "all_reduce": (
        lambda s, t: s.comm.all_reduce(torch.ones(100_000), async_op=True, timeout_s=t),
        "all_reduce sum of 100000 float32",
    ),
    "all_to_all": (
        lambda s, t: s.comm.all_to_all(torch.empty(6), s.shared, async_op=True, timeout_s=t),
        "all_to_all of 6 float32",
    ),
}
"""Launched by the victim as well: what the others miss is its reading, or its part of the sum."""


def meet(rank: int, folder: str) -> SharedMemoryComm:
    """Join ranks by a file store alone: quicker than a process group."""
    store = next(iter(rendezvous(f"file://{folder}/store", rank, SIZE)))[0]
    store.set_timeout(timedelta(seconds=DEADLINE_S))
    count = 0

    def exchange(obj: Any) -> list[Any]:
        nonlocal count
        count += 1
        store.set(f"{count}/{rank}", pickle.dumps(obj).hex())
        everyone = [store.get(f"{count}/{other}").decode() for other in range(SIZE)]
        return [pickle.loads(bytes.fromhex(theirs)) for theirs in everyone]

    return SharedMemoryComm._of(exchange, rank, SIZE, timeout_s=ALWAYS_S)


def prepare(comm: SharedMemoryComm) -> dict[str, Stage]:
    """A stage for each call, since no comm survives its first error."""
    stages = {}
    for name in {**CALLS, **LAUNCHED}:
        part = comm.split(0)
        assert isinstance(part, SharedMemoryComm)
        stages[name] = Stage(part)
        stages[name].array.publish().wait()
        if comm.rank != VICTIM:
            stages[name].array.release()
    comm.barrier()
    return stages


def survive(rank: int, folder: str, end: str, pipe: Connection) -> None:
    """Be one of the ranks; tell what each call said, and after how long."""
    torch.set_num_threads(1)
    comm = meet(rank, folder)
    stages = prepare(comm)
    if rank == VICTIM:
        perish(end, stages, pipe)
    limit_s = ALWAYS_S if end.startswith("kill") else LIMIT_S
    said = {}
    for name, (call, _) in calls_of(end).items():
        stage = stages[name]
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            wait_for(call(stage, limit_s))
        took_s = time.monotonic() - began
        with pytest.raises(RuntimeError) as again:
            stage.comm.barrier()
        assert str(again.value) == str(caught.value)
        said[name] = (str(caught.value), took_s)
    about = os.fstat(comm._engine.file.fd)
    pipe.send(((about.st_dev, about.st_ino), said))


def calls_of(end: str) -> dict[str, tuple[Call, str]]:
    return LAUNCHED if end == "kill, launched" else CALLS


def wait_for(work: object) -> None:
    if isinstance(work, Work):
        work.wait()


def perish(end: str, stages: dict[str, Stage], pipe: Connection) -> None:
    """End as asked."""
    if end == "kill, launched":
        for name, (call, _) in LAUNCHED.items():
            call(stages[name], ALWAYS_S)
    if end == "kill, with a child":
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        pipe.send(child)
    if end.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()


class Ranks:
    """Processes of one test, and a pipe from each."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self, end: str) -> None:
        """Start all."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "shard_comm", "pytest"])
        for rank in range(SIZE):
            ours, theirs = context.Pipe(duplex=False)
            job = (rank, self._folder, end, theirs)
            process = context.Process(target=survive, args=job, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def hear(self, rank: int) -> Any:
        """Return what a rank says next."""
        assert self._pipes[rank].poll(DEADLINE_S), f"rank {rank} says nothing"
        return self._pipes[rank].recv()

    def finish(self) -> None:
        """Let the survivors end by themselves, and kill what is left."""
        for rank, process in enumerate(self._processes):
            process.join(0 if rank == VICTIM else DEADLINE_S)
            process.kill()
            process.join()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    found = Ranks(tmp_path)
    yield found
    found.finish()


def holders(device: int, inode: int) -> list[str]:
    """Return the processes that map or have open the memory file of these numbers."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "maps").read_text(encoding="utf-8").splitlines()
            opened = {os.stat(fd) for fd in (folder / "fd").iterdir()}
        except OSError:
            continue  # it has ended meanwhile
        mapped = any(f" {inode} /memfd:shard-comm" in " ".join(line.split()) for line in lines)
        if mapped or any((it.st_dev, it.st_ino) == (device, inode) for it in opened):
            found.append(folder.name)
    return found


@pytest.mark.parametrize("end", ["kill", "kill, launched", "kill, with a child", "stop", "hang"])
def test_the_others_hear_of_it(end: str, ranks: Ranks) -> None:
    """Within the deadline, by name; nothing is left, not even through a forked helper."""
    ranks.start(end)
    child = ranks.hear(VICTIM) if end == "kill, with a child" else None
    reports = [ranks.hear(rank) for rank in (0, 2)]
    numbers = reports[0][0]
    reason, longest_s = (
        (r": rank 1 \(process \d+\) is gone: it died, exited or let go of the comm;", NOTICED_S)
        if end.startswith("kill")
        else (r" waited 0.3 s for ranks \[(0, )?1(, 2)?\];", LIMIT_S + NOTICED_S)
    )
    for _, said in reports:
        for name, (_, text) in calls_of(end).items():
            message = said[name][0]
            assert re.match(re.escape(text) + " on rank [02] of 3" + reason, message), message
        # Most calls: a loaded machine may hold a single one up.
        assert statistics.median(took_s for _, took_s in said.values()) < longest_s
    try:
        ranks.finish()
        assert holders(*numbers) == []
    finally:
        if child is not None:
            os.kill(child, signal.SIGKILL)
