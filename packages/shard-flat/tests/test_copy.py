"""Putting values into a ShardTensor: from whole tensors, from pieces, from lists of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_flat import ShardSpec, ShardTensor, shard_tensor

Silent = Callable[[int, int], Any]
FULL = torch.arange(15.0).view(3, 5)


def zeros(comm: Any, dtype: torch.dtype = torch.float32) -> Any:
    return shard_tensor(torch.zeros(3, 5, dtype=dtype), comm=comm, name="w")


def test_a_whole_tensor_gives_each_rank_its_range(silent: Silent) -> None:
    for rank, expected in ((0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]), (1, [8.0, 9.0])):
        target = zeros(silent(rank, 2))
        assert target.copy_(FULL) is target
        assert target.local.tolist()[: len(expected)] == expected
        target.copy_(FULL.t().contiguous().t() + 1)
        assert target.local[0] == expected[0] + 1


def test_parameters_are_copied_into_without_autograd(silent: Silent) -> None:
    param: Any = nn.Parameter(zeros(silent(1, 2)))
    with torch.no_grad():
        param.copy_(FULL)
    assert param.grad_fn is None
    assert param.local.tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        param.copy_(FULL)


def test_values_are_cast_to_the_targets_dtype(silent: Silent) -> None:
    target = zeros(silent(0, 2), torch.bfloat16)
    target.copy_(FULL + 256.5)
    assert target.dtype == torch.bfloat16
    assert target.local.tolist()[:4] == [256.0, 258.0, 258.0, 260.0]
    target.copy_(shard_tensor(FULL.double(), comm=target.comm))
    assert target.local[3] == 3.0


def test_pieces_of_the_same_range_are_copied(silent: Silent) -> None:
    target, source = zeros(silent(1, 2)), shard_tensor(FULL, comm=silent(1, 2), name="source")
    target.copy_(source, non_blocking=True)
    assert target.local.tolist() == source.local.tolist()
    source.zero_()
    assert target.local[0] == 8.0


def test_one_number_fills_the_piece(silent: Silent) -> None:
    target = zeros(silent(0, 2))
    assert target.copy_(torch.tensor(2.0)).local.tolist() == [2.0] * 8
    assert target.copy_(torch.tensor([[3.0]])).local.tolist() == [3.0] * 8


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shape", [(5, 3), (15,), (5,), (3, 1), (8,), (1, 1, 1)])
def test_other_shapes_are_refused(shape: tuple[int, ...], rank: int, silent: Silent) -> None:
    """Broadcasting would be one more way to be silently wrong; the piece's own shape is too."""
    target = zeros(silent(rank, 2))
    with pytest.raises(ValueError, match=r"w: expected a source of shape \(3, 5\), got .*rank"):
        target.copy_(torch.ones(shape))
    assert target.local.tolist() == [0.0] * (8 - rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_pieces_of_another_range_are_refused_on_every_rank(rank: int, silent: Silent) -> None:
    """Both hold element 0 to 7 on rank 0, yet not the same on rank 1."""
    target = shard_tensor(torch.zeros(12), comm=silent(rank, 2), name="w")
    start, stop = [(0, 6), (6, 12)][rank]
    assert (target.spec.start, target.spec.stop) == [(0, 8), (8, 12)][rank]
    other = ShardTensor(
        torch.ones(6), ShardSpec("other", (12,), start, stop, 0, 6), comm=silent(rank, 2)
    )
    with pytest.raises(ValueError, match=rf"copy_.*w has .* other has .*rank {rank} of 2"):
        target.copy_(other)
    with pytest.raises(ValueError, match=r"w has .* other has"):
        target + other
    with pytest.raises(ValueError, match=r"w has .* other has"):
        torch._foreach_add_([target], [other])
    with pytest.raises(ValueError, match=r"w has .* other has"):
        torch._foreach_copy_([target], [other])
    assert target.local.sum() == 0


def test_lists_take_whole_tensors_pieces_and_plain_pairs(silent: Silent) -> None:
    comm = silent(1, 2)
    targets: list[torch.Tensor] = [zeros(comm), zeros(comm, torch.bfloat16), torch.zeros(2)]
    torch._foreach_copy_(targets, [FULL, shard_tensor(FULL, comm=comm), torch.ones(2)])
    first, second, third = targets
    assert isinstance(first, ShardTensor)
    assert isinstance(second, ShardTensor)
    assert first.local.tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert second.local.tolist() == first.local.tolist()
    assert third.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"w: expected a source of shape \(3, 5\), got \(5, 3\)"):
        torch._foreach_copy_(targets, [FULL.t(), FULL, torch.ones(2)])
