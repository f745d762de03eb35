from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_flat import ParamSpec, Ragged, ShardSpec, plan_layout


def test_range_of_every_rank() -> None:
    """``b`` of the layout's worked example: elements 5 to 11 of an array cut every 5."""
    spec = ShardSpec("b", (2, 3), 0, 5, 5, 5)
    assert spec.numel == 6
    assert [spec.range_of(rank) for rank in range(3)] == [(0, 0), (0, 5), (5, 6)]


@given(st.lists(st.lists(st.integers(0, 5), max_size=2), min_size=1, max_size=5), st.integers(1, 7))
def test_range_of_agrees_with_the_layout(shapes: list[list[int]], world_size: int) -> None:
    specs = [ParamSpec(f"p{i}", tuple(s), torch.float32) for i, s in enumerate(shapes)]
    layout = plan_layout(specs, world_size)
    for index, (each, start) in enumerate(zip(layout.specs, layout.starts, strict=True)):
        spec = ShardSpec(each.name, each.shape, 0, 0, start, layout.shard_numel)
        for rank in range(world_size):
            piece = layout.piece(rank, index)
            assert spec.range_of(rank) == (piece.start, piece.stop)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_ranges_outside_of_the_parameter_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"b: expected a range within \[0, 6\], got \[{start}"):
        ShardSpec("b", (2, 3), start, stop, 0, 8)


def test_ragged_is_a_partial_sum_to_torch() -> None:
    placement = Ragged(2, 5)
    assert not placement.is_shard()
    assert not placement.is_replicate()
    assert placement.is_partial()
    assert repr(placement) == "Ragged(2, 5)"


def test_ragged_compares_by_value() -> None:
    assert Ragged(2, 5) == Ragged(2, 5)
    assert Ragged(2, 5) != Ragged(2, 6)
    assert Ragged(2, 5) != (2, 5)
    assert len({Ragged(2, 5), Ragged(2, 5), Ragged(0, 5)}) == 2


def test_one_element_for_each_block() -> None:
    """Eleven elements cut at 6, in blocks of 4: blocks begin at 0, 4 and 8."""
    spec = ShardSpec("w", (11,), 6, 11, 2, 8)
    coarse = spec.coarse(4, 1)
    assert spec.range_of(1) == (6, 11)
    assert coarse.shape == (3,)
    assert [coarse.range_of(rank) for rank in range(3)] == [(0, 2), (2, 3), (3, 3)]
    assert (coarse.start, coarse.stop) == (2, 3)
    assert not coarse.is_cut_like(ShardSpec("s", (3,), 0, 0, 2, 8), 3)


@given(
    numel=st.integers(0, 200),
    origin=st.integers(0, 50),
    shard=st.integers(1, 90),
    unit=st.integers(1, 40),
    size=st.integers(1, 6),
)
def test_blocks_belong_to_the_owner_of_their_first_element(
    numel: int, origin: int, shard: int, unit: int, size: int
) -> None:
    size = max(size, -(-(origin + numel) // shard))
    spec = ShardSpec("w", (numel,), 0, 0, origin, shard)
    for rank in range(size):
        start, stop = spec.range_of(rank)
        owned = [b for b in range(-(-numel // unit)) if start <= b * unit < stop]
        coarse = spec.coarse(unit, rank)
        assert list(range(coarse.start, coarse.stop)) == owned
