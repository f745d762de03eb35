"""An element range as boxes: what torch.distributed.checkpoint can describe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A block of a tensor whose elements lie in one run when the tensor is flattened.

    Attributes:
        offsets: first index along each dimension.
        sizes: length along each dimension.
        start: first element of the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past the last element of the flattened tensor."""
        return self.start + math.prod(self.sizes)


def boxes_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``[start, stop)`` of a flattened tensor into the fewest boxes, in order.

    At most ``2 * len(shape) - 1`` of them: the rest of a row, whole rows, the beginning of a row.
    The elements ``[3, 11)`` of a 3x5 tensor::

        . . . 3 4       [0:1, 3:5]
        5 6 7 8 9       [1:2, 0:5]
        10 . . . .      [2:3, 0:1]

    Args:
        shape: shape of the whole tensor.
        start: first element.
        stop: one past the last; nothing comes out where it is ``start``.

    **Collective**: local.
    """
    if start >= stop:
        return
    if len(shape) == 0:
        yield Box((), (), start)
        return
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        yield from _in_row(shape, first, start, stop)
        return
    head = first if start % row == 0 else first + 1
    tail = stop // row
    if first < head:
        yield from _in_row(shape, first, start, head * row)
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        yield Box((head, *zeros), (tail - head, *shape[1:]), head * row)
    if tail * row < stop:
        yield from _in_row(shape, tail, tail * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    base = index * math.prod(shape[1:])
    for box in boxes_of(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), base + box.start)
