"""What holds for every optimizer of the package: reading changes nothing, names, groups, loops."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_optim import (
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    GradScaler,
    Lion,
    Muon,
    Shampoo,
)
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda p: Adam(p, lr=0.1),
    "adamw": lambda p: AdamW(p, lr=0.1),
    "adamw, disk": lambda p: AdamW(p, lr=0.1, offload="disk"),
    "kahan": lambda p: AdamW(p, lr=0.1, rounding="kahan"),
    "adamw8bit": lambda p: AdamW8bit(p, lr=0.1),
    "lion": lambda p: Lion(p, lr=0.1),
    "lion, cpu": lambda p: Lion(p, lr=0.1, offload="cpu"),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
    "muon": lambda p: Muon(p, lr=0.1),
    "soap": lambda p: SOAP(p, lr=0.1),
    "shampoo": lambda p: Shampoo(p, lr=0.1, max_preconditioner_dim=32),
    "adamw8bit, disk": lambda p: AdamW8bit(p, lr=0.1, offload="disk"),
    "adafactor, disk": lambda p: Adafactor(p, lr=0.1, offload="disk"),
    "muon, disk": lambda p: Muon(p, lr=0.1, offload="disk"),
    "soap, disk": lambda p: SOAP(p, lr=0.1, offload="disk"),
    "shampoo, disk": lambda p: Shampoo(p, lr=0.1, offload="disk"),
}
kinds = pytest.mark.parametrize("kind", KINDS)
worlds = pytest.mark.parametrize("world_size", [1, 2, 3])

SHAPES: list[tuple[int, ...]] = [(70, 60), (5,), (4, 3), (6, 6)]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def whole(params: Sequence[Any]) -> list[torch.Tensor]:
    return [p.full_tensor().detach() if isinstance(p, ShardTensor) else p.detach() for p in params]


@kinds
@pytest.mark.parametrize("shapes", [[(80, 80), (64,)], [(7,)], [(0,), (64, 64)]])
def test_a_step_counts_as_a_change_of_the_memory_behind_pieces(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, shapes: list[tuple[int, ...]]
) -> None:
    """Fused kernels count nothing, and a runtime would not gather again what looks unchanged."""
    fulls = [torch.ones(shape) for shape in shapes]
    params = make_params(SoloComm(), fulls)
    optimizer = KINDS[kind](params)
    for _ in range(2):
        give_grads(params, fulls)
        before = [p._local_tensor._version for p in params]
        optimizer.step()
        after = [p._local_tensor._version for p in params]
        assert all(new > old for new, old in zip(after, before, strict=True))


@kinds
@worlds
def test_reading_changes_nothing(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    """Also with templates made before the first step, which is the first one all the same."""

    def rank(comm: Comm, export: bool) -> list[torch.Tensor]:
        params = make_params(comm, values(0))
        optimizer = KINDS[kind](params)
        for step in range(3):
            if export:
                optimizer.state_dict(allocate=True)
            give_grads(params, values(step + 1))
            optimizer.step()
        return whole(params)

    read, unread = (run_threads(rank, world_size, export)[0] for export in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(read, unread, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(read, values(0), strict=True))


@kinds
@worlds
def test_frozen_parameters(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    """State outlives freezing; what never had a gradient has none, and does not move."""

    def rank(comm: Comm) -> None:
        params = make_params(comm, values(0))
        trained, never = params[0], params[2]
        never.requires_grad_(False)
        optimizer = KINDS[kind](params)
        grads: list[torch.Tensor | None] = [*values(1)]
        grads[2] = None
        give_grads(params, grads)
        optimizer.step()
        trained.requires_grad_(False)
        give_grads(params, [None, grads[1], None, grads[3]])
        optimizer.step()
        saved = optimizer.state_dict(allocate=True)
        assert sorted(saved["state"]) == ["p0", "p1", "p3"]
        assert [float(saved["state"][n]["step"]) for n in ("p0", "p1", "p3")] == [1, 2, 2]
        fresh = KINDS[kind](params)
        fresh.load_state_dict(saved)
        assert never not in fresh.state
        assert float(fresh.state[trained]["step"]) == 1
        assert torch.equal(whole([never])[0], values(0)[2])

    run_threads(rank, world_size)


@kinds
def test_hyper_parameters_of_all_groups_survive(kind: str) -> None:
    params = [nn.Parameter(value) for value in values(0)]

    def build(**hyper: Any) -> Any:
        groups = [{"params": params[:1], **hyper}, {"params": []}, {"params": params[1:]}]
        return KINDS[kind](groups)

    optimizer = build(lr=0.01)
    optimizer.param_groups[1]["lr"] = 0.02
    optimizer.param_groups[2]["weight_decay"] = 0.3
    fresh = build()
    fresh.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in fresh.param_groups] == [0.01, 0.02, 0.1]
    assert fresh.param_groups[2]["weight_decay"] == 0.3
    fresh.step()
    with pytest.raises(ValueError, match=r"^expected 3 parameter groups, got 1; build the"):
        fresh.load_state_dict(KINDS[kind](params).state_dict())


@kinds
def test_copies_and_files(kind: str) -> None:
    """A deep copy steps on its own; plain state goes through torch.save; both do as before."""
    params = [nn.Parameter(value) for value in values(0)]
    optimizer = KINDS[kind](params)
    for param, grad in zip(params, values(1), strict=True):
        param.grad = grad
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = copy.deepcopy(optimizer)
    twins = twin.param_groups[0]["params"]
    loaded = [nn.Parameter(param.detach().clone()) for param in params]
    other = KINDS[kind](loaded)
    other.load_state_dict(saved)
    for each in (params, twins, loaded):
        for param, grad in zip(each, values(2), strict=True):
            param.grad = grad.clone()
    for each in (optimizer, twin, other):
        each.step()
    for a, b, c in zip(params, twins, loaded, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@kinds
@worlds
def test_scaled_gradients_with_a_closure_and_a_schedule(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    def rank(comm: Comm) -> tuple[list[torch.Tensor], float]:
        params = make_params(comm, values(0))
        optimizer, scaler = KINDS[kind](params), GradScaler("cpu", 4.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        scaler.scale(torch.zeros(()))
        give_grads(params, [4 * value for value in values(1)])
        scaler.step(optimizer)
        scaler.update()
        schedule.step()

        def closure() -> float:
            give_grads(params, values(2))
            return 7.0

        assert optimizer.step(closure) == 7.0
        return whole(params), optimizer.param_groups[0]["lr"]

    params = [nn.Parameter(value) for value in values(0)]
    optimizer = KINDS[kind](params)
    for step, rate in ((1, 0.1), (2, 0.05)):
        optimizer.param_groups[0]["lr"] = rate
        for param, grad in zip(params, values(step), strict=True):
            param.grad = grad
        optimizer.step()
    for found, rate in run_threads(rank, world_size):
        assert rate == pytest.approx(0.05)
        assert all(torch.equal(a, b.detach()) for a, b in zip(found, params, strict=True))


@kinds
def test_mistakes_are_named(kind: str) -> None:
    shared = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"^b: the parameter is already there as a; list it once"):
        KINDS[kind]([{"params": [("a", shared)]}, {"params": [("b", shared)]}])
    with pytest.raises(ValueError, match="expected at least one parameter, got none"):
        KINDS[kind]([])
    with pytest.raises(ValueError, match=r"^w: expected a leaf"):
        KINDS[kind]([("w", shared * 2)])
    with pytest.raises(ValueError, match=r"^group 0 \(w, ...\): expected lr >= 0, got -1"):
        KINDS[kind]([{"params": [("w", shared)], "lr": -1}])
    optimizer = KINDS[kind]([("w", shared)])
    shared.grad = torch.ones(2, 2)
    optimizer.step()
    saved = optimizer.state_dict()
    other = KINDS[kind]([("w", nn.Parameter(torch.ones(3, 4)))])
    with pytest.raises(ValueError, match=r"^w: expected .* of shape"):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"missing \['v'\], unexpected \['w'\]"):
        KINDS[kind]([("v", shared)]).load_state_dict(saved)
