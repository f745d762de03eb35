"""State of the whole process, changed for a while and put back."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def borrowed_environ() -> Iterator[None]:
    """Let a block change the environment, and undo it afterwards.

    Yields:
        Nothing.

    **Collective**: local.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def borrowed_handlers(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Let a block change the handlers of signals, and undo it afterwards.

    Args:
        numbers: The signals.

    Yields:
        Nothing.

    **Collective**: local; in the main thread.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def silenced(name: str) -> Iterator[None]:
    """Keep what a logger and those below it say from being printed.

    Args:
        name: Name of the logger.

    Yields:
        Nothing.

    **Collective**: local.
    """
    logger, handler = logging.getLogger(name), logging.NullHandler()
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
