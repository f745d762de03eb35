"""Who waits for whom, and who only seems to."""

from __future__ import annotations

import pytest

from shard_comm._stories import STORY_BYTES, Stories


def _make(size: int) -> list[Stories]:
    memory = memoryview(bytearray(size * STORY_BYTES))
    return [Stories(memory, rank, size, fence=None) for rank in range(size)]


def _tell(stories: Stories, what: str, awaited: list[int], times: int = 3) -> None:
    for _ in range(times):
        stories.tell(what, awaited)


def test_two_that_wait_for_each_other() -> None:
    first, second = _make(2)
    _tell(first, "a barrier", [1], times=1)
    _tell(second, "a gather", [0], times=1)
    since = first.beats(), second.beats()
    _tell(first, "a barrier", [1])
    assert first.knot(since[0]) == {}
    _tell(second, "a gather", [0])
    assert first.knot(since[0]) == second.knot(since[1]) == {0: "a barrier", 1: "a gather"}


def test_a_story_from_before_is_no_reason() -> None:
    """Rank 1 said that it waits for rank 0, and then came no more: it may have gone on since."""
    first, second = _make(2)
    _tell(second, "a gather", [0], times=9)
    since = first.beats()
    _tell(first, "a barrier", [1], times=9)
    assert first.knot(since) == {}
    _tell(second, "a gather", [0], times=2)
    assert first.knot(since) == {}
    _tell(second, "a gather", [0], times=1)
    assert first.knot(since) == {0: "a barrier", 1: "a gather"}


def test_whoever_goes_on_is_in_no_knot() -> None:
    first, second = _make(2)
    since = first.beats()
    _tell(first, "a barrier", [1])
    _tell(second, "a gather", [0])
    second.hush()
    assert first.told() == {0: "a barrier"}
    assert first.knot(since) == {}


def test_whoever_went_on_and_waits_again_is_in_no_knot_yet() -> None:
    """Two ranks in step, each of which waits for what the other does next."""
    first, second = _make(2)
    since = first.beats()
    _tell(first, "a gather", [1])
    _tell(second, "a gather", [0])
    second.hush()
    _tell(second, "a gather", [0], times=2)
    assert first.knot(since) == {}
    _tell(second, "a gather", [0], times=2)
    assert first.knot(since) == {}
    _tell(second, "a gather", [0], times=1)
    assert first.knot(since) == {0: "a gather", 1: "a gather"}


def test_whoever_stands_still_may_wait_for_what_is_done() -> None:
    """Rank 2 works and waits for the next thing before rank 1 has seen it; rank 0 sees it all."""
    ranks = _make(3)

    def tell(rank: int, times: int) -> None:
        _tell(ranks[rank], "a gather", [(rank + 1) % 3], times)

    for rank in range(3):
        tell(rank, 1)
    since = ranks[0].beats()
    tell(0, 5)
    tell(1, 5)
    ranks[2].hush()
    assert ranks[0].knot(since) == {}
    tell(2, 5)
    assert ranks[0].knot(since) == {}
    tell(2, 5)
    assert ranks[0].knot(since) == {}
    tell(1, 3)
    assert ranks[0].knot(since) == dict.fromkeys(range(3), "a gather")


@pytest.mark.parametrize("tied", [False, True])
def test_a_ring_and_those_that_wait_for_it(tied: bool) -> None:
    """0 waits for 1, 1 for 2, and 2 for 0, or for 4, which waits for nobody; 3 waits for 1."""
    all_ranks = _make(5)
    awaited = [[1], [2], [0] if tied else [4], [1]]
    for times in (1, 3):
        since = [stories.beats() for stories in all_ranks]
        for stories, ranks in zip(all_ranks, awaited, strict=False):
            _tell(stories, f"for {ranks}", ranks, times)
    told = {rank: f"for {awaited[rank]}" for rank in range(4)} if tied else {}
    assert all_ranks[0].knot(since[0]) == told
    assert all_ranks[3].knot(since[3]) == told
    assert all_ranks[4].knot(since[4]) == {}


def test_long_stories_are_cut() -> None:
    (alone,) = _make(1)
    alone.tell("x" * 1000, [])
    assert alone.told() == {0: "x" * (STORY_BYTES - 144)}
