"""Tensors that autograd may have saved, and whose memory comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class ReadGuard:
    """Has autograd refuse to read saved tensors while their memory is gone.

    Autograd compares the version of a saved tensor with the one that it had, before any kernel
    reads it. While the guard is closed the tensors have another version, so a backward that comes
    to them in a way that nobody watches raises and reads no freed memory.

    Args:
        tensors: no two of them share a version counter; a list may grow while the guard is open.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._versions: tuple[int, ...] | None = None

    def close(self) -> None:
        """Refuse. Local."""
        if self._versions is None:
            self._versions = tuple(tensor._version for tensor in self._tensors)
            self._set(tuple(version + 1 for version in self._versions))

    def open(self) -> None:
        """Allow, as before. Local."""
        if self._versions is not None:
            self._set(self._versions)
            self._versions = None

    def _set(self, versions: tuple[int, ...]) -> None:
        torch._C._autograd._unsafe_set_version_counter(tuple(self._tensors), versions)
