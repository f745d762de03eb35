"""Signals as a flag that is looked at between steps."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any

LAUNCHED = "SHARD_LAUNCHED"  # set in the environment of ranks that the command itself started

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopFlag:
    """Remembers the first of SIGINT, SIGTERM and SIGHUP, within a ``with`` block.

    A second SIGINT interrupts at once. A signal that is ignored, as SIGHUP is under nohup, stays
    ignored. In ranks that the command started, the end of the
    process that started them counts as SIGHUP, so that none goes on by itself.
    """

    def __init__(self) -> None:
        self._number = 0
        self._previous: dict[signal.Signals, Any] = {}
        self._parent = os.getppid() if LAUNCHED in os.environ else None

    @property
    def number(self) -> int:
        """The signal's number; 0 as long as there was none."""
        if not self._number and self._parent not in (None, os.getppid()):
            self._number = signal.SIGHUP
        return self._number

    def __enter__(self) -> StopFlag:
        for number in _SIGNALS:
            if not is_ignored(number):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._number == number == signal.SIGINT:
            raise KeyboardInterrupt
        self._number = self._number or number


def is_ignored(number: int) -> bool:
    """Return whether this process was started with a signal ignored.

    Args:
        number: A signal.

    Returns:
        True where nothing shall happen on that signal.

    **Collective**: local.
    """
    return signal.getsignal(number) == signal.SIG_IGN


def was_stopped(status: int) -> bool:
    """Return whether an exit status is that of a run that one of the signals ended.

    Args:
        status: An exit status.

    Returns:
        True for 128 and the number of one of the signals.

    **Collective**: local.
    """
    return status - 128 in _SIGNALS
