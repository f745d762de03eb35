"""Kronecker factors of a matrix that is cut into blocks, and their inverse roots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from shard_optim._eigen import eigen
from shard_optim._slots import OwnedSlot


@dataclass(frozen=True)
class Block:
    """A part of a matrix that has factors of its own.

    Attributes:
        rows: which rows it has.
        columns: which columns.
        place: how many blocks are above it, and how many to its left.
    """

    rows: slice
    columns: slice
    place: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Its numbers of rows and columns."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the block's view of a matrix. Local."""
        return matrix[self.rows, self.columns]

    def left(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the view of its factor ``[rows, rows]`` among those of all blocks. Local."""
        return factors[self.place[1], self.rows, : self.shape[0]]

    def right(self, factors: torch.Tensor) -> torch.Tensor:
        """Return the view of its factor ``[columns, columns]`` among all. Local."""
        return factors[self.place[0], self.columns, : self.shape[1]]


@dataclass(frozen=True)
class FactorSlot(OwnedSlot):
    """Factors of all blocks on one side, those of blocks that share rows (or columns) in order.

    A matrix of 5x4 in blocks of at most 3 has blocks of 3 and 2 rows and of 2 and 2 columns. The
    left factors are ``[2, 5, 3]``: for each of two columns of blocks, three rows of a factor 3x3
    and two of a factor 2x2, which leaves the last place empty. The right ones are ``[2, 4, 2]``.

    Attributes:
        side: 0 for the left ones, 1 for the right ones.
        most: rows or columns of a block at most.
    """

    side: int = 0
    most: int = 1

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape. Local."""
        size, other = param.shape[self.side], param.shape[1 - self.side]
        return (len(split_evenly(other, self.most)), size, max(split_evenly(size, self.most)))


def split_evenly(size: int, most: int) -> list[int]:
    """Return lengths of at most ``most`` that differ by one at most: 10 by 4 are 4, 3, 3. Local."""
    count = max(-(-size // most), 1)
    return [size // count + (index < size % count) for index in range(count)]


def blocks_of(shape: Sequence[int], most: int) -> Iterator[Block]:
    """Cut a matrix into blocks of at most ``most`` rows and columns. Local."""
    rows, columns = (_slices(split_evenly(size, most)) for size in shape)
    for above, row in enumerate(rows):
        for before, column in enumerate(columns):
            yield Block(row, column, (above, before))


def _slices(lengths: Sequence[int]) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(lengths, initial=0))]


def inverse_root(matrix: torch.Tensor, *, root: int, ridge: float) -> torch.Tensor:
    """Return ``matrix ** (-1 / root)``.

    Worked example: the fourth root of ``diag(16, 81)``, inverted, is ``diag(1/2, 1/3)``.

    Args:
        matrix: ``[n, n]``, symmetric, no eigenvalue below 0 but for rounding.
        root: which one.
        ridge: this much of the largest eigenvalue is added to all, so that directions without
            gradients do not become infinite.

    Returns:
        ``[n, n]``; the identity for zeros, which tell nothing.

    **Collective**: local.
    """
    values, vectors = eigen(matrix)
    values = values.clamp_min(0)
    values = values + ridge * values[-1:]
    tiny = torch.finfo(values.dtype).tiny
    powers = torch.where(values[-1:] > 0, values.clamp_min(tiny).pow(-1 / root), 1.0)
    return (vectors * powers) @ vectors.t()
