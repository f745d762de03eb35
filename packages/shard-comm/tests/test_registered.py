"""Device memory that communicators register, with a pool and backends that only take notes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shard_comm._registered import RegisteredMemory

CPU = torch.device("cpu")


class FakeBackend:
    """What RegisteredMemory asks of torch's NCCL backend."""

    def __init__(self, *, begun: bool = True, multicast: bool = True, fails: str = "") -> None:
        self.mem_allocator = object()
        self.begun = begun
        self.multicast = multicast
        self.fails = fails
        self.pools: list[Any] = []

    def _is_initialized(self) -> bool:
        return self.begun

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        assert device == CPU
        return self.multicast

    def register_mem_pool(self, pool: Any) -> None:
        if self.fails:
            raise RuntimeError(self.fails)
        self.pools.append(pool)

    def deregister_mem_pool(self, pool: Any) -> None:
        self.pools.remove(pool)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, torch.device]]:
    """The pools that memory was taken from, each the allocator it was made with."""
    found: list[tuple[Any, torch.device]] = []

    @contextmanager
    def use(pool: Any, device: torch.device) -> Iterator[None]:
        found.append((pool, device))
        yield

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool", allocator))
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    return found


def test_one_pool_is_registered_with_all(used: list[Any]) -> None:
    gathers, reductions = FakeBackend(), FakeBackend()
    memory = RegisteredMemory(CPU, [gathers, reductions])
    for _ in range(2):
        assert memory.empty(5, torch.bfloat16).shape == (5,)
    pool = ("pool", gathers.mem_allocator)
    assert used == [(pool, CPU)] * 2
    assert gathers.pools == reductions.pools == [pool]
    assert memory.empty(0, torch.float32).numel() == 0
    memory.close()
    memory.close()
    assert gathers.pools == reductions.pools == []
    memory.empty(5, torch.float32)
    assert len(used) == 2


def test_before_the_first_collective_memory_is_ordinary(
    used: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    backend = FakeBackend(begun=False)
    memory = RegisteredMemory(CPU, [backend])
    with caplog.at_level(logging.INFO, "shard_comm"):
        assert memory.empty(5, torch.float32).shape == (5,)
        assert used == []
        backend.begun = True
        memory.empty(5, torch.float32)
    assert len(used) == 1
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            FakeBackend(multicast=False),
            "the device or its driver has no multicast, which it is for",
        ),
        (FakeBackend(fails="out of handles"), "out of handles"),
        (object(), "object registers no memory"),
    ],
)
def test_the_log_says_once_why_there_is_none(
    backend: Any, reason: str, used: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = FakeBackend()
    memory = RegisteredMemory(CPU, [first, backend])
    with caplog.at_level(logging.INFO, "shard_comm"):
        for _ in range(2):
            assert memory.empty(5, torch.float32).shape == (5,)
    assert used == []
    assert first.pools == []
    assert caplog.messages == [f"memory on cpu is not registered with NCCL: {reason}"]


def test_a_torch_without_pools(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.cuda, "MemPool", raising=False)
    memory = RegisteredMemory(CPU, [FakeBackend()])
    with caplog.at_level(logging.INFO, "shard_comm"):
        memory.empty(1, torch.float32)
    assert caplog.messages == [
        f"memory on cpu is not registered with NCCL: torch {torch.__version__} has no memory pools"
    ]
