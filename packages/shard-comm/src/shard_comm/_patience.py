"""Waiting for memory to change, on idle and on crowded machines."""

from __future__ import annotations

import os
import time

SPINS = 200
"""Rounds of a wait that only look at memory, where every rank has a processor."""

_YIELD_S = 1e-3
_LONGEST_SLEEP_S = 1e-3
_SLEEP_SHARE = 1 / 8  # of the time waited so far, so that oversleeping stays in proportion


class Patience:
    """Pauses of one wait: none at first, then the processor is offered, then given up for longer.

    Whoever waits for a rank that is at work gets by with the first two; whoever waits for one
    that has no processor must leave it his own.

    Args:
        crowded: there are more ranks than processors, so that spinning holds somebody up.
    """

    def __init__(self, *, crowded: bool) -> None:
        self._spins = 0 if crowded else SPINS
        self._count = 0
        self._began = 0.0

    @property
    def spinning(self) -> bool:
        """Whether the wait is so young that nothing else should be looked at."""
        return self._count < self._spins

    @property
    def waited_s(self) -> float:
        """Seconds since the spinning ended."""
        return time.monotonic() - self._began if self._began else 0.0

    def pause(self) -> None:
        """Let some time pass."""
        self._count += 1
        if self._count <= self._spins:
            return
        now = time.monotonic()
        if not self._began:
            self._began = now
        if now - self._began < _YIELD_S:
            os.sched_yield()
            return
        time.sleep(min((now - self._began) * _SLEEP_SHARE, _LONGEST_SLEEP_S))
