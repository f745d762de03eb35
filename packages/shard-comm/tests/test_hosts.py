"""Who carries what between hosts, and what hosts can add up by themselves."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_comm import tree_sum
from shard_comm._hosts import Hosts
from shard_comm._shared_file import host_name
from shard_comm._tree import join_subtrees, reduce_terms, subtrees

layouts = st.lists(st.integers(0, 4), min_size=1, max_size=24)


def test_three_ranks_beside_two() -> None:
    """The example of the class."""
    hosts = Hosts.named(["a", "a", "a", "b", "b"])
    assert hosts.of == (0, 0, 0, 1, 1)
    assert hosts.members == [[0, 1, 2], [3, 4]]
    assert [hosts.counterparts(rank) for rank in range(5)] == [[3], [4], [3], [0], [1]]
    assert [hosts.charges(rank) for rank in range(5)] == [[3], [4], [], [0, 2], [1]]
    assert hosts.subtrees == [[(0, 2), (2, 3)], [(3, 4), (4, 5)]]


def test_runs_of_a_power_of_two_are_one_sum_each() -> None:
    assert Hosts((0, 0, 0, 0, 1, 1, 1, 1)).subtrees == [[(0, 4)], [(4, 8)]]
    assert Hosts((0, 0, 0, 0, 1, 1, 1)).subtrees == [[(0, 4)], [(4, 7)]]
    assert Hosts((0, 1, 0, 1)).subtrees == [[(0, 1), (2, 3)], [(1, 2), (3, 4)]]
    assert subtrees([0, 0, 0, 1, 1, 1]) == [(0, 2), (2, 3), (3, 4), (4, 6)]


@given(layouts)
def test_each_slice_reaches_each_other_host_once(numbers: list[int]) -> None:
    hosts = Hosts.named([str(number) for number in numbers])
    for rank in range(hosts.size):
        taken = [r for r in range(hosts.size) if rank in hosts.charges(r)]
        assert taken == hosts.counterparts(rank)
        others = [host for host in range(len(hosts.members)) if host != hosts.of[rank]]
        assert sorted(hosts.of[r] for r in taken) == others
    for ranks in hosts.members:
        counts = [len(hosts.charges(rank)) for rank in ranks]
        assert sum(counts) == hosts.size - len(ranks)
        assert counts[0] == max(counts)


@given(layouts, st.sampled_from(["sum", "max", "min"]))
def test_joined_parts_have_the_bits_of_the_whole(numbers: list[int], op: str) -> None:
    generator = torch.Generator().manual_seed(len(numbers))
    terms = list(torch.randn(len(numbers), 5, generator=generator).mul_(1000).bfloat16())
    parts = {}
    for start, stop in subtrees(numbers):
        assert len(set(numbers[start:stop])) == 1
        parts[start, stop] = torch.empty(5, dtype=torch.bfloat16)
        reduce_terms(terms[start:stop], op, parts[start, stop])
    want = torch.empty(5, dtype=torch.bfloat16)
    reduce_terms(terms, op, want)
    if op == "sum":
        assert torch.equal(want, tree_sum(terms))
    assert torch.equal(join_subtrees(parts, op), want)
    assert Counter(rank for part in parts for rank in range(*part)) == Counter(range(len(numbers)))


def test_a_declared_host_sets_ranks_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARD_HOST", raising=False)
    plain = host_name()
    assert host_name() == plain
    monkeypatch.setenv("SHARD_HOST", "left")
    assert host_name() == f"left{plain}"
    assert host_name("right") == f"right{plain}"
    assert host_name("") == plain
