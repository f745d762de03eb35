"""Sums of powers: exact enough to round alike everywhere, in bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from shard_flat import _norm, power_sum

sizes_of = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, 0.5])
@given(sizes=sizes_of, seed=st.integers(0, 99))
def test_against_exact_sums(order: float, sizes: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    tensors = [torch.randn(size) for size in sizes]
    expected = math.fsum(abs(x) ** order for t in tensors for x in t.tolist())
    assert float(power_sum(tensors, order)) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_million_squares_stay_within_1e_15(dtype: torch.dtype) -> None:
    """Adding in a few long chains, as a norm in float64 does, would lose a hundred times more."""
    torch.manual_seed(0)
    tensor = torch.randn(1_000_003).to(dtype)
    squares = tensor.double().square()  # exact: twice the bits of a float32 fit
    exact = math.fsum(squares.tolist())
    assert abs(float(power_sum([tensor], 2.0)) / exact - 1) < 1e-15


@given(cuts=st.lists(st.integers(1, 499), max_size=6, unique=True))
def test_cuts_do_not_show_in_float32(cuts: list[int]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(500)
    edges = [0, *sorted(cuts), 500]
    parts = [whole[a:b] for a, b in pairwise(edges)]
    for order in (1.0, 2.0, 3.5):
        cut, uncut = power_sum(parts, order), power_sum([whole], order)
        assert cut.float() == uncut.float()


def test_chunks_are_filled_across_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_norm._CHUNK, "cpu", 8)
    tensors = [torch.full((n,), 2.0) for n in (3, 0, 4, 2, 20, 1)]
    assert [[p.numel() for p in b] for b in _norm._batches(tensors, 8)] == [
        [3, 4],
        [2],
        [8],
        [8],
        [4, 1],
    ]
    assert float(power_sum(tensors, 2.0)) == 4.0 * 30
    assert float(power_sum(tensors, 1.0)) == 2.0 * 30


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, (list, tuple)) else [out]
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in made:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    self.nbytes = max(self.nbytes, storage.nbytes())
        return out


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
def test_memory_is_bounded(order: float) -> None:
    tensors = [torch.ones(1_500_000), torch.ones(1000, 100)]
    with Largest() as largest:
        power_sum(tensors, order)
    assert largest.nbytes <= 2**20
    with Largest() as largest:
        power_sum([torch.ones(10)], order)
    assert largest.nbytes <= 80


def test_largest_element() -> None:
    tensors = [torch.tensor([1.0, -7.0]), torch.tensor([[3.0], [4.0]]), torch.empty(0)]
    assert float(power_sum(tensors, math.inf)) == 7.0
    assert float(power_sum([torch.empty(0)], math.inf)) == 0.0
    assert float(power_sum([torch.empty(0)], 2.0)) == 0.0


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_comes_through(order: float, value: float) -> None:
    tensor = torch.ones(300_000)
    tensor[123_456] = value
    total = float(power_sum([torch.ones(3), tensor], order))
    assert math.isnan(total) if math.isnan(value) else total == math.inf


def test_huge_and_tiny_elements_neither_overflow_nor_vanish() -> None:
    assert float(power_sum([torch.tensor([3e38, 4e38 / 2])], 2.0)) == pytest.approx(1.3e77)
    tiny = torch.full((4,), 1e-38)
    assert float(power_sum([tiny], 2.0)) == pytest.approx(4e-76)


def test_strided_tensors() -> None:
    base = torch.arange(12.0).view(3, 4)
    assert float(power_sum([base.t(), base[:, ::2]], 2.0)) == 506.0 + 220.0
