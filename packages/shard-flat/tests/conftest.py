"""Ranks for these tests: threads that meet at a barrier. Other packages have real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch


class RankComm:
    """One rank's way to the others. Notes what it was asked for in ``calls``."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank = rank
        self.size = size
        self.calls: list[str] = []
        self._barrier = barrier
        self._slots = slots

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        self.calls.append(f"all_gather of {inp.numel()}")
        out.copy_(torch.cat(self._exchange(inp)))

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
        self.calls.append(f"{op} of {tensor.numel()}")
        everyone = torch.stack(self._exchange(tensor))
        if op == "sum":
            tensor.copy_(everyone.sum(0))
        else:
            tensor.copy_(everyone.amax(0) if op == "max" else everyone.amin(0))

    def _exchange(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = mine.clone()
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone

    def abort(self) -> None:
        self._barrier.abort()


class SilentComm:
    """A rank whose operations must not talk."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        raise AssertionError("a local operation gathered")

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
        raise AssertionError("a local operation reduced")


def run(size: int, fn: Callable[[Any], Any]) -> list[Any]:
    """Call ``fn(comm)`` in one thread per rank; raise what the first failing rank raised."""
    barrier = threading.Barrier(size, timeout=30)
    slots: list[Any] = [None] * size
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        comm = RankComm(rank, size, barrier, slots)
        try:
            results[rank] = fn(comm)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)
            comm.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results


@pytest.fixture
def on_ranks() -> Callable[[int, Callable[[Any], Any]], list[Any]]:
    """``on_ranks(size, fn)`` returns what ``fn(comm)`` returned on each rank."""
    return run


@pytest.fixture
def silent() -> Callable[[int, int], Any]:
    """``silent(rank, size)`` makes a comm that fails when it is used."""
    return SilentComm
