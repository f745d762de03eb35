"""Ranks as processes over Gloo."""

from __future__ import annotations

import faulthandler
import importlib.util
import math
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "shard_comm"]
_EXIT_S = 5.0  # a process whose pipe is closed is about to exit


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    lost: Collection[int] = (),
) -> list[Any]:
    """Call ``fn(comm, *args)`` in ``world_size`` new processes joined by Gloo.

    Processes are forked from a server that has torch loaded and nothing else, so starting one
    takes milliseconds. Each runs one thread.

    Args:
        fn: a function at the top level of its file; its first argument is the rank's comm.
        world_size: number of ranks.
        args: further arguments; they must pickle.
        timeout_s: seconds for everything; then all ranks are killed.
        lost: ranks that die, stop or hang as part of the test. Nobody waits for them: they count
            as having returned None, and are killed in the end. The others must exit by themselves.

    Returns:
        What each rank returned, in rank order; it must pickle.

    Raises:
        RuntimeError: a rank raised (the first one's traceback is in the message) or died.
        TimeoutError: some ranks did not finish in time; where each of them stood is in the message.
        ValueError: ``world_size`` is below 1, or a new process could not find ``fn``.
    """
    if world_size < 1:
        raise ValueError(f"expected world_size >= 1, got {world_size}")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes: dict[Connection, int] = {}
        processes: list[ForkServerProcess] = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                _stack_file(Path(folder), rank).touch()
                job = (_locate(fn), rank, world_size, folder, args, timeout_s, bool(lost))
                process = context.Process(target=_run_rank, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                if rank not in lost:
                    pipes[ours] = rank
                processes.append(process)
            results = _collect(pipes, processes, timeout_s=timeout_s, folder=Path(folder))
            if lost:
                _expect_exits({rank: processes[rank] for rank in pipes.values()})
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(
    pipes: dict[Connection, int],
    processes: Sequence[BaseProcess],
    *,
    timeout_s: float,
    folder: Path,
) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    world_size = len(processes)
    results: list[Any] = [None] * world_size
    waiting = dict(pipes)
    while waiting:
        ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
        if not ready:
            ranks = sorted(waiting.values())
            stacks = [_stack_file(folder, rank).read_text(encoding="utf-8") for rank in ranks]
            raise TimeoutError(
                f"ranks {ranks} of {world_size} did not finish within {timeout_s:g} s\n"
                + "\n".join(stacks)
            )
        failures: list[tuple[float, int, str]] = []
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                ok, at_s, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                ok, at_s, value = False, -math.inf, _cause_of_death(processes[rank])
            if ok:
                results[rank] = value
            else:
                failures.append((at_s, rank, value))
        if failures:  # the first one in time is the cause, others lost their peer
            _, rank, value = min(failures)
            raise RuntimeError(f"rank {rank} of {world_size} failed:\n{value}")
    return results


def _expect_exits(processes: dict[int, BaseProcess]) -> None:
    for rank, process in processes.items():
        process.join(_EXIT_S)
        if process.exitcode != 0:
            raise RuntimeError(
                f"rank {rank} returned, but its process did not end well within {_EXIT_S:g} s "
                f"(exit code {process.exitcode})"
            )


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stack-{rank}"


def _cause_of_death(process: BaseProcess) -> str:
    process.join(_EXIT_S)
    return f"the process died without a traceback (exit code {process.exitcode})"


def _locate(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """Module name, file and qualified name: test files are not importable by name alone."""
    if "<locals>" in fn.__qualname__:
        raise ValueError(f"{fn.__qualname__}: expected a function at the top level of its file")
    file = getattr(sys.modules[fn.__module__], "__file__", None)
    if file is None:
        raise ValueError(f"{fn.__qualname__}: expected a function that is written in a file")
    path = Path(file).resolve()
    # A new process has a main module of its own.
    name = path.stem if fn.__module__ == "__main__" else fn.__module__
    return name, str(path), fn.__qualname__


def _load(where: tuple[str, str, str]) -> Any:
    name, file, qualname = where
    module = sys.modules.get(name)
    if module is None:
        sys.path.insert(0, str(Path(file).parent))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return getattr(module, qualname)


def _run_rank(pipe: Connection, job: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    from shard_comm import comm_for

    where, rank, world_size, folder, args, timeout_s, ranks_are_lost = job
    stack = _stack_file(Path(folder), rank).open("w", encoding="utf-8")
    faulthandler.dump_traceback_later(max(timeout_s - 2, timeout_s / 2), file=stack)
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = _load(where)(comm_for(), *args)
        if not ranks_are_lost:
            dist.barrier()
        dist.destroy_process_group()
        packed = pickle.dumps((True, 0.0, value))
    except BaseException:  # noqa: BLE001 - the parent raises it again
        packed = pickle.dumps((False, time.monotonic(), traceback.format_exc()))
    faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(packed)
