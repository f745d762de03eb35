"""A thread that does one thing after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_Job = tuple[Future[Any], Context, Callable[[], Any]]
_Queue = SimpleQueue[_Job | None]


class Worker:
    """Does what it is given in the order in which it is given, in a thread of its own.

    The thread ends with this object, or with the process, whichever is first.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._jobs: _Queue = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def give(self, job: Callable[[], T]) -> Future[T]:
        """Return the future of a job, which sees the context variables of the caller. Local."""
        future: Future[T] = Future()
        self._jobs.put((future, copy_context(), job))
        return future

    def stop(self, wait_s: float) -> bool:
        """End the thread after what it was given; return whether it has ended in time. Local."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(wait_s)
        return not self._thread.is_alive()


def _work(jobs: _Queue) -> None:
    with torch.no_grad():
        while _work_once(jobs):
            pass


def _work_once(jobs: _Queue) -> bool:
    """Do one job, and keep nothing of it; return whether there was one."""
    item = jobs.get()
    if item is None:
        return False
    future, context, job = item
    try:
        future.set_result(context.run(job))
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future raises it
        future.set_exception(error)
    return True
