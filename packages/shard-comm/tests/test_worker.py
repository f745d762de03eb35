"""A thread that does one thing after another."""

from __future__ import annotations

import gc
import threading
import weakref
from contextvars import ContextVar

import pytest
import torch

from shard_comm._worker import Worker

_seen: ContextVar[int] = ContextVar("seen", default=0)


def test_jobs_are_done_in_order_with_the_callers_context() -> None:
    worker, done = Worker("test"), list[tuple[int, bool]]()
    gate = threading.Event()
    first = worker.give(gate.wait)
    futures = []
    for number in range(1, 4):
        _seen.set(number)
        futures.append(worker.give(lambda: done.append((_seen.get(), torch.is_grad_enabled()))))
    assert done == []
    gate.set()
    assert first.result()
    for future in reversed(futures):
        future.result()
    assert done == [(1, False), (2, False), (3, False)]
    assert worker.stop(10)


def test_an_error_is_the_futures_and_the_next_job_is_done() -> None:
    worker = Worker("test")
    failed = worker.give(lambda: 1 // 0)
    assert worker.give(lambda: 5).result() == 5
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert worker.stop(10)


def test_the_thread_ends_with_its_worker_and_keeps_nothing() -> None:
    worker = Worker("test")
    tensor = torch.ones(1)
    reference = weakref.ref(tensor)
    assert worker.give(tensor.item).result() == 1.0
    worker.give(lambda: None).result()  # the thread has gone on to another job
    thread = worker._thread
    del tensor
    gc.collect()
    assert reference() is None
    assert thread.is_alive()
    del worker
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_busy_thread_is_not_waited_for_longer_than_asked() -> None:
    worker, gate = Worker("test"), threading.Event()
    worker.give(gate.wait)
    assert not worker.stop(0.01)
    gate.set()
    worker._thread.join(10)
    assert not worker._thread.is_alive()
