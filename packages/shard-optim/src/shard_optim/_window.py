"""Flat tensors in windows that stay in cache, for updates that take several operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# Elements at a time: what a CPU keeps in its cache, more where a launch costs more.
_WINDOW = {"cpu": 1 << 17}
_WINDOW_ELSEWHERE = 1 << 24


def window_numel(device: torch.device) -> int:
    """Return how many elements are worked on at a time. Local."""
    return _WINDOW.get(device.type, _WINDOW_ELSEWHERE)


def windows(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut contiguous tensors of equal lengths into windows, all at the same places.

    Yields:
        The tensors' views of one window, each ``[n]``.

    **Collective**: local.
    """
    flats = [tensor.view(-1) for tensor in tensors]
    total, size = flats[0].numel(), window_numel(flats[0].device)
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield [flat[start:stop] for flat in flats]


class Scratch:
    """Memory for what is computed in a window, which the next one uses again.

    Fresh memory for each operation would come from the system and be cleared every time.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def take(self, name: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a name in the shape and place of a window's tensor. Local."""
        key = name, dtype, like.device
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < like.numel():
            buffer = torch.empty(like.numel(), dtype=dtype, device=like.device)
            self._buffers[key] = buffer
        return buffer[: like.numel()].view(like.shape)

    def wide(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of float32 or float64 itself, and others as float32 in here. Local."""
        if tensor.dtype.itemsize >= 4:
            return tensor
        return self.take(name, tensor, torch.float32).copy_(tensor)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of float32 or float64 itself, and a copy in float32 of others. Local."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float32, or float64 where it is that. Local."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.to(wide, copy=True)
