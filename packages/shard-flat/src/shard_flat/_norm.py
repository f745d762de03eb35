"""Sums of powers, in double precision and little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

# Numbers widened at a time: as many as stay in a CPU's cache, more where a launch costs more.
_CHUNK = {"cpu": 1 << 17}
_CHUNK_ELSEWHERE = 1 << 24
_SMALL_BYTES = 1 << 17  # for a single tensor like that a chunk costs more than it saves


def power_sum(tensors: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    """Sum ``|x| ** order`` over all elements; for ``inf`` the largest ``|x|``.

    Squares of float32 numbers are exact in float64 and are added pairwise, so the relative error
    is a few 1e-16 however many there are.

    Args:
        tensors: on one device; any shapes and floating dtypes.
        order: above 0.

    Returns:
        A float64 scalar. NaN and inf come through.

    **Collective**: local. **Memory**: 1 MiB on a CPU, 128 MiB elsewhere, or what the elements
    take as float64 if that is less.
    """
    if math.isinf(order):
        return _largest(tensors)
    device = tensors[0].device
    if len(tensors) == 1 and tensors[0].nbytes <= _SMALL_BYTES:
        return _powers(tensors[0].to(torch.float64, copy=True), order).sum()
    chunk = _CHUNK.get(device.type, _CHUNK_ELSEWHERE)
    size = min(chunk, sum(t.numel() for t in tensors))
    buffer = torch.empty(size, dtype=torch.float64, device=device)
    sums = []
    for batch in _batches(tensors, chunk):
        sizes = [part.numel() for part in batch]
        wide = buffer[: sum(sizes)]
        torch._foreach_copy_(wide.split(sizes), batch)
        sums.append(_powers(wide, order).sum())
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)


def _powers(wide: torch.Tensor, order: float) -> torch.Tensor:
    if order == 2:
        return wide.mul_(wide)
    wide.abs_()
    return wide if order == 1 else wide.pow_(order)


def _largest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    tops = [torch.zeros((), dtype=torch.float64, device=tensors[0].device)]
    for tensor in tensors:
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            tops.append(torch.maximum(-low, high).double())
    return torch.stack(tops).amax()


def _batches(tensors: Sequence[torch.Tensor], chunk: int) -> Iterator[list[torch.Tensor]]:
    """Flat parts of at most ``chunk`` elements, as many at a time as make up one chunk."""
    batch: list[torch.Tensor] = []
    room = chunk
    for tensor in tensors:
        if not tensor.numel():
            continue
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        for part in flat.split(chunk) if flat.numel() > chunk else (flat,):
            if part.numel() > room:
                yield batch
                batch, room = [], chunk
            batch.append(part)
            room -= part.numel()
    if batch:
        yield batch
