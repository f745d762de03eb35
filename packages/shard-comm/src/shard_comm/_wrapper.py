"""A comm around another one, which does the work."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from shard_comm._comm import Comm


class Wrapper(Comm):
    """The same ranks as another comm; what a wrapper says nothing of goes there unchanged.

    Args:
        inner: the comm that does the work.
        device: where tensors of the caller live; by default where the inner comm's do.
    """

    def __init__(self, inner: Comm, *, device: torch.device | None = None) -> None:
        place = inner.device if device is None else device
        super().__init__(inner.rank, inner.size, device=place, timeout_s=inner.timeout_s)
        self.inner = inner
        if place == inner.device:  # elsewhere the group does not serve what the caller has
            self.process_group = inner.process_group

    def close(self) -> None:
        """Close the inner comm too. Local."""
        super().close()
        self.inner.close()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the inner comm's memory. Local."""
        return self.inner.empty(numel, dtype)

    def coalesced(self) -> AbstractContextManager[None]:
        """Start the collectives called inside together, where the inner comm can."""
        return self.inner.coalesced()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        self._limit_s("barrier", timeout_s)
        self.inner.barrier(timeout_s=timeout_s)

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object."""
        self._limit_s("all_gather_object", timeout_s)
        return self.inner.all_gather_object(obj, timeout_s=timeout_s)
