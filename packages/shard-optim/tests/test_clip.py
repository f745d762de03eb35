"""Clipping by the global norm: torch's values, the same bits on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor, shard_tensor
from shard_optim import clip_grad_norm_, clip_grad_value_, get_grad_norm
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

orders = pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def with_grads(grads: Sequence[torch.Tensor | None]) -> list[nn.Parameter]:
    params = []
    for grad in grads:
        param = nn.Parameter(torch.zeros(3) if grad is None else torch.zeros_like(grad))
        param.grad = None if grad is None else grad.clone()
        params.append(param)
    return params


def grads_of(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    grads = [p.grad for p in params if p.grad is not None]
    return [g.full_tensor() if isinstance(g, ShardTensor) else g for g in grads]


def clip_sharded(
    comm: Comm, make_params: MakeParams, give_grads: GiveGrads, grads: Any, *args: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    params = make_params(comm, [torch.zeros(g.shape, dtype=g.dtype) for g in grads])
    give_grads(params, grads)
    norm = clip_grad_norm_(params, *args)
    assert type(norm) is torch.Tensor
    return norm, grads_of(params)


@orders
@worlds
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_torchs_values_on_whole_gradients(
    make_params: MakeParams, give_grads: GiveGrads, order: float, world_size: int, max_norm: float
) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(37), torch.randn(3, 5), torch.randn(()), torch.randn(0, 3)]
    params = with_grads(grads)
    # torch has no largest element of nothing
    full = [p for p in params if p.numel() or not math.isinf(order)]
    expected = torch.nn.utils.clip_grad_norm_(full, max_norm, order)
    for norm, clipped in run_threads(
        clip_sharded, world_size, make_params, give_grads, grads, max_norm, order
    ):
        # torch sums in float32
        torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(clipped, grads_of(params), rtol=2e-6, atol=1e-9)
        if max_norm > 1e3:
            assert all(torch.equal(c, g) for c, g in zip(clipped, grads, strict=True))


@orders
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_bits_on_any_number_of_ranks(
    make_params: MakeParams,
    give_grads: GiveGrads,
    order: float,
    dtype: torch.dtype,
    sizes: list[int],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    grads = [torch.randn(size).to(dtype) for size in sizes]
    plain = with_grads(grads)
    norm = clip_grad_norm_(plain, 0.1, order)
    assert norm.dtype == torch.float32
    for world_size in (1, 2, 3, 4):
        for other, clipped in run_threads(
            clip_sharded, world_size, make_params, give_grads, grads, 0.1, order
        ):
            assert torch.equal(norm, other)
            assert all(torch.equal(a, b) for a, b in zip(clipped, grads_of(plain), strict=True))


@orders
@worlds
def test_plain_and_sharded_count_once_each(
    make_params: MakeParams, give_grads: GiveGrads, order: float, world_size: int
) -> None:
    grads = [torch.full((5,), 2.0), torch.full((2, 2), -3.0)]

    def rank(comm: Comm) -> tuple[float, list[torch.Tensor]]:
        sharded = make_params(comm, [torch.zeros(5)])
        plain = nn.Parameter(torch.zeros(2, 2))
        params = [plain, *sharded]
        give_grads(params, [grads[1], grads[0]])
        return float(clip_grad_norm_(params, 1.0, order)), grads_of(params)

    one = 3.0 if math.isinf(order) else (5 * 2.0**order + 4 * 3.0**order) ** (1 / order)
    for norm, (plain_grad, sharded_grad) in run_threads(rank, world_size):
        assert norm == pytest.approx(one, rel=1e-6)
        torch.testing.assert_close(plain_grad, grads[1] / one)
        torch.testing.assert_close(sharded_grad, grads[0] / one)


def test_one_number_in_one_collective(make_params: MakeParams, give_grads: GiveGrads) -> None:
    def rank(comm: Comm) -> dict[str, tuple[int, int]]:
        recorded = Recorded(comm)
        params = make_params(recorded, [torch.zeros(5), torch.zeros(9), torch.zeros(2)])
        give_grads(params, [torch.ones(5), torch.ones(9), None])
        clip_grad_norm_([*params, *with_grads([torch.ones(3)])], 1.0)
        return {op: (r.calls, r.payload_bytes) for op, r in recorded.records.items()}

    assert run_threads(rank, 2) == [{"all_reduce": (1, 8)}] * 2


def test_two_comms_take_one_collective_each(make_params: MakeParams) -> None:
    """Ranks agree on the order, which is that of the parameters."""

    def rank(comm: Comm) -> tuple[float, int, int]:
        first, second = Recorded(comm), Recorded(SoloComm())
        params = [*make_params(first, [torch.zeros(6)]), *make_params(second, [torch.zeros(4)])]
        for param in params:
            param.grad = param.like(torch.full((param.local.numel(),), 2.0))
        norm = clip_grad_norm_(params, 100.0, 1.0)
        return float(norm), first.records["all_reduce"].calls, second.records["all_reduce"].calls

    assert run_threads(rank, 2) == [(20.0, 1, 1)] * 2


@worlds
def test_no_gradients_at_all(make_params: MakeParams, world_size: int) -> None:
    def rank(comm: Comm) -> tuple[float, float]:
        params = make_params(comm, [torch.zeros(5)])
        return float(clip_grad_norm_(params, 1.0)), float(clip_grad_norm_(with_grads([None]), 1.0))

    assert run_threads(rank, world_size) == [(0.0, 0.0)] * world_size
    assert float(clip_grad_norm_([], 1.0)) == 0.0


def test_a_rank_without_gradients_takes_part(make_params: MakeParams) -> None:
    def rank(comm: Comm) -> float:
        (param,) = make_params(comm, [torch.zeros(8)])
        if comm.rank == 0:
            param.grad = param.like(torch.full((4,), 2.0))
        return float(clip_grad_norm_([param], 1.0))

    assert run_threads(rank, 2) == [4.0, 4.0]


@orders
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_sees_all_ranks_report(
    make_params: MakeParams, give_grads: GiveGrads, order: float, value: float, world_size: int
) -> None:
    grad = torch.ones(16)
    grad[-1] = value

    def rank(comm: Comm) -> tuple[str, bool, float]:
        params = make_params(comm, [torch.zeros(16), torch.zeros(3)])
        give_grads(params, [grad, torch.ones(3)])
        with pytest.raises(RuntimeError) as caught:
            clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
        kept = torch.equal(grads_of(params)[0].nan_to_num(), grad.nan_to_num())
        kept = kept and torch.equal(grads_of(params)[1], torch.ones(3))
        return str(caught.value), kept, float(clip_grad_norm_(params, 1.0, order))

    for message, kept, norm in run_threads(rank, world_size):
        assert message == (
            f"the norm of order {order:g} of the gradients of 2 parameters is {value}; "
            f"no gradient was changed"
        )
        assert kept
        assert math.isnan(norm) if math.isnan(value) else norm == math.inf


def test_what_follows_is_torchs_where_the_norm_is_not_finite() -> None:
    for value in (math.inf, math.nan):
        ours, theirs = (with_grads([torch.tensor([1.0, value]), torch.ones(2)]) for _ in "ab")
        clip_grad_norm_(ours, 1.0)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        for mine, other in zip(grads_of(ours), grads_of(theirs), strict=True):
            torch.testing.assert_close(mine, other, equal_nan=True)


def test_max_norm_of_zero_clears_gradients() -> None:
    params = with_grads([torch.ones(4)])
    assert float(clip_grad_norm_(params, 0.0)) == 2.0
    assert grads_of(params)[0].tolist() == [0.0] * 4


def test_a_generator_and_a_single_tensor() -> None:
    params = with_grads([torch.full((4,), 2.0), torch.full((9,), 1.0)])
    assert float(clip_grad_norm_((p for p in params), 1.0)) == 5.0
    torch.testing.assert_close(params[0].grad, torch.full((4,), 0.4))
    torch.testing.assert_close(params[1].grad, torch.full((9,), 0.2))
    (single,) = with_grads([torch.full((4,), 2.0)])
    assert float(clip_grad_norm_(single, 2.0)) == 4.0
    torch.testing.assert_close(single.grad, torch.full((4,), 1.0))


def test_a_parameter_listed_twice_counts_once() -> None:
    (param,) = with_grads([torch.full((4,), 2.0)])
    assert float(clip_grad_norm_([param, param], 2.0)) == 4.0
    torch.testing.assert_close(param.grad, torch.full((4,), 1.0))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_calls_of_torchs_function_work_unchanged(foreach: bool | None) -> None:
    params = with_grads([torch.full((4,), 2.0)])
    norm = clip_grad_norm_(params, 2.0, 2.0, error_if_nonfinite=False, foreach=foreach)
    assert float(norm) == 4.0
    torch.testing.assert_close(params[0].grad, torch.full((4,), 1.0))


def test_strided_gradients_and_several_dtypes() -> None:
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = torch.ones(3, 4).t()[1:3]
    half = nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    half.grad = torch.ones(10, dtype=torch.bfloat16)
    assert float(clip_grad_norm_([param, half], 2.0)) == 4.0
    torch.testing.assert_close(param.grad, torch.full((2, 3), 0.5))
    torch.testing.assert_close(half.grad, torch.full((10,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((-1.0,), "expected max_norm >= 0, got -1.0"),
        ((math.nan,), "expected max_norm >= 0, got nan"),
        ((1.0, 0.0), "expected norm_type > 0, got 0.0"),
        ((1.0, -math.inf), "expected norm_type > 0, got -inf"),
    ],
)
def test_arguments_out_of_range(args: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_grad_norm_(with_grads([torch.ones(2)]), *args)


def test_gradients_that_cannot_be_counted() -> None:
    """Each would give a wrong norm, or one per rank, if it were let through."""
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        ValueError, match=r"^parameter 1: expected a dense gradient, got torch.spar"
    ):
        clip_grad_norm_([*with_grads([torch.ones(2)]), table.weight], 1.0)
    sharded = nn.Parameter(shard_tensor(torch.ones(4), comm=SoloComm(), name="w"))
    sharded.grad = torch.ones(4)
    with pytest.raises(ValueError, match=r"^w: the parameter is sharded and its gradient plain"):
        clip_grad_norm_([sharded], 1.0)
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    foreign = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
    foreign.grad = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    with pytest.raises(TypeError, match=r"^parameter 0: .* torch.nn.utils.clip_grad_norm_ for it"):
        clip_grad_norm_([foreign], 1.0)


@orders
@worlds
def test_the_norm_alone(
    make_params: MakeParams, give_grads: GiveGrads, order: float, world_size: int
) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(37), torch.randn(3, 5)]
    expected = clip_grad_norm_(with_grads(grads), 1.0, order)

    def rank(comm: Comm) -> tuple[torch.Tensor, list[torch.Tensor]]:
        params = make_params(comm, [torch.zeros_like(g) for g in grads])
        give_grads(params, grads)
        return get_grad_norm(params, order), grads_of(params)

    for norm, kept in run_threads(rank, world_size):
        assert torch.equal(norm, expected)
        assert all(torch.equal(a, b) for a, b in zip(kept, grads, strict=True))


def test_the_norm_alone_raises_where_it_is_asked_to() -> None:
    params = with_grads([torch.tensor([math.inf])])
    assert float(get_grad_norm(params)) == math.inf
    with pytest.raises(RuntimeError, match="of the gradients of 1 parameters is inf"):
        get_grad_norm(params, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="expected norm_type > 0, got -1"):
        get_grad_norm(params, -1)
    assert float(get_grad_norm([])) == 0.0


@worlds
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_value(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int, foreach: bool | None
) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(37), torch.randn(3, 5), torch.tensor([math.nan, -math.inf, 0.25])]
    plain = with_grads(grads)
    torch.nn.utils.clip_grad_value_(plain, 0.5)

    def rank(comm: Comm) -> tuple[list[torch.Tensor], dict[str, Any]]:
        recorded = Recorded(comm)
        params = make_params(recorded, [torch.zeros_like(g) for g in grads])
        give_grads(params, grads)
        clip_grad_value_([*params, *with_grads([None])], 0.5, foreach)
        records = dict(recorded.records)
        return grads_of(params), records

    for clipped, records in run_threads(rank, world_size):
        assert records == {}
        for ours, theirs in zip(clipped, grads_of(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_values_out_of_range(value: float) -> None:
    with pytest.raises(ValueError, match="expected clip_value >= 0"):
        clip_grad_value_(with_grads([torch.ones(2)]), value)
