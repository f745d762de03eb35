"""Runs: tensors that lie side by side in memory and can be treated as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from shard_flat import ShardTensor


def piece_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a sharded tensor, or a plain tensor itself. Local."""
    return tensor.piece if isinstance(tensor, ShardTensor) else tensor


def flat_piece(tensor: torch.Tensor) -> torch.Tensor:
    """Return the piece, or a plain tensor that is dense in memory, detached. Local.

    What is not contiguous comes back as one dimension in the order of memory.
    """
    piece = piece_of(tensor).detach()
    return piece if piece.is_contiguous() else in_memory_order(piece)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view ``[numel]`` of a dense tensor, in the order of memory. Local."""
    return tensor.as_strided((tensor.numel(),), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each its own place. Local."""
    if tensor.is_contiguous():
        return True
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def find_runs(columns: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Group rows whose tensors follow each other in memory in every column.

    Worked example, two columns, ``p`` cut from one buffer and ``g`` from two::

        p  buffer[0:3) buffer[3:5) buffer[5:9)
        g  other[0:3)  other[3:5)  elsewhere[0:4)

    Rows 0 and 1 are one run, row 2 is another.

    Args:
        columns: per column one tensor per row; the tensors of a row have the same number of
            elements. Rows without elements belong to no run.

    Returns:
        Row indices, each list in the order of memory.

    **Collective**: local.
    """
    spots = [[_Spot.of(tensor) for tensor in column] for column in columns]
    first = spots[0]
    rows = sorted(
        (i for i, s in enumerate(first) if s.stop > s.start), key=lambda i: first[i].start
    )
    runs: list[list[int]] = []
    for i in rows:
        if runs and all(_follows(column[runs[-1][-1]], column[i]) for column in spots):
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one view over the tensors of one run, ``[sum of numel]``; a single one as it is."""
    head = tensors[0]
    if len(tensors) == 1:
        return head
    return head.as_strided((sum(t.numel() for t in tensors),), (1,))


class _Spot(NamedTuple):
    """Where a tensor lies, in bytes; ``dtype`` is None where it has holes."""

    start: int
    stop: int
    storage: int
    dtype: torch.dtype | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Spot:
        start = tensor.data_ptr()
        storage = tensor.untyped_storage().data_ptr()
        dtype = tensor.dtype if tensor.is_contiguous() else None
        return cls(start, start + tensor.nbytes, storage, dtype)


def _follows(a: _Spot, b: _Spot) -> bool:
    return (
        a.stop == b.start and a.storage == b.storage and a.dtype is b.dtype and a.dtype is not None
    )
