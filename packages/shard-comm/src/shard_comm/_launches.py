"""Collectives of one process group that are started together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Start = Callable[[], Any]
"""Starts a collective; returns torch's work for it."""


class Launched:
    """A collective that is started, now or with others.

    Attributes:
        work: torch's work; None until it is started.
    """

    work: Any = None

    def __init__(self, start: Start) -> None:
        self._start = start

    def start(self) -> None:
        """Start it by itself. Collective."""
        self.work = self._start()


class Launches:
    """Collectives that have been called and not started.

    Nothing of the caller's runs between their starts: whatever other group a collective is started
    on meanwhile would be taken into the launch as well.

    Args:
        group: a process group whose backend for ``device`` starts several in one launch.
        device: where the tensors live.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._called: list[Launched] = []

    def add(self, launched: Launched) -> None:
        """Keep a collective for the launch. Local."""
        self._called.append(launched)

    def start(self) -> None:
        """Start all in one launch; their works are one. Collective."""
        called, self._called = self._called, []
        if len(called) < 2:
            for launched in called:
                launched.start()
            return
        self._group._start_coalescing(self._device)
        try:
            for launched in called:
                launched.start()
        finally:
            work = self._group._end_coalescing(self._device)
            for launched in called:
                launched.work = work
