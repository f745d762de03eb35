from __future__ import annotations

import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_ckpt._leaf import Leaf
from shard_ckpt._plan import (
    PART_BYTES,
    SPLIT_BYTES,
    Share,
    deal,
    group_leaves,
    plan_entries,
    shares_of,
)
from shard_ckpt._state import flatten

KIB, MIB = 1 << 10, 1 << 20


def piece(name: str, *, start: int, stop: int, numel: int, shards: int) -> Leaf:
    local = torch.zeros(stop - start)
    return Leaf("model", name, local, (numel,), start, stop, shards, local)


def test_example_in_the_documentation() -> None:
    sizes = [(2 * MIB, 1), (300 * KIB, 1), (200 * KIB, 1), (50 * KIB, 1)]
    assert deal(sizes, rank=0, world_size=2) == [(0, 0, MIB), (1, 0, 300 * KIB)]
    assert deal(sizes, rank=1, world_size=2) == [
        (0, MIB, 2 * MIB),
        (2, 0, 200 * KIB),
        (3, 0, 50 * KIB),
    ]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3 * MIB), st.sampled_from([1, 2, 4, 8])), max_size=12),
    st.integers(1, 9),
)
def test_every_element_is_dealt_once(sizes: list[tuple[int, int]], world_size: int) -> None:
    parts = [part for r in range(world_size) for part in deal(sizes, rank=r, world_size=world_size)]
    covered = dict.fromkeys(range(len(sizes)), 0)
    for at, start, stop in sorted(parts):
        assert start == covered[at]
        covered[at] = stop
    assert covered == {at: numel for at, (numel, _) in enumerate(sizes)}
    for at, start, stop in parts:
        numel, itemsize = sizes[at]
        if stop - start < numel:
            assert numel * itemsize >= SPLIT_BYTES
            assert (stop - start) * itemsize > PART_BYTES - 8


@settings(deadline=None)
@given(st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=40), st.integers(1, 8))
def test_ranks_write_about_as_many_bytes(sizes: list[int], world_size: int) -> None:
    loads = [
        sum(
            stop - start
            for _, start, stop in deal([(n, 1) for n in sizes], rank=r, world_size=world_size)
        )
        for r in range(world_size)
    ]
    assert max(loads) - min(loads) <= SPLIT_BYTES + len(sizes)


def test_ties_are_planned_once_and_listed() -> None:
    shared = torch.zeros(4)
    holdings = group_leaves(flatten({"m": {"b": shared, "a": shared, "c": shared.clone()}}).leaves)
    entries = plan_entries(holdings, rank=0, world_size=1, shares={})
    assert [(e.leaf.name, [tie.name for tie in e.ties]) for e in entries] == [
        ("a", ["b"]),
        ("c", []),
    ]


def test_replicas_each_write_an_equal_part() -> None:
    """Four ranks: two groups, each cut over two. The bytes laid end to end are halved."""
    plans = []
    held = []
    for rank in range(4):
        low = 10 * (rank % 2)
        leaves = [
            piece("a", start=low, stop=low + 10, numel=20, shards=2),
            piece("b", start=0, stop=6 * (rank % 2), numel=6, shards=2),
        ]
        plans.append(group_leaves(leaves))
        held.append(plans[-1].digests())
    shares = [shares_of(held, rank) for rank in range(4)]
    assert shares == [{0: Share(0, 2)}, {0: Share(0, 2)}, {0: Share(1, 2)}, {0: Share(1, 2)}]
    written = [
        [
            (e.leaf.name, e.runs.start, e.runs.stop)
            for e in plan_entries(plans[rank], rank=rank, world_size=4, shares=shares[rank])
        ]
        for rank in range(4)
    ]
    assert written == [
        [("a", 0, 5)],
        [("a", 10, 18)],
        [("a", 5, 10)],
        [("a", 18, 20), ("b", 0, 6)],
    ]


def test_empty_pieces_write_nothing_and_empty_tensors_are_written_once() -> None:
    leaves = [
        piece("a", start=3, stop=3, numel=3, shards=2),
        piece("b", start=0, stop=0, numel=0, shards=2),
    ]
    holdings = group_leaves(leaves)
    shares = shares_of([holdings.digests()], 0)
    names = [
        [e.leaf.name for e in plan_entries(holdings, rank=rank, world_size=2, shares=shares)]
        for rank in range(2)
    ]
    assert names == [["b"], []]


def test_a_thousand_replicated_parameters_are_dealt_to_1024_ranks_at_once() -> None:
    sizes = [(4096 * 4096, 4), (4096, 4)] * 500
    started = time.process_time()
    mine = deal(sizes, rank=1000, world_size=1024)
    assert time.process_time() - started < 1.0
    assert sum(numel == 4096 * 4096 for numel, _ in (sizes[at] for at, _, _ in mine)) == 125
