"""How far long work has got, for whoever asked to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock

Listener = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_listener: ContextVar[Listener | None] = ContextVar("shard_ckpt_progress", default=None)


@contextmanager
def told_to(listener: Listener | None) -> Iterator[None]:
    """Have work inside of the block tell ``listener`` how far it is. Local."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Progress:
    """One piece of long work, begun by the thread that makes this object; any may advance it.

    Args:
        total_bytes: how much there is to do.
    """

    def __init__(self, total_bytes: int) -> None:
        self._listener = _listener.get()
        self._total = total_bytes
        self._done = 0
        self._lock = Lock()
        self.advance(0)

    def advance(self, nbytes: int) -> None:
        """Say that ``nbytes`` more are done. Local."""
        with self._lock:
            self._done += nbytes
            if self._listener is not None:
                self._listener(self._done, self._total)
