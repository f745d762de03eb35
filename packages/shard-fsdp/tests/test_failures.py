"""After something went wrong, and modes without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_fsdp import fully_shard as _fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_threads, token_batches
from shard_wrap import by_class


def fully_shard(module: Any, **kwargs: Any) -> Any:
    """Untyped, since nn.Module cannot say what its attributes are."""
    return _fully_shard(module, **kwargs)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise KeyError("forward")
        return self.weight * x


def _wrapped(comm: Comm) -> tuple[Any, _Layer, _Layer]:
    first, second = _Layer(), _Layer()
    for layer in (first, second):
        fully_shard(layer, mesh=comm)
    return fully_shard(nn.Sequential(first, second), mesh=comm), first, second


def _good_step(model: nn.Module, first: _Layer, second: _Layer) -> None:
    model.zero_grad()
    model(torch.tensor([3.0])).sum().backward()
    for layer in (first, second):
        assert isinstance(layer.weight, ShardTensor)
        assert isinstance(layer.weight.grad, ShardTensor)
        assert layer.weight.grad.full_tensor().item() == 6


def _exception_in_forward(comm: Comm) -> None:
    model, first, second = _wrapped(comm)
    second.fail = True
    for _ in range(2):
        with pytest.raises(KeyError):
            model(torch.tensor([3.0]))
        assert isinstance(first.weight, ShardTensor)
        assert isinstance(second.weight, ShardTensor)
    second.fail = False
    _good_step(model, first, second)


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


def _exception_in_backward(comm: Comm) -> None:
    model, first, second = _wrapped(comm)
    out = first(torch.tensor([3.0]))
    out = _Explode.apply(out)  # type: ignore[no-untyped-call]
    out = second(out)
    with pytest.raises(KeyError):
        out.sum().backward()
    _good_step(model, first, second)


def _no_grad_first(comm: Comm) -> None:
    for context in (torch.no_grad, torch.inference_mode):
        model, first, second = _wrapped(comm)
        with context():
            assert model(torch.tensor([3.0])).item() == 12
        _good_step(model, first, second)
        with context():
            assert model(torch.tensor([3.0])).item() == 12
        _good_step(model, first, second)


def _eval_sees_the_step(comm: Comm) -> None:
    """A buffer that stays gathered after a forward is gathered again once the shards change."""
    model, first, _ = _wrapped(comm)
    model.set_reshard_after_forward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        assert model(torch.tensor([3.0])).item() == 12
    first.weight.grad = first.weight.detach().clone().fill_(2.0)
    optimizer.step()  # 2 - 0.5 * 2 = 1
    with torch.no_grad():
        assert model(torch.tensor([3.0])).item() == 6
    model.load_state_dict({"0.weight": torch.tensor([5.0]), "1.weight": torch.tensor([7.0])})
    with torch.no_grad():
        assert model(torch.tensor([1.0])).item() == 35


def _changed_between(comm: Comm) -> None:
    model, first, second = _wrapped(comm)
    out = model(torch.tensor([3.0]))
    with torch.no_grad():
        second.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"1\.weight: .* changed between forward and backward"):
        out.sum().backward()
    with torch.no_grad():
        second.weight.div_(2)
    _good_step(model, first, second)


def _outside_of_forward(comm: Comm) -> None:
    model, first, _ = _wrapped(comm)
    with pytest.raises(RuntimeError, match=r"0\.weight: .*full_tensor\(\)"):
        torch.nn.functional.linear(torch.ones(1, 1), first.weight.view(1))
    assert model is not None


@pytest.mark.parametrize(
    "check",
    [
        _exception_in_forward,
        _exception_in_backward,
        _no_grad_first,
        _eval_sees_the_step,
        _changed_between,
        _outside_of_forward,
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("default")
def test_stays_usable(check: Any, world_size: int) -> None:
    run_threads(check, world_size)


def _sparse(comm: Comm) -> None:
    layer = fully_shard(nn.Embedding(4, 2, sparse=True), mesh=comm)
    with pytest.raises(TypeError, match=r"weight: expected a dense gradient"):
        layer(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused() -> None:
    run_threads(_sparse, 2)


def _dropped_forwards(comm: Comm) -> None:
    """Forwards whose graphs are thrown away leave nothing behind that delays a reduction."""
    model = fully_shard(TinyDecoder(), mesh=comm, policy=by_class(DecoderBlock))
    batch = token_batches(1, 1)[0][0]
    for _ in range(3):
        model.loss(batch)
    unit = model.blocks[0]._shard_unit
    assert len(unit._calls) == 0
    kept = model.loss(batch)
    assert len(unit._calls) == 1
    kept.backward()
    assert not unit._is_full


def test_graphs_that_are_dropped_are_forgotten() -> None:
    run_threads(_dropped_forwards, 2)
