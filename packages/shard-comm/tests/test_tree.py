from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_comm import tree_sum
from shard_comm._tree import block_numel, sum_parts, tree_fold, tree_sum_rows, tree_sum_wide


def test_worked_example() -> None:
    """Where float32 drops the one beside 1e8, the tree's order shows: left to right gives 1."""
    terms = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(terms).item() == 0.0
    assert (((terms[0] + terms[1]) + terms[2]) + terms[3]).item() == 1.0


def test_neighbours_first_and_an_odd_one_moves_up() -> None:
    """``((a + b) + (c + d)) + e``: only the last pair cancels before the small one is lost."""
    a, b, c, d, e = (torch.tensor([v]) for v in (1e8, -1e8, 1.0, 1.0, 1e-8))
    assert tree_sum([a, b, c, d, e]).item() == 2.0
    assert tree_sum([c, a, b]).item() == 0.0
    assert tree_sum([a, b, c]).item() == 1.0


def test_one_term_is_copied() -> None:
    term = torch.ones(2)
    result = tree_sum([term])
    assert result.tolist() == [1.0, 1.0]
    assert result.data_ptr() != term.data_ptr()


def test_terms_stay_and_out_may_be_one_of_them() -> None:
    terms = [torch.full((2,), float(i)) for i in range(5)]
    assert tree_sum(terms).tolist() == [10.0, 10.0]
    assert [t[0].item() for t in terms] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert tree_sum(terms, out=terms[3]) is terms[3]
    assert [t[0].item() for t in terms] == [0.0, 1.0, 2.0, 10.0, 4.0]
    pair = [torch.ones(1), torch.ones(1)]
    assert tree_sum(pair, out=pair[1]).item() == 2.0


def test_no_terms() -> None:
    with pytest.raises(ValueError, match="at least one term, got none"):
        tree_sum([])


@given(
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.integers(0, 2**31),
)
def test_rows_are_added_in_the_same_tree(count: int, dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(count, 17, generator=generator) * 1000).to(dtype)
    expected = tree_sum(list(rows))
    assert torch.equal(tree_fold(count, lambda i: rows[i].clone()), expected)
    assert torch.equal(tree_sum_rows(rows), expected)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_a_tree_over_groups_of_two_to_the_n_is_the_tree_over_all(
    low: int, high: int, seed: int
) -> None:
    """What lets ranks be the low levels and microbatches the high ones: same bits either way."""
    generator = torch.Generator().manual_seed(seed)
    terms = list(torch.randn(2**low * high, 9, generator=generator))
    groups = [tree_sum(terms[i : i + 2**low]) for i in range(0, len(terms), 2**low)]
    assert torch.equal(tree_sum(groups), tree_sum(terms))


def test_wide_worked_example() -> None:
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]]).bfloat16()
    total = torch.empty(1)
    tree_sum_wide(list(rows), total)
    assert total.item() == 259.0
    assert tree_sum(list(rows)).item() == 258.0
    tree_sum_wide(list(rows[:3]), total, divisor=2)
    assert total.item() == 129.0
    assert rows.flatten().tolist() == [256.0, 1.0, 1.0, 1.0]


@given(st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 2**31))
def test_wide_sums_are_sums_of_what_was_widened(count: int, divisor: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(count, 17, generator=generator) * 1000).bfloat16()
    total = torch.empty(17)
    tree_sum_wide(list(rows), total, divisor=divisor)
    assert torch.equal(total, tree_sum([row.float() / divisor for row in rows]))


def test_wide_sums_of_many_elements() -> None:
    """More than are added at a time."""
    rows = torch.arange(300_000.0).remainder_(251).view(3, -1).bfloat16()
    total = torch.empty(100_000)
    tree_sum_wide(list(rows), total)
    assert torch.equal(total, rows.float().sum(0))


def test_worked_example_of_parts() -> None:
    out = torch.empty(3)
    rows = [torch.tensor([1.0, 2, 3]), torch.full((3,), torch.nan)]
    own = [torch.tensor([10.0]), torch.tensor([20.0, 30.0])]
    sum_parts(rows, out, mine=1, own=own, divisor=2)
    assert out.tolist() == [5.5, 11.0, 16.5]
    sum_parts([row[1:] for row in rows], out[1:], mine=1, own=own, skip=1)
    assert out.tolist() == [5.5, 22.0, 33.0]


@pytest.mark.parametrize("divisor", [2, 3, 4])
def test_parts_are_divided_to_the_same_bits(divisor: int) -> None:
    """Also numbers that are rounded when they are halved, and those that are none."""
    tiny = torch.finfo(torch.float32).smallest_normal
    values = torch.tensor([tiny / 2**23, 3 * tiny / 2**23, 5 * tiny / 2**22, tiny, 3e38])
    values = torch.cat([values, torch.tensor([torch.inf, torch.nan]), torch.randn(99)])
    out = torch.empty_like(values)
    nothing = torch.zeros_like(values)
    sum_parts([nothing, nothing], out, mine=1, own=[values], divisor=divisor)
    assert torch.equal(out.view(torch.int32), (values / divisor).view(torch.int32))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("narrow", [False, True])
def test_parts_are_added_in_the_same_tree(count: int, narrow: bool) -> None:
    """Also where a block of additions, or a part, ends in the middle of the other."""
    numel = block_numel(count) + 1000
    rows = [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    rows = [row.bfloat16() for row in rows] if narrow else rows
    expected = tree_sum([row.float() for row in rows]).div_(3)
    for mine in range(count):
        given = [
            torch.full_like(row, torch.nan) if i == mine else row for i, row in enumerate(rows)
        ]
        out = torch.empty(numel)
        own = [*rows[mine].split([7, 0, numel - 500, 493])]
        sum_parts(given, out, mine=mine, own=own, divisor=3)
        assert torch.equal(out, expected)
