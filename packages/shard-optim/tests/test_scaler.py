"""Loss scales and skipped steps that are the same on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import AdamW, GradScaler
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


def ready(comm: Comm | None = None, *, enabled: bool = True) -> GradScaler:
    scaler = GradScaler("cpu", 8.0, growth_interval=2, enabled=enabled, comm=comm)
    scaler.scale(torch.zeros(()))  # makes the scale
    return scaler


@worlds
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_rank_sees_it_and_all_skip(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int, bad: float
) -> None:
    def rank(comm: Comm) -> tuple[list[float], list[bool], dict[str, tuple[int, int]]]:
        recorded = Recorded(comm)
        params = make_params(recorded, [torch.zeros(33), torch.zeros(7)])
        optimizer, scaler = AdamW(params, lr=0.1), ready()
        scales, moved = [], []
        for last in (8.0, bad, 8.0, 8.0):
            grad = torch.full((7,), 8.0)
            grad[-1] = last
            give_grads(params, [torch.full((33,), 8.0), grad])
            before = params[0].local.clone()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(params[0].local.numel() == 0 or not torch.equal(before, params[0].local))
        counts = {op: (r.calls, r.payload_bytes) for op, r in recorded.records.items()}
        return scales, moved, counts

    for scales, moved, counts in run_threads(rank, world_size):
        assert scales == [8.0, 4.0, 4.0, 8.0]
        assert [m for i, m in enumerate(moved) if i != 1] == [True] * 3
        assert counts == {"all_reduce": (4, 16)}


def test_replicated_parameters_agree_through_a_comm_of_their_own() -> None:
    """As under ZeRO-1, where gradients of other ranks are not seen here."""

    def rank(comm: Comm, shared: bool) -> tuple[float, list[float]]:
        param = nn.Parameter(torch.zeros(4))
        scaler, optimizer = ready(comm if shared else None), AdamW([param], lr=0.5)
        param.grad = torch.full((4,), math.inf if comm.rank == 1 else 8.0)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), param.tolist()

    assert run_threads(rank, 3, True) == [(4.0, [0.0] * 4)] * 3
    assert [scale for scale, _ in run_threads(rank, 3, False)] == [8.0, 4.0, 8.0]


def test_a_rank_without_gradients_takes_part(make_params: MakeParams) -> None:
    def rank(comm: Comm) -> float:
        (param,) = make_params(comm, [torch.zeros(8)])
        scaler, optimizer = ready(), AdamW([param])
        if comm.rank == 0:
            param.grad = param.like(torch.full((4,), math.inf))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert run_threads(rank, 2) == [4.0, 4.0]


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unscaled: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "non_finite_check" in str(func):
            self.unscaled.append(len(args[0]))
        return func(*args, **(kwargs or {}))


def test_gradients_of_neighbours_are_unscaled_as_one(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    params = make_params(SoloComm(), [torch.zeros(4)] * 10)
    give_grads(params, [torch.full((4,), 16.0)] * 10)
    plain = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    plain.grad = torch.full((3,), 24.0, dtype=torch.bfloat16)
    scaler = ready()
    with Calls() as calls:
        scaler.unscale_(AdamW([*params, plain]))
    assert calls.unscaled == [1, 1]
    for param in params:
        assert isinstance(param.grad, ShardTensor)
        assert param.grad.local.tolist() == [2.0] * 4
    assert plain.grad.tolist() == [3.0] * 3


def test_sparse_gradients_are_unscaled() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().mul(16).backward()
    scaler = ready()
    scaler.unscale_(torch.optim.SGD(table.parameters()))
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[1].tolist() == [2.0, 2.0]


def test_half_precision_gradients_are_refused_by_name() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    param.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"^w: expected a gradient of float32 or bfloat16, got"):
        ready().unscale_(AdamW([("w", param)]))


def test_switched_off_it_only_steps() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    scaler = ready(enabled=False)
    scaler.step(AdamW([param], lr=0.5, weight_decay=0))
    assert param.tolist() == pytest.approx([-0.5, -0.5])
    assert scaler.get_scale() == 1.0


def test_state_goes_to_torchs_scaler_and_back() -> None:
    scaler = ready()
    other = torch.amp.GradScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert other.get_scale() == 8.0
    scaler.load_state_dict({**other.state_dict(), "scale": 2.0})
    assert scaler.get_scale() == 2.0
