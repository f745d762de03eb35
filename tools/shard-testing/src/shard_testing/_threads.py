"""Ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shard_comm import ThreadComm


def run_threads(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    shares_memory: bool = False,
) -> list[Any]:
    """Call ``fn(comm, *args)`` on every rank, each in a thread of its own.

    Args:
        fn: what each rank does; its first argument is the rank's ThreadComm.
        world_size: number of ranks.
        args: further arguments, the same objects for all ranks.
        timeout_s: seconds that any single wait of the group may take.
        shares_memory: give ranks arrays in common, as processes of one host have.

    Returns:
        What each rank returned, in rank order.

    Raises:
        BaseException: what the first failing rank raised; the others are told to give up.
    """
    comms = ThreadComm.group(world_size, timeout_s=timeout_s, shares_memory=shares_memory)
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def run(comm: ThreadComm) -> None:
        try:
            results[comm.rank] = fn(comm, *args)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
            comm.abort(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(comm,), name=f"rank-{comm.rank}", daemon=True)
        for comm in comms
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
