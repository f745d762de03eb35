"""After something went wrong, and modes without gradients."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shard_fsdp
from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_testing import DecoderBlock, Scale, TinyDecoder, run_threads, token_batches
from shard_wrap import by_class

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard


def _wrapped(comm: Comm) -> tuple[Any, Scale, Scale]:
    first, second = Scale(torch.tensor([2.0])), Scale(torch.tensor([2.0]))
    for layer in (first, second):
        fully_shard(layer, mesh=comm)
    return fully_shard(nn.Sequential(first, second), mesh=comm), first, second


def _good_step(model: nn.Module, first: Scale, second: Scale) -> None:
    model.zero_grad()
    model(torch.tensor([3.0])).sum().backward()
    for layer in (first, second):
        assert isinstance(layer.weight, ShardTensor)
        assert isinstance(layer.weight.grad, ShardTensor)
        assert layer.weight.grad.full_tensor().item() == 6


class _Explode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise KeyError("backward")


def _two_dtypes(comm: Comm) -> list[str]:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    outer = nn.Sequential(nn.Linear(4, 4), fully_shard(inner, mesh=comm))
    model = fully_shard(outer, mesh=comm)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        model(torch.ones(2, 5))
    assert not hasattr(raised.value, "__notes__")
    with pytest.raises(RuntimeError, match="must have the same dtype") as raised:
        model(torch.ones(2, 4))
    notes: list[str] = getattr(raised.value, "__notes__", [])
    return notes


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
def test_an_error_about_dtypes_names_the_unit_and_its_policy() -> None:
    for rank, notes in enumerate(run_threads(_two_dtypes, 2)):
        assert len(notes) == 1  # the outer unit adds none
        assert notes[0].startswith("1.0.weight: raised in a forward of its unit, with parameters")
        assert f"torch.bfloat16 and torch.float32 (rank {rank} of 2)" in notes[0]
        assert "under MixedPrecisionPolicy(param_dtype=None" in notes[0]
    (alone,) = _two_dtypes(SoloComm())  # where all units go together
    assert "torch.bfloat16 and torch.float32 (rank 0 of 1)" in alone


def _exception_in_backward(comm: Comm) -> None:
    model, first, second = _wrapped(comm)
    out = first(torch.tensor([3.0]))
    out = _Explode.apply(out)  # type: ignore[no-untyped-call]
    out = second(out)
    with pytest.raises(KeyError):
        out.sum().backward()
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
        _exception_in_backward,
        _eval_sees_the_step,
        _changed_between,
        _outside_of_forward,
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_stays_usable(check: Any, world_size: int, shares_memory: bool) -> None:
    run_threads(check, world_size, shares_memory=shares_memory)


def _sparse(comm: Comm) -> None:
    layer = fully_shard(nn.Embedding(4, 2, sparse=True), mesh=comm)
    with pytest.raises(TypeError, match=r"weight: expected a dense gradient"):
        layer(torch.tensor([1])).sum().backward()


def test_sparse_gradients_are_refused() -> None:
    run_threads(_sparse, 2)


def _kept_graphs(comm: Comm) -> None:
    """Ranks that keep other graphs alive than their peers still reduce in the same order."""
    model: Any = TinyDecoder()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    plain: Any = TinyDecoder()
    batches = token_batches(4, comm.size)
    kept = []
    for step, batch in enumerate(batches):
        model.zero_grad()
        if step == 1:
            unused = model.loss(batch[0])  # never backpropagated, kept by one rank only
            kept.append(unused if comm.rank == 0 else None)
        loss = model.loss(batch[comm.rank])
        loss.backward()
        kept.append(loss if comm.rank == 0 else None)
        assert not any(u.has_storage for u in model._shard_unit.schedule.units)
    terms = [torch.autograd.grad(plain.loss(b), list(plain.parameters())) for b in batches[-1]]
    for param, each in zip(model.parameters(), zip(*terms, strict=True), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), torch.stack(each).mean(0))


def test_what_a_rank_keeps_alive_does_not_change_the_order() -> None:
    run_threads(_kept_graphs, 2)


class _Merged(nn.Module):
    """The product of two parameters does not lead to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.arange(6.0).view(3, 2))
        self.up = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.down @ self.up)


def _leaf_input(comm: Comm) -> None:
    plain = _Merged()
    model = fully_shard(_Merged(), mesh=comm, reshard_after_forward=True)
    for reentrant in (None, True, False):
        x = torch.ones(2, 3, requires_grad=True)
        want = torch.autograd.grad(plain(x).square().sum(), [x, plain.down, plain.up])
        model.zero_grad()
        out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
        out.square().sum().backward()
        assert x.grad is not None
        found = [x.grad, model.down.grad.full_tensor(), model.up.grad.full_tensor()]
        for a, b in zip(want, found, strict=True):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_leaf_inputs_do_not_end_a_unit_early(world_size: int) -> None:
    run_threads(_leaf_input, world_size)


def _raises_midway(comm: Comm) -> None:
    """Another backward, a state dict, an optimizer: all right after a backward that raised."""
    model, first, second = _wrapped(comm)
    good = model(torch.tensor([3.0])).sum()
    bad = second(_Explode.apply(first(torch.tensor([3.0]))))  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError):
        bad.sum().backward()
    assert all(isinstance(v, ShardTensor) for v in model.state_dict().values())
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    with pytest.raises(KeyError):
        second(_Explode.apply(first(torch.tensor([3.0])))).sum().backward()  # type: ignore[no-untyped-call]
    good.backward()
    assert first.weight.grad is not None  # which the bad ones never reached
    assert first.weight.grad.full_tensor().item() == 6  # type: ignore[attr-defined]


def _busy(comm: Comm) -> None:
    """Freeing, and another backward, while a forward uses the parameters."""
    model, first, second = _wrapped(comm)

    def meddle(module: Any, args: Any) -> None:
        model.reshard()
        module.reshard()
        probe = torch.ones(1, requires_grad=True)
        (probe * 2).sum().backward()

    second.register_forward_pre_hook(meddle)
    _good_step(model, first, second)


class _Meddler(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "changed":
                self.weight.clamp_(max=0.5)
            elif self.how == "replaced":
                self.weight = nn.Parameter(self.weight * 2)
            elif self.how == "moved":
                self.weight.data = self.weight * 2
        return x * self.weight


def _changed_inside(comm: Comm) -> None:
    for how in ("changed", "replaced"):
        if how == "changed" and comm.size == 1:
            continue  # one rank changes its shard: nothing is lost
        model = fully_shard(_Meddler(how), mesh=comm)
        with pytest.raises(RuntimeError, match=f"weight: the parameter was {how} inside a forward"):
            model(torch.ones(4))
        model.how = ""
        unit: Any = model._shard_unit
        if how == "replaced" or not unit.groups[0].exposes_shard:
            assert model(torch.ones(4)).tolist() == [1, 1, 1, 1]


def _functional(comm: Comm) -> None:
    model = fully_shard(nn.Linear(2, 2, bias=False), mesh=comm)
    values = model.weight.full_tensor().detach()
    with pytest.raises(RuntimeError, match=r"weight: expected a parameter, got a Tensor"):
        torch.func.functional_call(model, {"weight": torch.zeros(2, 2)}, (torch.ones(1, 2),))
    assert torch.equal(model.weight.full_tensor(), values)


def _no_gradients_asked_for(comm: Comm) -> None:
    model, first, _ = _wrapped(comm)
    x = torch.tensor([3.0], requires_grad=True)
    for zero_fill in (False, True):
        model.set_reduce_scatter_unused_params(zero_fill)
        (gx,) = torch.autograd.grad(model(x).sum(), x)
        assert gx.item() == 4
        assert first.weight.grad is None


def _forgotten(comm: Comm) -> None:
    """zero_grad between unreduced microbatches, and a parameter frozen between them."""
    model, first, second = _wrapped(comm)
    model.set_requires_gradient_sync(False)
    model(torch.tensor([100.0])).sum().backward()
    model.zero_grad()
    model(torch.tensor([3.0])).sum().backward()
    second.weight.requires_grad_(False)
    model.set_requires_gradient_sync(True)
    model(torch.tensor([3.0])).sum().backward()
    assert first.weight.grad.full_tensor().item() == 12  # type: ignore[union-attr]
    assert second.weight.grad.full_tensor().item() == 6  # type: ignore[union-attr]


class _Table(nn.Module):
    """Returns its parameter, and a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(3, 2))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight, self.weight[1]


def _returns_parameters(comm: Comm) -> None:
    model = fully_shard(_Table(), mesh=comm, reshard_after_forward=True)
    whole, row = model()
    assert not model._shard_unit.has_storage or comm.size == 1
    assert whole.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert row.tolist() == [2, 3]
    (whole.sum() + row.sum()).backward()
    assert model.weight.grad.full_tensor().tolist() == [[1, 1], [2, 2], [1, 1]]
    with torch.no_grad():
        whole, _ = model()
    assert whole.sum().item() == 15


def _plain_and_sharded(comm: Comm) -> tuple[Any, Any]:
    """The same linear layer alone, and as a unit inside of another."""
    plain, inner = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    for each in (plain, inner):
        each.load_state_dict({"weight": torch.tensor([[1.0, 2.0], [3.0, 5.0]])})
    return plain, fully_shard(nn.Sequential(fully_shard(inner, mesh=comm)), mesh=comm)


def _gradient_with_a_graph(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.ones(1, 2, requires_grad=True)
    (gx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return x, gx


def _penalty(comm: Comm) -> None:
    """A gradient of a gradient, with another forward in between."""
    plain, model = _plain_and_sharded(comm)
    found = []
    for each in (plain, model):
        x, gx = _gradient_with_a_graph(each)
        each(torch.zeros(1, 2))
        gx.square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    model(torch.ones(1, 2)).sum().backward()
    assert not model[0]._shard_unit.has_storage or comm.size == 1


class _Boxed(nn.Module):
    """Takes its input inside an object, where a leaf stays a leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.merged = _Merged()

    def forward(self, box: Any) -> torch.Tensor:
        out: torch.Tensor = _Merged.forward(self.merged, box.value)
        return out


class _Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _leaf_in_object(comm: Comm) -> None:
    plain, model = _Merged(), fully_shard(_Boxed(), mesh=comm, reshard_after_forward=True)
    x = torch.ones(2, 3, requires_grad=True)
    want = torch.autograd.grad(plain(x).square().sum(), [x, plain.down, plain.up])
    model(_Box(x)).square().sum().backward()
    merged = model.merged
    found = [x.grad, merged.down.grad.full_tensor(), merged.up.grad.full_tensor()]
    for a, b in zip(want, found, strict=True):
        torch.testing.assert_close(b, a)


def _input_of_another_thread(comm: Comm) -> None:
    made: list[torch.Tensor] = []

    def make() -> None:
        value = torch.ones(2, 3, requires_grad=True)
        for _ in range(2_000):  # far ahead of this thread's count of nodes
            value = value * 1
        made.append(value)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    plain, model = _Merged(), fully_shard(_Merged(), mesh=comm, reshard_after_forward=True)
    want = torch.autograd.grad(plain(made[0].detach()).square().sum(), [plain.down, plain.up])
    model(made[0]).square().sum().backward()
    for a, b in zip(want, [model.down, model.up], strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a)


def _assigned_between(comm: Comm) -> None:
    model, first, second = _wrapped(comm)
    out = model(torch.tensor([3.0]))
    model.double().float()
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        out.sum().backward()
    _good_step(model, first, second)


class _HandsThrough(torch.autograd.Function):
    """Returns a view of its input, and needs the parameter in backward only."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (weight,) = ctx.saved_tensors
        return grad * weight, grad.sum(0)


class _Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _HandsThrough.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


def _view_of_input(comm: Comm) -> None:
    model = fully_shard(_Straight(), mesh=comm, reshard_after_forward=True)
    x = torch.ones(1, 2, requires_grad=True)
    model(x * 1).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2, 3]]
    assert model.weight.grad.full_tensor().tolist() == [1, 1]


def _shared_input(comm: Comm) -> None:
    """One tensor that many forwards read does not hold on to them."""
    model = fully_shard(_Straight(), mesh=comm, reshard_after_forward=True)
    context = torch.ones(1, 2, requires_grad=True) * 1
    for _ in range(5):
        model(context)
    hooks = context.grad_fn.metadata["shard_fsdp"]  # type: ignore[union-attr, index]
    assert len(hooks.live_ends()) <= 1


def _penalty_with_the_loss(comm: Comm) -> None:
    """The penalty's graph still needs the parameters after the loss's backward freed them."""
    plain, model = _plain_and_sharded(comm)
    found = []
    for each in (plain, model):
        x, gx = _gradient_with_a_graph(each)
        (each(torch.ones(1, 2)).sum() + gx.square().sum()).backward()
        found.append((x.grad, next(each.parameters()).grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    got: Any = found[1][1]
    torch.testing.assert_close(found[0][1], got.full_tensor(), rtol=1e-6, atol=0)
    model(torch.ones(1, 2))
    assert not model[0]._shard_unit.has_storage or comm.size == 1


def _moved_inside(comm: Comm) -> None:
    model = fully_shard(_Meddler("moved"), mesh=comm)
    with pytest.raises(RuntimeError, match="weight: the parameter was replaced inside a forward"):
        model(torch.ones(4))


def _slices(comm: Comm) -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), mesh=comm)
    part = model[:1]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    twice = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="one of them twice"):
        fully_shard([twice, twice], mesh=comm)


def _two_meshes(comm: Comm) -> None:
    """The root on each rank alone, a unit inside over all ranks: differences are seen there."""
    inner = fully_shard(_Choice(), mesh=comm)
    model = fully_shard(_Around(inner), mesh=SoloComm())
    if comm.size > 1:
        with pytest.raises(RuntimeError, match=r"inner\.a .*inner\.b .*got a gradient on some"):
            model(torch.ones(2), comm.rank == 0).sum().backward()
    model.zero_grad()
    model(torch.ones(2), True).sum().backward()
    assert inner.a.grad.full_tensor().tolist() == [1, 1]


class _Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return x * (self.a if first else self.b)


class _Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        out: torch.Tensor = self.inner(x * self.weight, first)
        return out


@pytest.mark.parametrize(
    "check",
    [
        _leaf_in_object,
        _input_of_another_thread,
        _assigned_between,
        _view_of_input,
        _shared_input,
        _slices,
        _two_meshes,
        _returns_parameters,
        _penalty,
        _penalty_with_the_loss,
        _moved_inside,
        _raises_midway,
        _busy,
        _changed_inside,
        _functional,
        _no_gradients_asked_for,
        _forgotten,
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_odd_moments(check: Any, world_size: int, shares_memory: bool) -> None:
    run_threads(check, world_size, shares_memory=shares_memory)
