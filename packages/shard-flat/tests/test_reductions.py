"""Norms, sums, clipping and loss scaling: one number for all ranks, the one of the whole tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_flat import ShardTensor, shard_tensor

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
FULL = torch.tensor([[3.0, -4.0, 0.0], [12.0, 0.0, -84.0]])
SHAPES = [(1,), (3, 5), (9, 4), (), (0, 3)]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def params_of(
    fulls: list[torch.Tensor], grads: list[torch.Tensor], comm: Any
) -> list[nn.Parameter]:
    """Parameters with gradients; sharded where there is a comm."""
    params = []
    for i, (full, grad) in enumerate(zip(fulls, grads, strict=True)):
        if comm is not None:
            full = shard_tensor(full, comm=comm, name=f"p{i}")
            grad = shard_tensor(grad, comm=comm, name=f"p{i}")
        param = nn.Parameter(full.clone())
        param.grad = grad.clone()
        params.append(param)
    return params


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor
    return full


@pytest.mark.parametrize("size", range(1, 5))
def test_norms(size: int, on_ranks: OnRanks) -> None:
    """sqrt(9 + 16 + 144 + 84 ** 2) = 85."""

    def norms(comm: Any) -> list[float]:
        x = shard_tensor(FULL, comm=comm)
        found = [
            x.norm(),
            torch.linalg.vector_norm(x, 2),
            torch.linalg.norm(x),
            x.norm(1),
            torch.linalg.vector_norm(x, 1),
            x.norm(math.inf),
            x.norm(4),
        ]
        assert all(type(n) is torch.Tensor and n.shape == () for n in found)
        return [n.item() for n in found]

    fourth = FULL.double().norm(4).item()
    for found in on_ranks(size, norms):
        assert found[:6] == [85.0, 85.0, 85.0, 103.0, 103.0, 84.0]
        assert found[6] == pytest.approx(fourth, rel=1e-6)


@pytest.mark.parametrize("size", range(1, 5))
def test_sums_and_means(size: int, on_ranks: OnRanks) -> None:
    def sums(comm: Any) -> list[Any]:
        x = shard_tensor(FULL, comm=comm)
        return [
            x.sum().item(),
            x.mean().item(),
            x.int().sum(),
            (x > 0).sum(),
            x.sum(dtype=torch.float64),
            x.bfloat16().mean(),
            x.mean(dtype=torch.float64),
        ]

    for found in on_ranks(size, sums):
        assert found[0] == -73.0
        assert found[1] == pytest.approx(-73 / 6, rel=1e-7)
        assert (found[2].item(), found[2].dtype) == (-73, torch.int64)
        assert (found[3].item(), found[3].dtype) == (2, torch.int64)
        assert (found[4].item(), found[4].dtype) == (-73.0, torch.float64)
        assert (found[5].item(), found[5].dtype) == (-12.1875, torch.bfloat16)
        assert found[6].item() == -73 / 6


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_extremes(size: int, on_ranks: OnRanks) -> None:
    """The numbers are all above 0, or all below: ranks without elements add none of their own."""

    def found(comm: Any) -> list[Any]:
        x = shard_tensor(FULL.abs() + 1, comm=comm)
        scalar = shard_tensor(torch.tensor(-2.0), comm=comm)
        most = 2**53 + 1  # no float64
        big = shard_tensor(torch.tensor([most, most - 1]), comm=comm)
        numbers = [x.max(), x.amax(), x.min(), x.amin(), (-x).max(), (-x).min()]
        numbers += [scalar.max(), scalar.amin(), x.bfloat16().max(), x.int().min()]
        numbers += [big.max(), (-big).min(), (x > 4).max(), (x > 4).min()]
        assert all(type(n) is torch.Tensor and n.shape == () for n in numbers)
        return [(n.item(), n.dtype) for n in numbers]

    kinds = [torch.float32] * 8 + [torch.bfloat16, torch.int32, torch.int64, torch.int64]
    kinds += [torch.bool] * 2
    values = [85, 85, 1, 1, -1, -85, -2, -2, 85, 1, 2**53 + 1, -(2**53) - 1, True, False]
    for pairs in on_ranks(size, found):
        assert pairs == list(zip(values, kinds, strict=True))


@pytest.mark.parametrize("size", [1, 2, 9])
def test_whether_any_or_all(size: int, on_ranks: OnRanks) -> None:
    """One element differs from the rest, the first or the last; most of nine ranks have none."""

    def found(comm: Any) -> list[Any]:
        results = []
        for place in (0, 4):
            full = torch.zeros(5)
            full[place] = math.inf
            x = shard_tensor(full, comm=comm)
            results += [x.isinf().any(), x.isfinite().all(), x.isnan().any(), (x >= 0).all()]
        assert all(type(r) is torch.Tensor and r.dtype == torch.bool for r in results)
        return [r.item() for r in results]

    for results in on_ranks(size, found):
        assert results == [True, False, False, True] * 2


def test_extremes_of_what_is_not_a_number(on_ranks: OnRanks) -> None:
    full = torch.ones(5)
    full[3] = math.nan

    def found(comm: Any) -> list[float]:
        x = shard_tensor(full, comm=comm)
        return [n.item() for n in (x.max(), x.min(), x.amax(), x.amin())]

    for size in (2, 8):
        for numbers in on_ranks(size, found):
            assert all(math.isnan(n) for n in numbers)


def test_extremes_without_elements(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> list[Any]:
        x = shard_tensor(torch.zeros(0, 3), comm=comm, name="none")
        for extreme in (x.max, x.min, x.amax, x.amin):
            with pytest.raises(
                RuntimeError, match=r"none: aten.a?m[axin]*.default of a tensor with"
            ):
                extreme()
        return [x.bool().any().item(), x.bool().all().item()]

    assert on_ranks(2, check) == [[False, True]] * 2


def test_gradients_of_extremes(on_ranks: OnRanks) -> None:
    """Where several elements are the largest, each gets its part."""

    def gradient(comm: Any) -> list[float]:
        x = shard_tensor(torch.tensor([7.0, 1.0, 2.0, 7.0, 0.0]), comm=comm).requires_grad_()
        (x.max() * 3 + x.min()).backward()
        assert isinstance(x.grad, ShardTensor)
        return x.grad.full_tensor().tolist()

    for grads in on_ranks(2, gradient):
        assert grads == [1.5, 0.0, 0.0, 1.5, 1.0]


def test_sums_do_not_lose_what_one_rank_alone_would(on_ranks: OnRanks) -> None:
    """In float32 1e8 + 1 - 1e8 is 0; pieces are summed in float64 until the end."""
    full = torch.tensor([1e8, 1.0, 0.0, 0.0, -1e8, 0.0, 0.0, 0.0])
    for size in (1, 2):
        for total in on_ranks(size, lambda comm: shard_tensor(full, comm=comm).sum().item()):
            assert total == 1.0


def test_norms_do_not_overflow_in_half_precision(on_ranks: OnRanks) -> None:
    full = torch.full((16,), 200.0, dtype=torch.float16)  # squares exceed 65504
    for norm in on_ranks(2, lambda comm: shard_tensor(full, comm=comm).norm()):
        assert (norm.item(), norm.dtype) == (800.0, torch.float16)


def test_empty_tensors(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> list[float]:
        x = shard_tensor(torch.zeros(0, 3), comm=comm)
        return [x.sum().item(), x.norm().item(), x.norm(math.inf).item(), x.mean().item()]

    for found in on_ranks(2, check):
        assert found[:3] == [0.0, 0.0, 0.0]
        assert math.isnan(found[3])


@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
def test_not_a_number_on_one_rank_reaches_all(order: float, on_ranks: OnRanks) -> None:
    full = torch.ones(8)
    full[7] = math.nan
    for norm in on_ranks(2, lambda comm: shard_tensor(full, comm=comm).norm(order).item()):
        assert math.isnan(norm)


def test_a_list_of_norms_is_one_collective(on_ranks: OnRanks) -> None:
    def norms(comm: Any) -> tuple[list[float], list[str]]:
        tensors: list[torch.Tensor] = [
            shard_tensor(FULL, comm=comm),
            torch.tensor([6.0, 8.0]),  # plain: the same on every rank, counted once
            shard_tensor(torch.zeros(0, 3), comm=comm),
            shard_tensor(torch.tensor(-2.0), comm=comm),
        ]
        calls: list[str] = comm.calls
        found = [n.item() for n in torch._foreach_norm(tensors)]
        found += [n.item() for n in torch._foreach_norm(tensors, math.inf)]
        return found, calls

    for found, calls in on_ranks(3, norms):
        assert found == [85.0, 10.0, 0.0, 2.0, 84.0, 8.0, 0.0, 2.0]
        assert calls == ["sum of 3", "max of 3"]


def test_each_tensor_is_reduced_over_its_own_ranks(on_ranks: OnRanks) -> None:
    """One list may hold tensors of several meshes, such as experts and the rest of a model."""

    def norms(comm: Any) -> tuple[list[float], list[str]]:
        class Alone:
            rank, size = 0, 1

            def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
                comm.calls.append("alone")

        mine = shard_tensor(torch.full((4,), float(comm.rank + 1)), comm=Alone())  # type: ignore[arg-type]
        tensors: list[torch.Tensor] = [mine, shard_tensor(FULL, comm=comm), mine]
        calls: list[str] = comm.calls
        return [n.item() for n in torch._foreach_norm(tensors)], calls

    assert on_ranks(2, norms) == [
        ([2.0, 85.0, 2.0], ["alone", "sum of 1"]),
        ([4.0, 85.0, 4.0], ["alone", "sum of 1"]),
    ]


def test_orders_and_kinds_that_have_no_norm(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> None:
        x = shard_tensor(FULL, comm=comm, name="x")
        for order in (0, -1, -math.inf, math.nan):
            with pytest.raises(ValueError, match="x: expected a norm order above 0, got"):
                x.norm(order)
        with pytest.raises(TypeError, match=r"x: a norm needs a floating dtype, got torch.int32"):
            torch._foreach_norm([x.int()])
        with pytest.raises(TypeError, match=r"x: mean\(\) needs a floating dtype, got torch.int32"):
            x.int().mean()
        assert comm.calls == []

    on_ranks(2, check)


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("order", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("size", range(1, 5))
def test_clipping(size: int, order: float, foreach: bool, on_ranks: OnRanks) -> None:
    fulls, grads = values(0), [g * 10 for g in values(1)]
    if math.isinf(order):  # torch has no largest element of an empty tensor
        fulls, grads = fulls[:-1], grads[:-1]
    reference = params_of(fulls, grads, None)
    expected = nn.utils.clip_grad_norm_(reference, 0.5, order, foreach=foreach)
    assert expected > 5

    def clip(comm: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        params = params_of(fulls, grads, comm)
        norm = nn.utils.clip_grad_norm_(params, 0.5, order, foreach=foreach)
        assert type(norm) is torch.Tensor
        return norm, [whole(p.grad) for p in params]

    results = on_ranks(size, clip)
    for norm, clipped in results:
        torch.testing.assert_close(norm, expected)
        assert torch.equal(norm, results[0][0])
        for ours, theirs in zip(clipped, reference, strict=True):
            torch.testing.assert_close(ours, theirs.grad)


def test_clipping_by_value_and_error_on_nonfinite(on_ranks: OnRanks) -> None:
    def check(comm: Any) -> list[float]:
        param = nn.Parameter(shard_tensor(torch.zeros(6), comm=comm))
        param.grad = shard_tensor(torch.tensor([1.0, -2, 3, -4, 5, math.inf]), comm=comm)
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_([param], 1.0, error_if_nonfinite=True)
        nn.utils.clip_grad_value_([param], 2.5)
        return whole(param.grad).tolist()

    for clipped in on_ranks(2, check):
        assert clipped == [1.0, -2.0, 2.5, -2.5, 2.5, 2.5]


@pytest.mark.parametrize("fused", [False, True])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(
    fused: bool, on_ranks: OnRanks
) -> None:
    def train(comm: Any) -> tuple[list[float], list[float], float, int]:
        param = nn.Parameter(shard_tensor(torch.ones(6), comm=comm, name="w"))
        optimizer = torch.optim.SGD([param], lr=0.5, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        grad = torch.full((6,), 8.0)
        bad = grad.clone()
        bad[5] = math.inf  # in rank 1's piece
        param.grad = shard_tensor(bad, comm=comm)
        scaler.step(optimizer)
        scaler.update()
        skipped = whole(param.detach()).tolist()
        param.grad = shard_tensor(grad, comm=comm)
        scaler.step(optimizer)
        scaler.update()
        sums = sum(1 for call in comm.calls if call == "max of 1")
        return skipped, whole(param.detach()).tolist(), scaler.get_scale(), sums

    for skipped, stepped, scale, reduced in on_ranks(2, train):
        assert skipped == [1.0] * 6
        assert scale == 2.0
        assert stepped == [1.0 - 0.5 * 8.0 / 2.0] * 6
        assert reduced == 2


def test_unscaling_by_hand_divides_the_pieces(on_ranks: OnRanks) -> None:
    def unscale(comm: Any) -> tuple[list[float], float]:
        param = nn.Parameter(shard_tensor(torch.ones(6), comm=comm))
        param.grad = shard_tensor(torch.arange(6.0) * 4, comm=comm)
        optimizer = torch.optim.SGD([param], lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        version = param.grad.to_local()._version
        scaler.unscale_(optimizer)
        assert param.grad.to_local()._version > version
        return whole(param.grad).tolist(), nn.utils.clip_grad_norm_([param], 1e9).item()

    for grad, norm in on_ranks(2, unscale):
        assert grad == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
        assert norm == pytest.approx(math.sqrt(55))
