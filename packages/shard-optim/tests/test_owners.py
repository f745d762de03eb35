"""Owners with equal loads, and pieces that arrive whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_comm import Comm, Recorded
from shard_flat import ParamSpec, plan_layout
from shard_optim import _routes
from shard_optim._newton import cost_of
from shard_optim._owners import Ledger
from shard_optim._routes import Round, split_rounds
from shard_optim._workshop import plan_rounds
from shard_testing import run_threads


def test_worked_example() -> None:
    nowhere: list[list[tuple[int, int]]] = [[]] * 5
    owners = Ledger(2).assign([5, 4, 3, 3, 3], nowhere)
    assert owners == [0, 1, 1, 0, 1]


def test_equally_free_ranks_share_the_traffic() -> None:
    """Four like matrices on rank 0: two go elsewhere, and not to where one has gone before."""
    held = [[(0, 10)]] * 4
    assert sorted(Ledger(4).assign([1.0] * 4, held)) == [0, 1, 2, 3]
    # Each lies on the rank of its number: nobody needs to send.
    assert Ledger(3).assign([1.0] * 3, [[(2, 5)], [(1, 5)], [(0, 5)]]) == [2, 1, 0]


@given(costs=st.lists(st.floats(0.1, 100), min_size=1, max_size=40), size=st.integers(1, 6))
def test_largest_load_is_within_four_thirds(costs: list[float], size: int) -> None:
    owners = Ledger(size).assign(costs, [[] for _ in costs])
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(size)]
    by_cost = sorted(costs, reverse=True)
    best = max(
        sum(costs) / size, by_cost[0], sum(by_cost[size - 1 : size + 1]) * (len(costs) > size)
    )
    assert max(loads) <= best * 4 / 3 + 1e-9


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_loads_of_a_decoder_are_within_a_fifth_of_the_mean(world_size: int) -> None:
    block = [(1536, 512), (512, 512), (2048, 512), (2048, 512), (512, 2048)]
    costs = [cost_of(*shape) for shape in block * 12]
    owners = Ledger(world_size).assign(costs, [[] for _ in costs])
    loads = [
        sum(c for c, o in zip(costs, owners, strict=True) if o == rank)
        for rank in range(world_size)
    ]
    assert max(loads) / (sum(loads) / world_size) < 1.2


def test_rounds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_routes, "_ROUND_NUMEL", 10)
    assert split_rounds([6, 6, 6, 30, 1], [0, 0, 0, 1, 1]) == [[0, 1, 3], [2], [4]]


@settings(max_examples=20, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=8),
    size=st.integers(1, 4),
)
def test_there_and_back(shapes: list[tuple[int, int]], size: int) -> None:
    """Owners get each matrix whole, and each rank its own range of the negative."""
    wholes = [torch.arange(r * c, dtype=torch.float32) + 100 * i for i, (r, c) in enumerate(shapes)]
    layout = plan_layout(
        [ParamSpec(f"p{i}", shape, torch.float32) for i, shape in enumerate(shapes)], size
    )
    ranges = [
        [(piece.start, piece.stop) for piece in (layout.piece(r, i) for r in range(size))]
        for i in range(len(shapes))
    ]
    (owners,) = plan_rounds([cost_of(*shape) for shape in shapes], ranges=ranges, world_size=size)

    def rank(comm: Comm) -> int:
        recorded = Recorded(comm)
        each = Round(recorded, dict(enumerate(ranges)), owners, torch.float32)
        own = [slice(*ranges[i][comm.rank]) for i in range(len(shapes))]
        for _ in range(2):
            each.send({i: wholes[i][own[i]] for i in owners})
            arrived = each.wholes()
            assert sorted(arrived) == [i for i, owner in owners.items() if owner == comm.rank]
            assert all(torch.equal(whole, wholes[i]) for i, whole in arrived.items())
            each.give_back({i: -whole for i, whole in arrived.items()})
            for i, piece in each.pieces().items():
                assert torch.equal(piece, -wholes[i][own[i]])
        return recorded.records["all_to_all"].payload_bytes

    away = sum(
        stop - start
        for i, each in enumerate(ranges)
        for holder, (start, stop) in enumerate(each)
        if holder != owners[i]
    )
    assert sum(run_threads(rank, size)) == 4 * 4 * away  # twice there and back, and no padding
