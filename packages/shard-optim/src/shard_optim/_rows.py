"""Rows of a matrix of which a rank holds a run of elements, perhaps from the middle of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shard_optim._window import Scratch, window_numel


@dataclass(frozen=True)
class Rows:
    """Which rows of a tensor ``[..., R, C]`` the elements ``[start, stop)`` touch.

    A 2x3 matrix of which a rank holds the elements ``[2, 4)``::

        . . 2
        3 . .

    has two rows here, each with one element and two that are elsewhere.

    Attributes:
        shape: global shape, two dimensions or more; the first ones count matrices.
        start: first element held here.
        stop: one past the last.
    """

    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def matrices(self) -> int:
        """Number of matrices."""
        return math.prod(self.shape[:-2])

    def windows(self, device: torch.device) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are worked on at a time. Local."""
        if self.stop > self.start:
            first, end = self.start // self.columns, -(-self.stop // self.columns)
            size = max(window_numel(device) // self.columns, 1)
            for row in range(first, end, size):
                yield row, min(row + size, end)

    def take(self, flat: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return rows ``[first, last)`` as ``[rows, C]``, zero where they are elsewhere. Local."""
        low, high, begin = self._range(first, last)
        held = flat[low - self.start : high - self.start]
        if held.numel() == (last - first) * self.columns:
            return held.view(last - first, self.columns)
        rows = torch.zeros((last - first) * self.columns, dtype=flat.dtype, device=flat.device)
        rows[low - begin : high - begin].copy_(held)
        return rows.view(last - first, self.columns)

    def put(self, flat: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        """Write rows from ``first`` on where they are held here. Local."""
        low, high, begin = self._range(first, first + len(rows))
        flat[low - self.start : high - self.start].copy_(rows.view(-1)[low - begin : high - begin])

    def matrix_of(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Return which matrix each of the rows ``[first, last)`` belongs to. Local."""
        return torch.arange(first, last, device=device) // self.shape[-2]

    def square_sums(self, flat: torch.Tensor, room: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Add up the squares of what is held here, by row and by column.

        Args:
            flat: ``[stop - start]``.
            room: for windows.

        Returns:
            float64 ``[matrices * R]`` and ``[matrices, C]``.

        **Collective**: local. **Memory**: a few windows, for the call.
        """
        device = flat.device
        by_row = torch.zeros(math.prod(self.shape[:-1]), dtype=torch.float64, device=device)
        by_column = torch.zeros(self.matrices, self.columns, dtype=torch.float64, device=device)
        for first, last in self.windows(device):
            rows = self.take(flat, first, last)
            squares = room.take("squares", rows, torch.float64).copy_(rows)
            squares.mul_(squares)
            torch.sum(squares, 1, out=by_row[first:last])
            if self.matrices == 1:
                by_column[0] += squares.sum(0)
            else:
                by_column.index_add_(0, self.matrix_of(first, last, device), squares)
        return by_row, by_column

    def _range(self, first: int, last: int) -> tuple[int, int, int]:
        begin = first * self.columns
        return max(begin, self.start), min(last * self.columns, self.stop), begin


def pack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Lay float64 tensors end to end. Local."""
    return torch.cat([part.reshape(-1) for part in parts])


def unpack(flat: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of ``flat`` in the shapes of those that were packed. Local."""
    sizes = [part.numel() for part in parts]
    cut = flat.split(sizes)
    return [piece.view(part.shape) for piece, part in zip(cut, parts, strict=True)]
