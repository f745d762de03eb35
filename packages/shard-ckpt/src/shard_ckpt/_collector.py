"""Python's cycle collector, kept out of bursts that make many objects and no garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles within the block, on any thread; nests, also across threads.

    Records of 100,000 tensors would have it walk all objects of the program again and again. Keep
    other ranks out of the block, and files but the small ones of values. Local.
    """
    global _pauses, _was_enabled  # the collector is one per process too
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
