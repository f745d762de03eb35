"""A forward that raises, on one rank alone or on all: the next one begins in step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import shard_fsdp
from shard_comm import Comm, comm_for
from shard_testing import Scale, run_ranks, run_threads

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard

PLACES = ["root", "between", "inside", "end"]


class _Failing(nn.Module):
    """Raises at a place of its own choosing."""

    def __init__(self) -> None:
        super().__init__()
        self.place = ""
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def raise_at(self, place: str) -> None:
        if self.place == place:
            raise KeyError(place)


class _Inner(_Failing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.raise_at("inside")
        return x * self.weight


class _Outer(_Failing):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Scale(torch.tensor([2.0])), _Inner(), _Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.raise_at("root")
        x = self.first(x)
        self.raise_at("between")
        x = self.third(self.second(x))
        self.raise_at("end")
        return x * self.weight


def _sharded(comm: Comm, wraps: bool) -> Any:
    model = _Outer()
    if wraps:
        fully_shard(model.first, mesh=comm)
        fully_shard([model.second, model.third], mesh=comm)
    return fully_shard(model, mesh=comm)


def _fail_once(comm: Comm, model: Any, place: str, *, train: bool) -> None:
    """Rank 0 raises; others skip the backward, as ranks do that told each other."""
    failing = model.second if place == "inside" else model
    failing.place = place if comm.rank == 0 else ""
    with torch.set_grad_enabled(train):
        if comm.rank == 0:
            with pytest.raises(KeyError, match=place):
                model(torch.ones(1))
        else:
            assert model(torch.ones(1)).item() == 16
    failing.place = ""
    comm.barrier()


def _one_alone(comm: Comm, wraps: bool) -> None:
    model = _sharded(comm, wraps)
    model(torch.ones(1)).sum().backward()
    for place in PLACES:
        for train in (True, False):
            _fail_once(comm, model, place, train=train)
            model.zero_grad()
            model(torch.ones(1)).sum().backward()
            assert [p.grad.full_tensor().item() for p in model.parameters()] == [8] * 4


@pytest.mark.parametrize("wraps", [False, True])
def test_a_rank_that_raises_alone_stays_in_step(wraps: bool, shares_memory: bool) -> None:
    run_threads(_one_alone, 2, wraps, shares_memory=shares_memory, timeout_s=20)


def _one_alone_over_gloo(comm: Comm) -> None:
    _one_alone(comm_for(shared_memory=False), True)
    _one_alone(comm, True)


def test_a_rank_that_raises_alone_stays_in_step_over_processes() -> None:
    run_ranks(_one_alone_over_gloo, 2)


class _Encoder(_Outer):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.raise_at("end")
        return x * self.weight


def _by_another_method(comm: Comm) -> None:
    """What the last forward gathered says nothing about a method that gathers less."""
    model: Any = _Encoder()
    for child in (model.first, model.second, model.third):
        fully_shard(child, mesh=comm)
    fully_shard(model, mesh=comm)
    shard_fsdp.register_fsdp_forward_method(model, "encode")
    model.encode(torch.ones(1)).sum().backward()
    model(torch.ones(1)).sum().backward()
    model.place = "end" if comm.rank == 0 else ""
    if comm.rank == 0:
        with pytest.raises(KeyError, match="end"):
            model.encode(torch.ones(1))
    else:
        assert model.encode(torch.ones(1)).item() == 4
    model.place = ""
    assert model(torch.ones(1)).item() == 16


def test_each_method_is_an_order_of_its_own(shares_memory: bool) -> None:
    run_threads(_by_another_method, 2, shares_memory=shares_memory, timeout_s=20)


def _interrupted(comm: Comm) -> None:
    """Whoever interrupts does not wait for others; all of them did, so all begin alike."""
    model = _sharded(comm, True)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model(torch.ones(1))
    hook = model.first.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1))
    hook.remove()
    assert not any(u.is_full for u in model._shard_unit.schedule.units)
    assert model(torch.ones(1)).item() == 16


class _StopError(BaseException):
    pass


class _Stopping(_Outer):
    """Catches what no forward should raise, and goes on without that layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return super().forward(x)
        except _StopError:
            out: torch.Tensor = self.third(x) * self.weight
            return out


def _caught_inside(comm: Comm) -> None:
    model: Any = _Stopping()
    for child in (model.first, model.second, model.third):
        fully_shard(child, mesh=comm)
    fully_shard(model, mesh=comm)

    def stop(*_: object) -> None:
        raise _StopError

    model(torch.ones(1)).sum().backward()
    hook = model.second.register_forward_pre_hook(stop)
    out = model(torch.ones(1))
    assert out.item() == 4
    assert model._shard_unit.is_full  # as after any forward
    hook.remove()
    model.zero_grad()
    out.sum().backward()
    assert model.third.weight.grad.full_tensor().item() == 2


def test_what_is_caught_inside_a_forward_is_none_of_ours(shares_memory: bool) -> None:
    run_threads(_caught_inside, 2, shares_memory=shares_memory, timeout_s=20)


def test_an_interrupt_gathers_no_more() -> None:
    run_threads(_interrupted, 2, timeout_s=20)


def _parted(comm: Comm) -> None:
    """Rank 1 leaves a unit out, which rank 0 cannot know; it raises its own error all the same."""
    model = _sharded(comm, True)
    model.set_prefetch_depth(0, 0)
    with torch.no_grad():
        model(torch.ones(1))
        if comm.rank == 1:
            model.second = model.third = nn.Identity()
            with pytest.raises(RuntimeError, match="different collectives"):
                model(torch.ones(1))
        else:
            model.place = "between"
            with pytest.raises(KeyError, match="between"):
                model(torch.ones(1))


def test_an_error_is_not_replaced_by_one_about_what_came_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, "shard_fsdp"):
        run_threads(_parted, 2, timeout_s=20)
    (record,) = caplog.records
    assert record.getMessage() == "ranks parted after a forward raised KeyError('between')"
    assert "different collectives" in str(record.exc_info)


def _bad_parameter(comm: Comm) -> None:
    """What raises before the forward began leaves nothing half undone."""
    model = _sharded(comm, True)
    good = model.first.weight
    model.first.weight = nn.Parameter(torch.ones(3))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"first\.weight: expected a parameter of shape"):
            model(torch.ones(1))
    model.first.weight = good
    params = list(model.parameters())
    model(torch.ones(1)).sum().backward()
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert good.grad.full_tensor().item() == 8


class _Unreadable:
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise KeyError("attributes")


def _bad_output(comm: Comm) -> None:
    """An output that cannot be looked into, without which the model is fine."""
    model = _sharded(comm, True)
    hook = model.register_forward_hook(lambda module, args, out: (out, _Unreadable()))
    with pytest.raises(KeyError, match="attributes"):
        model(torch.ones(1))
    hook.remove()
    model(torch.ones(1)).sum().backward()
    assert model.weight.grad.full_tensor().item() == 8
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.ones(1))
        model.weight.fill_(3)
        assert model(torch.ones(1)).item() == 24  # an outermost forward, which looks for changes


@pytest.mark.parametrize("check", [_bad_parameter, _bad_output])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_raises_around_a_forward(check: Any, world_size: int, shares_memory: bool) -> None:
    run_threads(check, world_size, shares_memory=shares_memory, timeout_s=20)
