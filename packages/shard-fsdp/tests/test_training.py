"""Around the step: scaling, clipping, layouts of parameters, modules' own hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shard_fsdp
from shard_comm import Comm
from shard_fsdp import MixedPrecisionPolicy
from shard_testing import Scale, full_grad, run_threads

WORLDS = [1, 2, 3, 4]

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard


# --- GradScaler ---


def _scaled_steps(comm: Comm) -> None:
    """One rank overflows: every rank skips the step and halves the scale."""
    model = fully_shard(Scale(torch.ones(2)), mesh=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad, want in ((True, [1.0, 1.0]), (False, [0.5, 0.5])):
        optimizer.zero_grad()
        factor = math.inf if bad and comm.rank == comm.size - 1 else 1.0
        scaler.scale((model(torch.ones(2)) * factor).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert model.weight.full_tensor().tolist() == want
    assert scaler.get_scale() == 2.0


# --- clipping ---


def _clipped(comm: Comm) -> None:
    model = fully_shard(
        nn.Sequential(Scale(torch.ones(3)), Scale(torch.ones(3))),
        mesh=comm,
    )
    model(torch.tensor([3.0, 0.0, 4.0])).sum().backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # both gradients are (3, 0, 4)
    assert total.item() == pytest.approx(math.sqrt(50))
    assert full_grad(model[0].weight).tolist() == pytest.approx(
        [3 / math.sqrt(50), 0, 4 / math.sqrt(50)], rel=1e-5
    )


def _clipped_nan(comm: Comm) -> None:
    model = fully_shard(Scale(torch.ones(4)), mesh=comm)
    for bad in (math.nan, math.inf):
        model.zero_grad()
        x = torch.ones(4)
        if comm.rank == 0:
            x[3] = bad
        model(x).sum().backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


# --- fp16: a sum of large gradients ---


def _half_precision(comm: Comm) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = fully_shard(Scale(torch.ones(1)), mesh=comm, mp_policy=policy)
    (model(torch.ones(1)) * 40_000.0).sum().backward()  # two of them overflow float16
    assert full_grad(model.weight).item() == 40_000.0


def _complex_parameter(comm: Comm) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = nn.Identity()
    model.weight = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
    model.forward = lambda x: (model.weight * x).abs().square().sum()
    fully_shard(model, mesh=comm, mp_policy=policy)
    model(torch.ones(2)).backward()
    assert full_grad(model.weight).tolist() == [2 + 4j, 6 - 2j]  # of |w|**2


# --- parameters of unusual layout ---


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.transposed @ x) * self.scalar + self.empty.sum()


def _odd_layouts(comm: Comm) -> None:
    model = fully_shard(_Odd(), mesh=comm)
    assert model.transposed.full_tensor().tolist() == [[0, 3], [1, 4], [2, 5]]
    model(torch.tensor([1.0, 10.0])).sum().backward()
    assert full_grad(model.transposed).tolist() == [[2, 20]] * 3
    assert full_grad(model.scalar).item() == 123
    assert full_grad(model.empty).shape == (0, 3)


# --- buffers and modules' hooks ---


def _buffers(comm: Comm) -> None:
    model = fully_shard(nn.Sequential(nn.BatchNorm1d(2, momentum=1.0)), mesh=comm)
    model(torch.tensor([[0.0, 2.0], [2.0, 6.0]]))
    assert model[0].running_mean.tolist() == [1, 4]
    model.eval()
    out = model(torch.tensor([[1.0, 4.0]]))
    assert out.tolist() == [[0, 0]]


def _module_hooks(comm: Comm) -> None:
    model = fully_shard(Scale(torch.tensor([2.0])), mesh=comm)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(m.weight.item()))
    model.register_forward_hook(lambda m, args, out: seen.append(out.item()))
    model.register_full_backward_hook(lambda m, gin, gout: seen.append(gout[0].item()))
    model(torch.tensor([3.0], requires_grad=True)).sum().backward()
    assert seen == [2.0, 6.0, 1.0]


# --- outputs that are not used ---


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Scale(torch.tensor([2.0]))
        self.b = Scale(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.b(x)


def _unused_output(comm: Comm) -> None:
    model = _Twice()
    for child in (model.a, model.b):
        fully_shard(child, mesh=comm, reshard_after_forward=True)
    fully_shard(model, mesh=comm)
    first, _ = model(torch.ones(1, requires_grad=True))
    first.sum().backward()
    assert full_grad(model.a.weight).item() == 1
    assert model.b.weight.grad is None
    unit: Any = model._shard_unit
    units = unit.schedule.units
    assert comm.size == 1 or not any(u.has_storage for u in units)
    first, second = model(torch.ones(1, requires_grad=True))
    first.sum().backward(retain_graph=True)
    second.sum().backward()
    assert full_grad(model.a.weight).item() == 2
    assert full_grad(model.b.weight).item() == 1


# --- optimizer inside backward ---


def _step_in_hook(comm: Comm) -> None:
    model = fully_shard(nn.Sequential(Scale(torch.ones(1)), Scale(torch.ones(1))), mesh=comm)
    optimizers = {p: torch.optim.SGD([p], lr=0.25) for p in model.parameters()}

    def step(param: torch.Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    model(torch.ones(1)).sum().backward()
    assert [p.full_tensor().item() for p in model.parameters()] == [0.75, 0.75]
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "check",
    [
        _scaled_steps,
        _clipped,
        _clipped_nan,
        _half_precision,
        _complex_parameter,
        _odd_layouts,
        _buffers,
        _module_hooks,
        _unused_output,
        _step_in_hook,
    ],
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_around_the_step(check: Callable[[Comm], None], world_size: int) -> None:
    run_threads(check, world_size)
