"""AdamW inside training loops: schedulers, hooks, closures, loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_optim import AdamW
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]


def halving(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=6, base_momentum=0.6, max_momentum=0.9)


@pytest.mark.parametrize("schedule", [halving, one_cycle])
def test_schedulers(schedule: Callable[[torch.optim.Optimizer], LRScheduler]) -> None:
    """Rates, and the betas that OneCycleLR moves, are read anew in every step."""
    torch.manual_seed(0)
    start = torch.randn(32)
    grads = [torch.randn(32) for _ in range(5)]
    ends, rates = [], []
    for cls in (AdamW, torch.optim.AdamW):
        param = nn.Parameter(start.clone())
        optimizer: torch.optim.Optimizer = cls([param], lr=0.1)
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
        scheduler = schedule(optimizer)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            scheduler.step()
        ends.append(param.detach())
        rates.append((scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]))
    assert torch.equal(ends[0], ends[1])
    assert rates[0] == rates[1]
    assert rates[0][0] != [0.1]


def test_what_schedulers_keep_in_groups_survives_loading() -> None:
    param = nn.Parameter(torch.zeros(3))
    optimizer = AdamW([param], lr=0.1)
    one_cycle(optimizer)
    other = AdamW([param], lr=0.7)
    other.load_state_dict(optimizer.state_dict())
    kept = ("lr", "betas", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
    assert all(other.param_groups[0][k] == optimizer.param_groups[0][k] for k in kept)


def test_closure_runs_with_gradients_and_its_loss_comes_back(make_params: MakeParams) -> None:
    (param,) = make_params(SoloComm(), [torch.full((4,), 2.0)])
    optimizer = AdamW([param], lr=0.1, weight_decay=0)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = (param * param).sum()
        loss.backward()
        calls.append(torch.is_grad_enabled())
        return float(loss.detach())

    assert optimizer.step(closure) == 16.0
    assert calls == [True]
    torch.testing.assert_close(param.local, torch.full((4,), 1.9))


def test_step_hooks_see_their_step() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = AdamW([param], lr=0.1, weight_decay=0)
    seen: list[tuple[str, float]] = []

    def before(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(("before", float(param.detach()[0])))

    def after(_: Any, args: Any, kwargs: Any) -> None:
        seen.append(("after", round(float(param.detach()[0]), 4)))

    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(after)
    optimizer.step()
    handle.remove()
    optimizer.step()
    assert seen == [("before", 0.0), ("after", -0.1), ("before", pytest.approx(-0.1))]


def test_state_hooks_are_called() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    order: list[str] = []

    def packed(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        order.append("packed")
        return {**state, "extra": 1}

    def unpacking(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        order.append("unpacking")
        groups = [{**group, "lr": 0.25} for group in state["param_groups"]]
        return {"state": state["state"], "param_groups": groups}

    optimizer.register_state_dict_pre_hook(lambda _: order.append("packing"))
    optimizer.register_state_dict_post_hook(packed)
    optimizer.register_load_state_dict_pre_hook(unpacking)
    optimizer.register_load_state_dict_post_hook(lambda _: order.append("unpacked"))
    state = optimizer.state_dict()
    assert state["extra"] == 1
    optimizer.load_state_dict(state)
    assert order == ["packing", "packed", "unpacking", "unpacked"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert state["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scaler_skips_on_all_ranks_what_one_rank_saw(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int
) -> None:
    """An inf in one element of one rank's piece: nobody steps, the scale falls everywhere."""
    numel = 40

    def rank(comm: Comm) -> tuple[list[float], float, list[float], float]:
        (param,) = make_params(comm, [torch.zeros(numel)])
        optimizer = AdamW([param], lr=0.1, weight_decay=0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        scaler.scale(torch.zeros(()))  # makes the scale
        spoiled = torch.full((numel,), 1024.0)
        spoiled[numel - 1] = float("inf")
        give_grads([param], [spoiled])
        scaler.step(optimizer)
        scaler.update()
        skipped, scale = param.full_tensor().tolist(), scaler.get_scale()
        give_grads([param], [torch.full((numel,), 512.0)])
        scaler.unscale_(optimizer)
        assert param.grad is not None
        assert param.grad.full_tensor().tolist() == [1.0] * numel  # type: ignore[attr-defined]
        scaler.step(optimizer)
        scaler.update()
        return skipped, scale, param.full_tensor().tolist(), scaler.get_scale()

    for skipped, scale, stepped, later in run_threads(rank, world_size):
        assert skipped == [0.0] * numel
        assert scale == 512.0
        assert stepped == pytest.approx([-0.1] * numel)
        assert later == 512.0


def test_a_group_added_later_trains_from_its_own_first_step() -> None:
    first, second = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
    optimizer = AdamW([first], lr=0.1, weight_decay=0)
    first.grad = torch.ones(16)
    optimizer.step()
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    second.grad = torch.ones(16)
    optimizer.step()
    torch.testing.assert_close(first.detach(), torch.full((16,), -0.2))
    torch.testing.assert_close(second.detach(), torch.full((16,), -0.2))
    assert [float(optimizer.state[p]["step"]) for p in (first, second)] == [2, 1]
    assert optimizer.param_groups[1]["eps"] == 1e-8


def test_zero_grad_and_repr() -> None:
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    optimizer = AdamW([param], lr=0.25)
    assert "lr: 0.25" in repr(optimizer)
    optimizer.zero_grad()
    assert param.grad is None
