"""Which grains of a checkpoint's files ranks need, and which of these ranks checks each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from shard_ckpt._check import Source
from shard_ckpt._collector import collector_paused
from shard_ckpt._grains import Spans, cut_runs, grains_in, merged
from shard_ckpt._match import Read

Needs = Mapping[int, Spans]
"""Per file: the grains that a rank needs."""


@collector_paused()
def grains_of(source: Source, reads: Iterable[Read]) -> dict[int, Spans]:
    """Return the grains that reads touch, and those of the headers of the files they touch. Local.

    Args:
        source: the checkpoint.
        reads: what a rank wants of it.
    """
    touched: dict[int, Spans] = {}
    for read in reads:
        if read.file not in touched:
            touched[read.file] = [grains_in(0, source.data_start(read.file))]
        if read.nbytes:
            touched[read.file].append(grains_in(read.offset, read.offset + read.nbytes))
    return {file: merged(runs) for file, runs in touched.items()}


def own_grains(needs: Sequence[Needs], rank: int) -> dict[int, Spans]:
    """Deal the grains that ranks need to ranks that need them, each to exactly one.

    Of the grains of a file that the same ranks need, each of these gets an equal part: of four
    that ranks 0 and 2 need, rank 0 the first two, rank 2 the others.

    Args:
        needs: every rank's ``grains_of``.
        rank: whose grains to return.

    **Collective**: local; every rank computes the same dealing.
    """
    result = {}
    for file in needs[rank]:
        alike: dict[tuple[int, ...], Spans] = {}
        for run, sharers in _segments([theirs.get(file, []) for theirs in needs], rank):
            alike.setdefault(sharers, []).append(run)
        mine: Spans = []
        for sharers, runs in alike.items():
            # odd ones out go to another rank from file to file
            part, parts = (sharers.index(rank) + file) % len(sharers), len(sharers)
            count = sum(stop - first for first, stop in runs)
            mine += cut_runs(runs, low=count * part // parts, high=count * (part + 1) // parts)
        if mine:
            result[file] = merged(mine)
    return result


def _segments(
    needs: Sequence[Spans], rank: int
) -> Iterator[tuple[tuple[int, int], tuple[int, ...]]]:
    """Yield the runs that a rank needs, cut where the set of ranks that need them changes."""
    begin: dict[int, list[int]] = {}
    end: dict[int, list[int]] = {}
    for other, runs in enumerate(needs):
        for first, stop in runs:
            begin.setdefault(first, []).append(other)
            end.setdefault(stop, []).append(other)
    active: set[int] = set()
    for first, stop in pairwise(sorted({*begin, *end})):
        active.difference_update(end.get(first, ()))
        active.update(begin.get(first, ()))
        if rank in active:
            yield (first, stop), tuple(sorted(active))
