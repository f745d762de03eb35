"""The last calls of a rank, for the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from shard_comm._call_entry import CallEntry

KEPT = 64

logger = logging.getLogger("shard_comm")

_is_kept_outside: ContextVar[bool] = ContextVar("shard_comm_is_kept_outside", default=False)


class History:
    """What one rank called last, the oldest first. Local."""

    def __init__(self) -> None:
        self._kept: deque[CallEntry] = deque(maxlen=KEPT)

    @property
    def entries(self) -> list[CallEntry]:
        """The last 64 calls; those under way with the time that they have taken so far."""
        for entry in self._kept:
            if entry.state in ("checking", "running"):
                entry.turn(entry.state)
        return list(self._kept)

    def enter(self, number: int, op: str, tensor: torch.Tensor | None) -> CallEntry:
        """Keep a call that begins, with the name that was noted."""
        entry = CallEntry.of(number, op, tensor)
        self._kept.append(entry)
        return entry


def log_calls(calls: Iterable[object], rank: int, size: int) -> None:
    """Log the calls of a rank, unless a wrapper around does. Local."""
    if not _is_kept_outside.get():
        lines = "\n".join(f"  {call}" for call in calls)
        logger.error("the last calls of rank %d of %d:\n%s", rank, size, lines)


@contextmanager
def kept_outside() -> Iterator[None]:
    """Let nothing inside log its calls. Local."""
    token = _is_kept_outside.set(True)
    try:
        yield
    finally:
        _is_kept_outside.reset(token)
