"""The gathered array of one group, whose storage comes and goes under its views."""

from __future__ import annotations

import torch

from shard_flat._layout import FlatLayout


class FullBuffer:
    """One group's array of ``layout.numel`` elements, made once and refilled many times.

    Autograd saves views of full parameters, so the tensors must outlive the data: ``release``
    frees the storage behind them and ``allocate`` gives it back, neither touches a version
    counter. The views are detached from the array's own counter, so refilling the array does
    not look like an in-place change of a parameter.

    Args:
        layout: where each parameter lies.
        data: ``[layout.numel]``, contiguous, with a resizable storage of its own.

    Raises:
        ValueError: ``data`` has another shape, or its storage holds more than ``data``.

    **Memory**: ``layout.numel`` elements between ``allocate`` and ``release``, else none.
    """

    def __init__(self, layout: FlatLayout, data: torch.Tensor) -> None:
        if data.shape != (layout.numel,):
            raise ValueError(f"expected data of shape ({layout.numel},), got {tuple(data.shape)}")
        nbytes = data.untyped_storage().nbytes()
        if nbytes != data.nbytes or not data.is_contiguous():
            raise ValueError(
                f"expected contiguous data with a storage of its own, got {data.nbytes} bytes of a "
                f"storage of {nbytes}; releasing it would free what lies beside it"
            )
        self.layout = layout
        self.data = data
        self._storage = data.untyped_storage()
        self._nbytes = nbytes

    @property
    def allocated(self) -> bool:
        """Whether the storage is there."""
        return self._nbytes == 0 or self._storage.size() != 0

    def allocate(self) -> None:
        """Give the storage back, uninitialised; nothing happens where it is there. Local."""
        if not self.allocated:
            self._storage.resize_(self._nbytes)

    def release(self) -> None:
        """Free the storage; tensors and views stay and must not be read until refilled. Local."""
        if self._storage.size() != 0:
            self._storage.resize_(0)

    def slice_of(self, rank: int) -> torch.Tensor:
        """Return the view ``[shard_numel]`` that ``rank`` owns. Local."""
        numel = self.layout.shard_numel
        return self.data[rank * numel : (rank + 1) * numel]

    def views(self) -> list[torch.Tensor]:
        """Return one view per parameter, in its global shape, in the order of the specs. Local."""
        return self.layout.views(self.data)
