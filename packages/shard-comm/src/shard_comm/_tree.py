"""The one order in which contributions are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
