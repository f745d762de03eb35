"""Work on a thread of its own, so that input, output and checksums overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from shard_ckpt._agree import Outcome, attempt

T = TypeVar("T")


class Behind(Generic[T]):
    """Work that goes on while the caller does. Join it, or take its result, before leaving.

    A plain thread and no pool: pools refuse work once the interpreter is about to exit, which is
    when the last save of a program may still be written.

    Args:
        work: called once, on a thread of its own.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._outcome: Outcome[T] | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="shard-ckpt-io")
        self._thread.start()

    def join(self) -> None:
        """Return when the work has ended, well or not. Local."""
        self._thread.join()

    def result(self) -> T:
        """Return what the work came to; raise its error. Local."""
        self._thread.join()
        if self._outcome is None:
            raise AssertionError("the work ended without an outcome")
        return self._outcome.value()

    def _run(self, work: Callable[[], T]) -> None:
        self._outcome = attempt(work)
