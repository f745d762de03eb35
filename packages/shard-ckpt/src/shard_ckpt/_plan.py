"""Which rank writes which elements: arithmetic on names and sizes, the same on every rank."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shard_ckpt._json import canonical_json
from shard_ckpt._leaf import Leaf
from shard_ckpt._runs import Runs

SPLIT_BYTES = 1 << 20
"""Replicated tensors of at least this size are cut over ranks."""

PART_BYTES = 1 << 18
"""No part of a cut tensor is smaller than this."""


@dataclass(frozen=True)
class Entry:
    """Elements that one rank writes.

    Attributes:
        leaf: the tensor.
        runs: which elements of the flattened tensor.
        at: which element of the leaf's own tensor the first of them is; the others follow it there.
        ties: other tensors of the state that are the same memory.
    """

    leaf: Leaf
    runs: Runs
    at: int
    ties: tuple[Leaf, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return self.runs.numel * self.leaf.tensor.element_size()


@dataclass(frozen=True)
class Share:
    """This rank's part in what several ranks hold alike: part ``index`` of ``count``."""

    index: int
    count: int


@dataclass(frozen=True)
class Holdings:
    """A state's tensors with those that share memory brought together.

    Attributes:
        whole: tensors that every rank has whole, and empty ones.
        pieces: sharded tensors, those together that are cut over the same ranks. Groups are
            numbered in the order of their first tensors, so alike on all ranks.
        ties: for the first of several that are the same memory, the others.
    """

    whole: tuple[Leaf, ...]
    pieces: Mapping[int, tuple[Leaf, ...]]
    ties: Mapping[tuple[str, str], tuple[Leaf, ...]]

    def digests(self) -> dict[int, str]:
        """Per group: equal on ranks that hold the same pieces. Local."""
        return {
            group: digest_of(
                [
                    *leaf.id,
                    leaf.start,
                    leaf.stop,
                    leaf.box,
                    [t.id for t in self.ties_of(leaf)],
                ]
                for leaf in leaves
            )
            for group, leaves in self.pieces.items()
        }

    def ties_of(self, leaf: Leaf) -> tuple[Leaf, ...]:
        """Return the others that are the same memory as ``leaf``. Local."""
        return self.ties.get(leaf.id, ())


def group_leaves(leaves: Iterable[Leaf]) -> Holdings:
    """Bring tensors that share memory together and tell whole ones from pieces. Local.

    Args:
        leaves: sorted by section and name.
    """
    owners: dict[tuple[object, ...], Leaf] = {}
    ties: dict[tuple[str, str], tuple[Leaf, ...]] = {}
    whole: list[Leaf] = []
    pieces: dict[object, list[Leaf]] = {}
    for leaf in leaves:
        key = leaf.alias_key
        owner = leaf if key is None else owners.setdefault(key, leaf)
        if owner is not leaf:
            ties[owner.id] = (*ties.get(owner.id, ()), leaf)
        elif leaf.shards is None or leaf.numel == 0:
            whole.append(leaf)
        else:
            pieces.setdefault((leaf.shards, leaf.holders), []).append(leaf)
    groups = {number: tuple(group) for number, group in enumerate(pieces.values())}
    return Holdings(tuple(whole), groups, ties)


def shares_of(held: Sequence[Mapping[int, str]], rank: int) -> dict[int, Share]:
    """Return this rank's part in its pieces: ranks that hold the same are replicas. Local.

    Args:
        held: ``Holdings.digests()`` of every rank.
        rank: this rank.
    """
    result = {}
    for group, digest in held[rank].items():
        alike = [other for other, theirs in enumerate(held) if theirs.get(group) == digest]
        result[group] = Share(alike.index(rank), len(alike))
    return result


def plan_entries(
    holdings: Holdings, *, rank: int, world_size: int, shares: Mapping[int, Share]
) -> list[Entry]:
    """Return what this rank writes; over all ranks every element occurs once. Local."""
    whole = holdings.whole
    sizes = [(leaf.numel, leaf.tensor.element_size()) for leaf in whole]
    entries = [
        Entry(whole[at], Runs(start, stop), start - whole[at].start, holdings.ties_of(whole[at]))
        for at, start, stop in deal(sizes, rank=rank, world_size=world_size)
    ]
    for group, leaves in holdings.pieces.items():
        for leaf, first, last in _own_part(leaves, shares[group]):
            ties = holdings.ties_of(leaf)
            entries.extend(Entry(leaf, runs, at, ties) for runs, at in leaf.runs(first, last))
    return entries


def deal(
    sizes: Sequence[tuple[int, int]], *, rank: int, world_size: int
) -> list[tuple[int, int, int]]:
    """Deal replicated tensors to ranks so that each writes about as many bytes.

    The largest go first, each to the rank with the fewest bytes; from ``SPLIT_BYTES`` on a tensor
    is cut into parts, at most one per rank and none below ``PART_BYTES``. With two ranks, sizes
    of 2 MiB, 300 KiB, 200 KiB and 50 KiB come out as::

        rank 0   first MiB, 300 KiB
        rank 1   second MiB, 200 KiB, 50 KiB

    Args:
        sizes: elements and bytes per element of each tensor.
        rank: whose part to return.
        world_size: how many ranks there are.

    Returns:
        ``(tensor, start, stop)`` for each part of ``rank``, in elements.

    **Collective**: local; every rank computes the same.
    """
    loads = [(0, other) for other in range(world_size)]
    mine = []
    by_size = sorted(range(len(sizes)), key=lambda at: (-sizes[at][0] * sizes[at][1], at))
    for at in by_size:
        numel, itemsize = sizes[at]
        nbytes = numel * itemsize
        parts = 1 if nbytes < SPLIT_BYTES else min(world_size, nbytes // PART_BYTES)
        if parts == world_size:  # all loads rise alike
            mine.append((at, *_cut(numel, rank, parts)))
            continue
        takers = [heapq.heappop(loads) for _ in range(parts)]
        for part, (load, taker) in enumerate(takers):
            start, stop = _cut(numel, part, parts)
            heapq.heappush(loads, (load + (stop - start) * itemsize, taker))
            if taker == rank:
                mine.append((at, start, stop))
    return mine


def _cut(numel: int, part: int, parts: int) -> tuple[int, int]:
    return numel * part // parts, numel * (part + 1) // parts


def _own_part(leaves: Sequence[Leaf], share: Share) -> list[tuple[Leaf, int, int]]:
    """Cut the bytes of all pieces, laid end to end, into equal parts on element boundaries.

    Elements count from the beginning of each piece.
    """
    total = sum(leaf.tensor.numel() * leaf.tensor.element_size() for leaf in leaves)
    low, high = _cut(total, share.index, share.count)
    result = []
    at = 0
    for leaf in leaves:
        size, numel = leaf.tensor.element_size(), leaf.tensor.numel()
        first = min(max(-(-(low - at) // size), 0), numel)
        last = min(max(-(-(high - at) // size), 0), numel)
        if first < last:
            result.append((leaf, first, last))
        at += size * numel
    return result


def digest_of(rows: Iterable[object]) -> str:
    """Return a hash of values that JSON can say. Local."""
    return hashlib.sha256(canonical_json(list(rows))).hexdigest()
