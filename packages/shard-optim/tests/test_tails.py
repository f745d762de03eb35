"""Every element goes through the kernel's vector code, wherever a run ends."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_optim._tails import plan_tails

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])


def test_worked_example() -> None:
    flats = [torch.arange(1029.0), torch.arange(37.0), torch.arange(32.0)]
    tails = plan_tails(flats)
    cut = tails.cut(flats)
    cut.load()
    body, whole, rest, short = cut.parts
    assert body.tolist() == list(range(1024))
    assert rest.tolist() == [1024, 1025, 1026, 1027, 1028] + [0] * 11
    assert short.tolist() == [*range(37)] + [0] * 11
    assert whole is flats[2]
    assert tails.origin == [0, 2, 0, 1]


@dtypes
@given(sizes=st.lists(st.integers(1, 100) | st.integers(500, 2500), min_size=1, max_size=5))
def test_cuts_fill_vectors_and_lose_nothing(dtype: torch.dtype, sizes: list[int]) -> None:
    flats = [torch.randn(size).to(dtype) for size in sizes]
    before = [flat.clone() for flat in flats]
    tails = plan_tails(flats)
    cut = tails.cut(flats)
    cut.load()
    assert all(part.nbytes % 64 == 0 for part in cut.parts)
    assert len(tails.origin) == len(cut.parts)
    for i, flat in enumerate(flats):
        held = sum(
            part.numel()
            for part, origin in zip(cut.parts, tails.origin, strict=True)
            if origin == i
        )
        assert held - flat.numel() == -flat.numel() % (64 // flat.itemsize)
    for part in cut.parts:
        part.mul_(2)
    cut.store()
    assert all(torch.equal(flat, 2 * old) for flat, old in zip(flats, before, strict=True))


def test_whole_vectors_are_passed_as_they_are() -> None:
    flats = [torch.zeros(4, 8), torch.zeros(16)]
    cut = plan_tails(flats).cut(flats)
    assert cut.parts[0] is flats[0]
    assert cut.parts[1] is flats[1]
    assert cut.heads == []


def test_other_tensors_of_the_same_lengths_are_cut_alike() -> None:
    tails = plan_tails([torch.zeros(20), torch.zeros(3, 5)])
    other = [torch.arange(20.0), torch.arange(15.0).view(3, 5)]
    cut = tails.cut(other)
    cut.load()
    assert [part.tolist() for part in cut.parts] == [
        [*range(20)] + [0] * 12,
        [*range(15), 0],
    ]
    assert tails.origin == [0, 1]


def test_other_devices_are_left_whole() -> None:
    flat = torch.zeros(37, device="meta")
    assert plan_tails([flat]).cut([flat]).parts[0] is flat
