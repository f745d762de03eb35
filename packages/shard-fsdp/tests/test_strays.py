"""Losses that leave a forward by another way than its output: attributes, lists, arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm
from shard_fsdp import fully_shard
from shard_testing import run_threads


class _Layer(nn.Module):
    """Squares ``x * weight`` into a loss of its own, which it puts somewhere."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.losses: list[torch.Tensor] = []
        self.loss: torch.Tensor | None = None
        self.put: Callable[[_Layer, torch.Tensor, Any], None] = _nowhere

    def forward(self, x: torch.Tensor, box: Any = None) -> torch.Tensor:
        y = x * self.weight
        self.put(self, (y * self.weight).sum(), box)
        return y


def _nowhere(layer: _Layer, loss: torch.Tensor, box: Any) -> None:
    """Drop the loss."""


def _attribute(layer: _Layer, loss: torch.Tensor, box: Any) -> None:
    layer.loss = loss


def _list(layer: _Layer, loss: torch.Tensor, box: Any) -> None:
    layer.losses.append(loss)


def _argument(layer: _Layer, loss: torch.Tensor, box: Any) -> None:
    box.append(loss)


class _Net(nn.Module):
    def __init__(self, put: Callable[[_Layer, torch.Tensor, Any], None]) -> None:
        super().__init__()
        self.first, self.second = _Layer(2.0), _Layer(3.0)
        self.first.put = self.second.put = put

    def forward(self, x: torch.Tensor, box: Any = None) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x, box), box)
        return y


def _train(comm: Comm, put: Callable[[_Layer, torch.Tensor, Any], None]) -> None:
    model = _Net(put)
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=comm, reshard_after_forward=True)
    fully_shard(model, mesh=comm, reshard_after_forward=True)
    for with_output in (False, True, False):
        model.zero_grad()
        box: list[torch.Tensor] = []
        y = model(torch.ones(1), box)
        losses = box or model.first.losses + model.second.losses
        if not losses:
            losses = [loss for m in (model.first, model.second) if (loss := m.loss) is not None]
        # a = w1 * w1 and b = w1 * w2 * w2 with w1 = 2, w2 = 3; the output is y = w1 * w2
        total = losses[0] + losses[1] + (y.sum() if with_output else 0)
        model.first.losses.clear()
        model.second.losses.clear()
        total.backward()
        grads = [p.grad.full_tensor().item() for p in model.parameters()]  # type: ignore[union-attr]
        assert grads == [4 + 9 + 3 * with_output, 12 + 2 * with_output]


@pytest.mark.parametrize("put", [_attribute, _list, _argument])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_that_is_put_away_counts(
    put: Callable[[_Layer, torch.Tensor, Any], None], world_size: int
) -> None:
    run_threads(_train, world_size, put)


_hidden: dict[int, torch.Tensor] = {}


class _Hider(nn.Module):
    """Adds a weight, which backward need not read, and hides what it added."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _hidden[id(self)] = (x + self.weight).sum()
        return x + self.weight


def _train_out_of_sight(comm: Comm) -> None:
    layer: Any = fully_shard(_Hider(), mesh=comm, reshard_after_forward=True)
    model = fully_shard(nn.Sequential(layer), mesh=comm)
    model(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"0\.weight: .* not pass through the outputs"):
        _hidden.pop(id(layer)).backward()
    model(torch.ones(1)).sum().backward()
    assert layer.weight.grad.full_tensor().item() == 1


def test_a_loss_that_is_hidden_raises() -> None:
    run_threads(_train_out_of_sight, 2)


class _Multiplier(nn.Module):
    """Hides a product, whose backward reads the weight."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]), requires_grad=not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _hidden[id(self)] = x * self.weight
        return x * self.weight


def _read_out_of_sight(comm: Comm) -> None:
    """The full weight is gone by then; nothing reads where it was, though no gradient tells."""
    for frozen in (False, True):
        model: Any = fully_shard(_Multiplier(frozen=frozen), mesh=comm, reshard_after_forward=True)
        x = torch.ones(2, requires_grad=True)
        model(x)
        with pytest.raises(RuntimeError, match=r"\[2\]\] is at version 1; expected version 0"):
            _hidden.pop(id(model)).sum().backward()
        model(x).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [2, 3]


def test_a_hidden_loss_reads_no_freed_memory(shares_memory: bool) -> None:
    run_threads(_read_out_of_sight, 2, shares_memory=shares_memory)


class _View(nn.Module):
    """Returns a view of a tensor that it got from elsewhere than its arguments, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0, 5.0]))
        self.held: list[Any] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, self.held[0]().view(2)


def _view_of_what_was_there(comm: Comm) -> None:
    inner: Any = fully_shard(_View(), mesh=comm, reshard_after_forward=True)
    model = fully_shard(nn.Sequential(inner), mesh=comm)
    leaf = torch.ones(2, requires_grad=True)
    before = leaf * 2
    inner.held = [lambda: before]
    x = torch.ones(2, requires_grad=True)
    out, view = model(x)
    (out.sum() + view.sum()).backward()
    grads = [t.grad for t in (leaf, x)]
    assert [g.tolist() for g in grads if g is not None] == [[2, 2], [3, 5]]
    assert inner.weight.grad.full_tensor().tolist() == [1, 1]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_view_of_what_was_there_before_does_not_begin_the_unit_late(world_size: int) -> None:
    run_threads(_view_of_what_was_there, world_size)
