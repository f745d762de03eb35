from __future__ import annotations

from shard_ckpt._grains import Spans
from shard_ckpt._shares import own_grains


def grains(runs: Spans) -> list[int]:
    return [grain for first, stop in runs for grain in range(first, stop)]


def test_each_grain_is_checked_by_one_rank_that_needs_it() -> None:
    needs: list[dict[int, Spans]] = [
        {0: [(0, 3), (8, 40)]},
        {0: [(2, 4), (10, 33)], 1: [(0, 1)]},
        {0: [(0, 1), (20, 50)]},
        {},
    ]
    dealt = [own_grains(needs, rank) for rank in range(4)]
    checked = sorted((file, g) for own in dealt for file, runs in own.items() for g in grains(runs))
    assert checked == [*((0, g) for g in (*range(4), *range(8, 50))), (1, 0)]
    for rank, own in enumerate(dealt):
        for file, runs in own.items():
            assert set(grains(runs)) <= set(grains(needs[rank][file]))


def test_grains_that_the_same_ranks_need_are_dealt_in_runs() -> None:
    needs: list[dict[int, Spans]] = [{0: [(0, 4)]}, {}, {0: [(0, 4)]}]
    assert [own_grains(needs, rank) for rank in range(3)] == [{0: [(0, 2)]}, {}, {0: [(2, 4)]}]


def test_shared_grains_far_apart_are_dealt_evenly() -> None:
    """Every tenth grain is needed by both of two ranks: each checks half of these."""
    both: Spans = [(at, at + 1) for at in range(0, 100, 10)]
    needs: list[dict[int, Spans]] = [{0: both}, {0: both}]
    assert [grains(own_grains(needs, rank)[0]) for rank in range(2)] == [
        [0, 10, 20, 30, 40],
        [50, 60, 70, 80, 90],
    ]


def test_what_a_thousand_ranks_need_alike_is_dealt_at_once() -> None:
    needs: list[dict[int, Spans]] = [{0: [(0, 1 << 22)]} for _ in range(1024)]  # a TiB
    assert own_grains(needs, 1023) == {0: [((1 << 22) - 4096, 1 << 22)]}
