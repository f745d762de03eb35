"""Gathering whole tensors, and gradients that come back through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_flat import ParamSpec, ShardSpec, ShardTensor, plan_layout, shard_tensor

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
R12_SHAPES = [(1,), (3, 5), (9, 4), (), (0, 3)]


def cut_group(comm: Any, fulls: list[torch.Tensor], *, align_bytes: int) -> list[ShardTensor]:
    """Cut tensors by one layout, as a runtime does: pieces begin anywhere in a row."""
    specs = [ParamSpec(f"p{i}", tuple(f.shape), f.dtype) for i, f in enumerate(fulls)]
    layout = plan_layout(specs, comm.size, align_bytes=align_bytes)
    return [
        ShardTensor(
            full.reshape(-1)[piece.start : piece.stop].clone(),
            ShardSpec(
                piece.spec.name,
                piece.spec.shape,
                piece.start,
                piece.stop,
                start,
                layout.shard_numel,
            ),
            comm=comm,
        )
        for full, piece, start in zip(fulls, layout.pieces(comm.rank), layout.starts, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("size", range(1, 9))
def test_small_first_dimensions_come_back_exactly(
    size: int, dtype: torch.dtype, on_ranks: OnRanks
) -> None:
    fulls = [(torch.arange(torch.Size(s).numel()) % 5).to(dtype).view(s) for s in R12_SHAPES]

    def gather(comm: Any) -> list[torch.Tensor]:
        return [t.full_tensor() for t in cut_group(comm, fulls, align_bytes=16)]

    for gathered in on_ranks(size, gather):
        for whole, full in zip(gathered, fulls, strict=True):
            assert type(whole) is torch.Tensor
            assert (whole.shape, whole.dtype) == (full.shape, dtype)
            assert torch.equal(whole, full)


def test_cuts_in_the_middle_of_rows(on_ranks: OnRanks) -> None:
    """The layout's worked example: b is held as five elements and one, a and c by one rank each."""
    fulls = [torch.arange(5.0), torch.arange(6.0).view(2, 3) + 10, torch.arange(4.0) + 20]

    def gather(comm: Any) -> tuple[list[list[float]], list[list[float]]]:
        tensors = cut_group(comm, fulls, align_bytes=4)
        return [t.local.tolist() for t in tensors], [t.full_tensor().tolist() for t in tensors]

    results = on_ranks(3, gather)
    assert [pieces for pieces, _ in results] == [
        [[0.0, 1.0, 2.0, 3.0, 4.0], [], []],
        [[], [10.0, 11.0, 12.0, 13.0, 14.0], []],
        [[], [15.0], [20.0, 21.0, 22.0, 23.0]],
    ]
    for _, wholes in results:
        assert wholes == [full.tolist() for full in fulls]


def test_gathering_sends_no_more_than_the_longest_piece(on_ranks: OnRanks) -> None:
    def gather(comm: Any) -> list[str]:
        shard_tensor(torch.arange(15.0).view(3, 5), comm=comm).full_tensor()
        shard_tensor(torch.zeros(0, 3), comm=comm).full_tensor()
        calls: list[str] = comm.calls
        return calls

    assert on_ranks(2, gather) == [["all_gather of 8"]] * 2
    assert on_ranks(1, gather) == [[]]


def test_the_gathered_tensor_is_a_copy(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> list[float]:
        tensor = shard_tensor(torch.zeros(8), comm=comm)
        tensor.full_tensor().fill_(1)
        return tensor.local.tolist()

    assert on_ranks(1, check) == [[0.0] * 8]
    assert on_ranks(2, check) == [[0.0] * 4] * 2


@pytest.mark.parametrize("size", range(1, 5))
def test_each_rank_keeps_its_range_of_the_gradient(size: int, on_ranks: OnRanks) -> None:
    full = torch.arange(15.0).view(3, 5)

    def backward(comm: Any) -> torch.Tensor:
        param: Any = nn.Parameter(shard_tensor(full, comm=comm, name="w"))
        whole = param.full_tensor()
        assert whole.requires_grad
        (whole * whole).sum().backward()
        assert isinstance(param.grad, ShardTensor)
        assert param.grad.placements == param.placements
        return param.grad.full_tensor()

    for grad in on_ranks(size, backward):
        assert torch.equal(grad, 2 * full)


def test_gradients_accumulate_and_reach_what_made_the_tensor(on_ranks: OnRanks) -> None:
    def backward(comm: Any) -> list[float]:
        param: Any = nn.Parameter(shard_tensor(torch.ones(6), comm=comm))
        for _ in range(2):
            ((param * 3).full_tensor() * torch.arange(6.0)).sum().backward()
        assert isinstance(param.grad, ShardTensor)
        return param.grad.local.tolist()

    assert on_ranks(2, backward) == [[0.0, 6.0, 12.0, 18.0], [24.0, 30.0]]


def test_a_gradient_that_somebody_holds_is_copied(on_ranks: OnRanks) -> None:
    def backward(comm: Any) -> list[list[float]]:
        param: Any = nn.Parameter(shard_tensor(torch.ones(6), comm=comm))
        held: list[Any] = []
        param.register_hook(held.append)
        for _ in range(2):
            param.full_tensor().sum().backward()
        assert isinstance(param.grad, ShardTensor)
        return [param.grad.local.tolist(), held[0].local.tolist()]

    assert on_ranks(2, backward) == [[[2.0] * 4, [1.0] * 4], [[2.0] * 2, [1.0] * 2]]


def test_gradients_of_the_local_piece(on_ranks: OnRanks) -> None:
    def backward(comm: Any) -> list[float]:
        param: Any = nn.Parameter(shard_tensor(torch.ones(2, 3), comm=comm))
        piece = param.to_local()
        assert piece.shape == param.local.shape
        (piece * (comm.rank + 1)).sum().backward()
        assert isinstance(param.grad, ShardTensor)
        assert param.grad.shape == (2, 3)
        return param.grad.local.tolist()

    assert on_ranks(2, backward) == [[1.0] * 4, [2.0] * 2]


def test_no_gradient_is_recorded_where_gradients_are_off(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> list[bool]:
        param: Any = nn.Parameter(shard_tensor(torch.ones(6), comm=comm))
        with torch.no_grad():
            off = [param.full_tensor(), param.to_local()]
        frozen = param.detach()
        off += [frozen.full_tensor(), frozen.to_local()]
        return [t.requires_grad for t in off]

    assert on_ranks(2, check) == [[False] * 4] * 2


def test_a_penalty_on_whole_tensors_gives_each_rank_its_part(on_ranks: OnRanks) -> None:
    """A sum or norm is the same plain number everywhere; its gradient stays sharded."""
    full = torch.tensor([3.0, 0.0, 0.0, 4.0, 0.0, 0.0])

    def backward(comm: Any) -> list[list[float]]:
        grads = []
        for order in (1, 2):
            param: Any = nn.Parameter(shard_tensor(full, comm=comm, name="w"))
            penalty = param.norm() if order == 1 else param.pow(2).sum()
            penalty.backward()
            assert isinstance(param.grad, ShardTensor)
            grads.append(param.grad.full_tensor().tolist())
        return grads

    for grads in on_ranks(2, backward):
        assert grads[0] == pytest.approx([0.6, 0.0, 0.0, 0.8, 0.0, 0.0])
        assert grads[1] == [6.0, 0.0, 0.0, 8.0, 0.0, 0.0]
