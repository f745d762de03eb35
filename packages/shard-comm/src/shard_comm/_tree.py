"""The one order in which contributions are added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

_CACHED = 1 << 18
"""Elements that are added at a time on the CPU, partial sums and all, so that they stay cached."""


def tree_sum(terms: Sequence[torch.Tensor], *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Add tensors pairwise in a fixed binary tree, so that the bits depend on the data alone.

    Neighbours are added first, then neighbours of the sums; an odd one out moves up unchanged.
    Five terms give ``((a + b) + (c + d)) + e``.

    Args:
        terms: at least one tensor, all of one shape and dtype; none is changed.
        out: where the sum goes; it may be one of the terms. A new tensor if not given.

    Returns:
        The sum, in the dtype of the terms.

    **Collective**: local. **Memory**: about ``len(terms) / 2`` tensors for the call.
    """
    if not terms:
        raise ValueError("tree_sum: expected at least one term, got none")
    level = list(terms)
    while len(level) > 2:
        paired = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    if len(level) == 2:
        return torch.add(level[0], level[1], out=out)
    return level[0].clone() if out is None else out.copy_(level[0])


def reduce_terms(terms: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce tensors into ``out``, sums in the tree above. Local.

    Args:
        terms: at least one tensor, all of one shape and dtype.
        op: ``"sum"``, ``"max"`` or ``"min"``.
        out: where the result goes; for a maximum or minimum none of the terms but the first.
    """
    if op == "sum":
        tree_sum(terms, out=out)
        return
    combine = torch.maximum if op == "max" else torch.minimum
    out.copy_(terms[0])
    for term in terms[1:]:
        combine(out, term, out=out)


def tree_sum_rows(rows: torch.Tensor) -> torch.Tensor:
    """Add the rows ``[n, numel]`` in the same tree, overwriting them; returns row 0. Local."""
    step = 1
    count = rows.shape[0]
    while step < count:
        for low in range(0, count - step, 2 * step):
            rows[low].add_(rows[low + step])
        step *= 2
    return rows[0]


def reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce rows ``[n, numel]``, sums in the same tree, overwriting them. Local."""
    if op == "sum":
        return tree_sum_rows(rows)
    return rows.amax(0) if op == "max" else rows.amin(0)


def tree_sum_wide(terms: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: int = 1) -> None:
    """Add terms ``[numel]`` in the same tree, in the wider dtype of ``out`` ``[numel]``.

    Nothing is rounded to the terms' dtype on the way: bfloat16 terms 256, 1, 1 and 1 give 259 in
    float32, where bfloat16 sums give 258.

    Args:
        terms: at least one contribution; they are left as they are.
        out: where the sum goes; memory apart from the terms.
        divisor: divides every contribution, in the wider dtype, before it is added.

    **Collective**: local. **Memory**: 1 MiB on the CPU; elsewhere one ``out`` for each doubling of
    the number of terms.
    """
    block = block_numel(len(terms)) if out.device.type == "cpu" else max(out.numel(), 1)
    for start in range(0, out.numel(), block):
        stop = min(start + block, out.numel())
        _add_up([term[start:stop] for term in terms], out[start:stop], divisor)


def block_numel(count: int) -> int:
    """How many elements of ``count`` terms are added at a time. Local."""
    return _CACHED >> max(count - 1, 1).bit_length() - 1


def sum_parts(
    rows: Sequence[torch.Tensor],
    out: torch.Tensor,
    *,
    mine: int,
    own: Sequence[torch.Tensor],
    skip: int = 0,
    divisor: int = 1,
) -> None:
    """Add rows in the same tree into ``out`` ``[numel]``, in its dtype, and divide the sum.

    Worked example: rows ``[1, 2, 3]`` and ``[_, _, _]`` with ``mine=1``, parts ``[10]`` and
    ``[20, 30]`` and ``divisor=2`` give ``[5.5, 11, 16.5]``.

    Args:
        rows: every rank's contribution ``[numel]``; what row ``mine`` holds is not read.
        out: where the mean goes; of the rows' dtype or a wider one, in memory apart.
        mine: the row that is given by ``own``.
        own: flat tensors that, one after another, make up ``[skip + numel]`` or more.
        skip: elements of ``own`` that come before.
        divisor: divides the sum, in ``out``'s dtype.

    **Collective**: local. **Memory**: 1 MiB, or less.
    """
    terms = list(rows)
    for start, part in _spans(own, skip, skip + out.numel(), block_numel(len(rows))):
        stop = start + part.numel()
        now = [part if i == mine else row[start:stop] for i, row in enumerate(terms)]
        into = out[start:stop]
        if into.dtype == part.dtype:
            tree_sum(now, out=into)
        else:
            _add_up(now, into, 1)
        if divisor != 1:
            _divide(into, divisor)


def _divide(sums: torch.Tensor, divisor: int) -> None:
    """Divide in place, by a power of two as a product: the same bits in less time."""
    if divisor & (divisor - 1):
        sums.div_(divisor)
    else:
        sums.mul_(1 / divisor)


def _spans(
    parts: Sequence[torch.Tensor], low: int, high: int, most: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """What lies in ``[low, high)`` of joined tensors, at most so much at a time, and from where."""
    begin = 0
    for part in parts:
        end = begin + part.numel()
        for start in range(max(low, begin), min(high, end), most):
            yield start - low, part[start - begin : min(start + most, high, end) - begin]
        begin = end


def _add_up(terms: Sequence[torch.Tensor], out: torch.Tensor, divisor: int) -> None:
    count = len(terms)
    if count == 1:
        out.copy_(terms[0])
        if divisor != 1:
            out.div_(divisor)
        return
    half = _left_of(count)
    _add_up(terms[:half], out, divisor)
    if count - half == 1 and divisor == 1 and terms[half].itemsize > 1:  # no sums with float8
        out.add_(terms[half])
        return
    right = torch.empty_like(out)
    _add_up(terms[half:], right, divisor)
    out.add_(right)


def tree_fold(count: int, term: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Add terms in the same tree, each made when its turn comes; they are overwritten.

    Args:
        count: number of terms, at least 1.
        term: returns the term of an index, a tensor of its own.

    **Collective**: local. **Memory**: one term for each doubling of ``count``, and one more.
    """

    def add_up(start: int, stop: int) -> torch.Tensor:
        if stop - start == 1:
            return term(start)
        middle = start + _left_of(stop - start)
        left = add_up(start, middle)
        return left.add_(add_up(middle, stop))

    return add_up(0, count)


def subtrees(owners: Sequence[int]) -> list[tuple[int, int]]:
    """Return the largest parts ``[start, stop)`` of the tree whose terms have one owner each.

    Of six terms with the owners 0, 0, 0, 1, 1, 1 they are ``[0, 2)``, ``[2, 3)``, ``[3, 4)`` and
    ``[4, 6)``.

    Args:
        owners: whose each term is; at least one.

    **Collective**: local.
    """

    def find(start: int, stop: int) -> list[tuple[int, int]]:
        if len(set(owners[start:stop])) == 1:
            return [(start, stop)]
        middle = start + _left_of(stop - start)
        return find(start, middle) + find(middle, stop)

    return find(0, len(owners))


def join_subtrees(parts: Mapping[tuple[int, int], torch.Tensor], op: str) -> torch.Tensor:
    """Reduce what parts of the tree came to, to the bits of the whole tree; they are overwritten.

    Args:
        parts: all of ``subtrees``, and the reduction of each one's terms, of one shape and dtype.
        op: ``"sum"``, ``"max"`` or ``"min"``.

    **Collective**: local.
    """

    def join(start: int, stop: int) -> torch.Tensor:
        part = parts.get((start, stop))
        if part is not None:
            return part
        middle = start + _left_of(stop - start)
        left = join(start, middle)
        reduce_terms([left, join(middle, stop)], op, left)
        return left

    return join(0, max(stop for _, stop in parts))


def _left_of(count: int) -> int:
    """How many of several terms are on the left: a complete tree that leaves something."""
    return 1 << ((count - 1).bit_length() - 1)
