"""Faults that users of other systems met, as cases R1 to R12 of the runtime, at 1 to 4 ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shard_fsdp
from shard_comm import Comm, GroupComm, Recorded
from shard_flat import ShardTensor
from shard_fsdp import FSDPModule, register_fsdp_forward_method
from shard_fsdp._reduce import GradReducer
from shard_testing import (
    DecoderBlock,
    Scale,
    TiedTable,
    TinyDecoder,
    full_grad,
    full_value,
    run_ranks,
    run_threads,
)
from shard_wrap import by_class, by_name

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard


def _mean(comm: Comm) -> float:
    """Of the numbers 1, 2, ... of the ranks."""
    return (comm.size + 1) / 2


# --- R1: an average that was a sum ---


def _average(comm: Comm) -> None:
    """Ranks contribute 1, 3, 5, ...: their mean is the number of ranks."""
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (1, 4, 5):
            model = fully_shard(Scale(torch.zeros(numel, dtype=dtype)), mesh=comm)
            for backward in (1, 2):  # gradients add up, means stay means
                x = torch.full((numel,), 2.0 * comm.rank + 1, dtype=dtype)
                model(x).sum().backward()
                assert full_grad(model.weight).tolist() == [backward * comm.size] * numel
            assert model.weight.grad.dtype == dtype
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            assert full_value(model.weight).tolist() == [-comm.size] * numel


# --- R2: tied and uneven ---


def _wrap_whole(comm: Comm, model: TiedTable) -> Any:
    return fully_shard(model, mesh=comm)


def _wrap_list(comm: Comm, model: TiedTable) -> Any:
    fully_shard([model.embed, model.head], mesh=comm)
    return fully_shard(model, mesh=comm)


def _wrap_planned(comm: Comm, model: TiedTable) -> Any:
    """Asked for as two units: the tie goes to the unit above."""
    fully_shard(model, mesh=comm, policy=by_name("embed") | by_name("head"))
    assert not isinstance(model.embed, FSDPModule)
    return model


def _tied(comm: Comm) -> None:
    for wrap in (_wrap_whole, _wrap_list, _wrap_planned):
        model = wrap(comm, TiedTable())
        (weight,) = model.parameters()
        assert model.embed.weight is model.head.weight is weight
        aliased: list[bool] = []
        model.embed.register_forward_hook(
            lambda m, args, out, model=model, aliased=aliased: aliased.append(
                m.weight is model.head.weight and not isinstance(m.weight, ShardTensor)
            )
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        for want in (0.5, 0.0):
            optimizer.zero_grad()
            model().backward()
            assert full_grad(weight).flatten().tolist() == [2.0] * 5
            optimizer.step()
            assert full_value(weight).flatten().tolist() == [want] * 5
        assert aliased == [True, True]


def _tied_across_units(comm: Comm) -> None:
    model = TiedTable()
    fully_shard(model.embed, mesh=comm)
    with pytest.raises(ValueError, match=r"head\.weight: tied to weight, .*one unit"):
        fully_shard(model, mesh=comm)
    with pytest.raises(ValueError, match=r"weight: tied to weight, .*one unit"):
        fully_shard(model.head, mesh=comm)


# --- R3: a tiny parameter in a nested unit ---


def _tiny(comm: Comm) -> None:
    for shape in ((1,), (1, 1), ()):
        for reshard in (True, False):
            inner = fully_shard(Scale(torch.ones(shape)), mesh=comm, reshard_after_forward=reshard)
            model = fully_shard(nn.Sequential(inner), mesh=comm, reshard_after_forward=reshard)
            x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
            out = model(x)
            out.sum().backward()
            assert out.flatten().tolist() == [1, 2, 3]
            assert full_grad(inner.weight).tolist() == torch.full(shape, 6.0).tolist()
            assert x.grad is not None
            assert x.grad.tolist() == [1, 1, 1]
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            assert full_value(inner.weight).tolist() == torch.full(shape, -2.0).tolist()


# --- R4: a checkpointed parent, a sharded child, two forwards ---


class _TwoLayers(nn.Module):
    """``m(x) = w2 * relu(w1 * x)`` with w1 = 2 and w2 = 3."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scale(torch.tensor([2.0]))
        self.second = Scale(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(torch.relu(self.first(x)))
        return out


def _checkpointed(comm: Comm) -> None:
    """The loss m(x)**2 is 36 at x = 1; its derivatives are 2 m dm."""
    for reentrant in (True, False):
        for units in (("first",), ("first", "second"), ("first", "second", "")):
            model = _TwoLayers()
            for name in units:
                fully_shard(model.get_submodule(name), mesh=comm, reshard_after_forward=True)
            x = torch.ones(1, requires_grad=True)
            first, second = (checkpoint(model, x, use_reentrant=reentrant) for _ in range(2))
            loss = (first * second).sum()
            loss.backward()
            assert loss.item() == 36
            assert full_grad(model.first.weight).item() == 36
            plain = model.second.weight.grad if units == ("first",) else None
            other = full_grad(model.second.weight) if plain is None else plain
            assert other.item() == 24
            assert x.grad is not None
            assert x.grad.item() == 72


# --- R5: ranks that use different parameters ---


class _Parts(nn.Module):
    """Rank 0's loss is twice the sum of ``a``, another's four times that of ``b``."""

    def __init__(self, b_numel: int) -> None:
        super().__init__()
        self.a = Scale(torch.ones(2))
        self.b = Scale(torch.ones(b_numel))

    def forward(self, use_a: bool) -> torch.Tensor:
        a, b = self.a(torch.ones(())), self.b(torch.ones(()))
        loss: torch.Tensor = 2 * a.sum() if use_a else 4 * b.sum()
        return loss


def _one_unit(comm: Comm) -> Any:
    return fully_shard(_Parts(2), mesh=comm)


def _unit_each(comm: Comm) -> Any:
    """Different losses reach different units, whose reductions differ in size."""
    return fully_shard(_Parts(50), mesh=comm, policy=by_class(Scale))


def _zero_filled(comm: Comm, wrap: Callable[[Comm], Any] = _one_unit) -> None:
    model = wrap(comm)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        model.zero_grad()
        model(comm.rank == 0).backward()
        a, b = full_grad(model.a.weight), full_grad(model.b.weight)
        assert a.tolist() == pytest.approx([2 / comm.size] * 2)
        assert b.tolist() == pytest.approx([4 * (comm.size - 1) / comm.size] * b.numel())


def _refused(comm: Comm, wrap: Callable[[Comm], Any] = _one_unit) -> None:
    model = wrap(comm)
    if comm.size > 1:
        with pytest.raises(RuntimeError, match="a gradient on some ranks only") as caught:
            model(comm.rank == 0).backward()
        message = str(caught.value)
        assert f"a.weight (1 of {comm.size} ranks)" in message
        assert f"b.weight ({comm.size - 1} of {comm.size} ranks)" in message
        assert "set_reduce_scatter_unused_params(True)" in message
        model.zero_grad()
    model(True).backward()  # the module stays usable
    assert full_grad(model.a.weight).tolist() == [2.0, 2.0]
    assert model.b.weight.grad is None


def _each_unit_zero_filled(comm: Comm) -> None:
    _zero_filled(comm, _unit_each)


def _each_unit_refused(comm: Comm) -> None:
    _refused(comm, _unit_each)


# --- R6: outputs that are views, changed in place ---


class _Viewing(nn.Module):
    """Returns a view of what a linear layer gave."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view(self.linear(x))


class _ChangesInPlace(nn.Module):
    def __init__(
        self,
        view: Callable[[torch.Tensor], torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.inner = _Viewing(view)
        self.outer = nn.Linear(3, 3, bias=False)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        self.change(y)
        out: torch.Tensor = self.outer(y * y)
        return out


VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: y.squeeze(0),
    lambda y: y.view(3),
    lambda y: y[0],
    lambda y: y.transpose(0, 1).flatten(),
    lambda y: y.unflatten(1, (1, 3))[:, 0],
]
CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: y.add_(1),
    lambda y: y.mul_(2),
    lambda y: y.relu_(),
]


def _views(comm: Comm) -> None:
    weight = torch.tensor([[1.0, 2.0, -3.0], [0.5, -1.0, 2.0], [3.0, 1.0, 1.0]])
    for view, change, nested in itertools.product(VIEWS, CHANGES, (False, True)):
        plain, model = (_ChangesInPlace(view, change) for _ in range(2))
        for each in (plain, model):
            each.load_state_dict({"inner.linear.weight": weight, "outer.weight": weight.t()})
        fully_shard(model.inner, mesh=comm, reshard_after_forward=True)
        if nested:
            fully_shard(model, mesh=comm, reshard_after_forward=True)
        for leaf in (True, False):
            found = []
            for each in (plain, model):
                each.zero_grad()
                x = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
                out = each(x if leaf else x * 1)
                out.sum().backward()
                found.append([out.detach(), x.grad, *(p.grad for p in each.parameters())])
            for want, got in zip(*found, strict=True):
                assert want is not None
                assert float(want.abs().sum()) > 0
                torch.testing.assert_close(
                    full_value(got) if isinstance(got, ShardTensor) else got, want
                )


# --- R7: second order ---


def _second_order(comm: Comm) -> None:
    """The gradient of sum(g @ W) with respect to g is the row sums of W."""
    layer = nn.Linear(3, 2, bias=False)
    layer.load_state_dict({"weight": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])})
    fully_shard(layer, mesh=comm, reshard_after_forward=True)
    model = fully_shard(nn.Sequential(layer), mesh=comm, reshard_after_forward=True)
    x = torch.ones(1, 3, requires_grad=True)
    g = torch.ones(1, 2, requires_grad=True)
    (gx,) = torch.autograd.grad(model(x), x, g, create_graph=True)
    assert gx.tolist() == [[5, 7, 9]]
    gx.sum().backward()
    assert g.grad is not None
    assert g.grad.tolist() == [[6, 15]]
    assert full_grad(layer.weight).tolist() == [[1, 1, 1], [1, 1, 1]]
    model.zero_grad()
    model(x).sum().backward()  # an ordinary step afterwards
    assert full_grad(layer.weight).tolist() == [[1, 1, 1], [1, 1, 1]]


def _penalty(comm: Comm) -> None:
    """Of f = (b a x)**2, the squared slope is 4 a**4 b**4 x**2; here a = 2, b = 3, x = 1."""
    for reshard in (True, False):
        layers = [Scale(torch.tensor([value])) for value in (2.0, 3.0)]
        for layer in layers:
            fully_shard(layer, mesh=comm, reshard_after_forward=reshard)
        model = fully_shard(nn.Sequential(*layers), mesh=comm, reshard_after_forward=reshard)
        x = torch.ones(1, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        assert slope.item() == 72
        assert x.grad is not None
        assert x.grad.item() == 8 * 2**4 * 3**4
        assert full_grad(layers[0].weight).item() == 16 * 2**3 * 3**4
        assert full_grad(layers[1].weight).item() == 16 * 2**4 * 3**3


# --- R8: a first forward that does not train ---


class _Failing(nn.Module):
    """Raises once, with its own and its child's parameters gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale(torch.tensor([3.0]))
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(self.weight * x)
        if self.fail:
            raise KeyError("inside")
        return out


def _forward_first(how: str, model: Any) -> None:
    x = torch.tensor([5.0])
    if how == "inference_mode":
        with torch.inference_mode():
            assert model(x).item() == 30
    elif how == "no_grad":
        with torch.no_grad():
            assert model(x).item() == 30
    elif how == "raises":
        model.fail = True
        with pytest.raises(KeyError, match="inside"):
            model(x)
        model.fail = False


def _inference_first(comm: Comm) -> None:
    for reshard in (True, False):
        for how in ("nothing", "inference_mode", "no_grad", "raises"):
            model = _Failing()
            fully_shard(model.inner, mesh=comm, reshard_after_forward=reshard)
            fully_shard(model, mesh=comm, reshard_after_forward=reshard)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            _forward_first(how, model)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.tensor([5.0])).sum().backward()
                assert full_grad(model.weight).item() == 15, how
                assert full_grad(model.inner.weight).item() == 10, how
                _forward_first(how, model)
            optimizer.step()
            with torch.inference_mode():  # 2 - 15 and 3 - 10: no stale buffer answers
                assert model(torch.ones(1)).item() == -13 * -7


# --- R9: methods other than forward ---


class _Generator(nn.Module):
    """Doubles and adds one: from 1 come 3, 7, 15, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Scale(torch.tensor([2.0]))
        self.bias = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x) + self.bias
        return out

    def generate(self, x: torch.Tensor, *, steps: int) -> list[float]:
        """Uses parameters by itself, through a child, and through forward."""
        values = []
        with torch.no_grad():
            for step in range(steps):
                x = self(x) if step % 2 else self.block(x) + self.bias
                values.append(x.item())
        return values

    def penalty(self) -> torch.Tensor:
        return (self.bias * self.bias).sum()


def _other_methods(comm: Comm) -> None:
    model: Any = _Generator()
    fully_shard(model.block, mesh=comm, reshard_after_forward=True)
    fully_shard(model, mesh=comm, reshard_after_forward=True)
    with pytest.raises(RuntimeError, match=r"bias: .*full_tensor\(\)"):
        model.generate(torch.ones(1), steps=2)
    register_fsdp_forward_method(model, "generate")
    register_fsdp_forward_method(model, "penalty")
    for _ in range(2):
        assert model.generate(torch.ones(1), steps=4) == [3, 7, 15, 31]
        model.zero_grad()
        (model(torch.tensor([5.0 * (comm.rank + 1)])).sum() + model.penalty()).backward()
        assert full_grad(model.block.weight).item() == 5 * _mean(comm)
        assert full_grad(model.bias).item() == 1 + 2
        assert isinstance(model.bias, ShardTensor)


# --- R10: adapters on a frozen model ---


class _Adapted(nn.Module):
    """99% of the elements are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16), requires_grad=False)
        self.adapter = nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.bfloat16() @ self.frozen).float() * self.adapter


def _adapters(comm: Comm) -> None:
    recorded = Recorded(comm)
    model = nn.Sequential(_Adapted(), _Adapted())
    for block in model:
        fully_shard(block, mesh=recorded)
    root = fully_shard(model, mesh=recorded)
    first, second = (block for block in model if isinstance(block, _Adapted))
    x = torch.full((2, 128), comm.rank + 1.0)
    for _ in range(2):
        model.zero_grad()
        recorded.reset()
        model(x).sum().backward()
        if comm.size > 1:
            sent = recorded.records["reduce_scatter"].payload_bytes
            trainable = 2 * 128 * 4
            assert trainable <= sent <= trainable + 2 * 16 * comm.size
        # each of 128 outputs is 128 * 128 times x, twice over the batch
        assert full_grad(second.adapter).tolist() == [2 * 128 * 128 * _mean(comm)] * 128
        assert first.frozen.grad is second.frozen.grad is None
    held = sum(
        data.nbytes
        for unit in root._shard_unit.schedule.units
        for group in unit.groups
        if isinstance(group.reducer, GradReducer)
        and (data := group.reducer._buffer._data) is not None
    )
    assert held <= 2 * (128 * 4 + 16 * comm.size)
    first.frozen.requires_grad_(True)
    model.zero_grad()
    model(x).sum().backward()
    # a weight of the first block reaches 128 outputs, twice over the batch
    assert first.frozen.grad is not None
    assert first.frozen.grad.dtype == torch.bfloat16
    assert full_grad(first.frozen).unique().tolist() == [2 * 128 * _mean(comm)]
    assert second.frozen.grad is None


# --- R11: weight decay by number of dimensions ---


def _decay_groups(model: nn.Module) -> tuple[list[str], list[str]]:
    named = list(model.named_parameters())
    return [n for n, p in named if p.ndim >= 2], [n for n, p in named if p.ndim < 2]


def _weight_decay(comm: Comm) -> None:
    model = fully_shard(TinyDecoder(), mesh=comm, policy=by_class(DecoderBlock))
    decayed, others = _decay_groups(TinyDecoder())
    assert others == [
        *(f"blocks.{block}.norm{norm}.weight" for block in (0, 1) for norm in (1, 2)),
        "norm.weight",
    ]
    assert "head.weight" in decayed
    assert _decay_groups(model) == (decayed, others)
    model.loss(torch.zeros(1, 4, dtype=torch.long)).backward()
    assert _decay_groups(model) == (decayed, others)
    grads = {name: param.grad.ndim for name, param in model.named_parameters()}
    assert [name for name, ndim in grads.items() if ndim < 2] == others


# --- R12: small first dimensions ---


class _Small(nn.Module):
    SHAPES: tuple[tuple[int, ...], ...] = ((1,), (3, 5), (9, 4), (), (0, 3))

    def __init__(self) -> None:
        super().__init__()
        for i, shape in enumerate(self.SHAPES):
            self.register_parameter(f"p{i}", nn.Parameter(self.value(i, shape)))

    @staticmethod
    def value(i: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * i

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squares = [(param * param).sum() for param in self.parameters()]
        return torch.stack(squares).sum() * x


def _small(comm: Comm) -> None:
    model = fully_shard(_Small(), mesh=comm)
    for group in model._shard_unit.groups:
        assert group.layout.padding_numel * 4 <= 16 * comm.size
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    # the loss is the squares' sum; at a mean factor of 1 a step halves every value
    model(torch.tensor(2 * (comm.rank + 1) / (comm.size + 1))).backward()
    for i, shape in enumerate(_Small.SHAPES):
        param = getattr(model, f"p{i}")
        want = _Small.value(i, shape)
        assert param.shape == want.shape
        assert torch.equal(full_value(param), want)
        torch.testing.assert_close(full_grad(param), 2 * want)
    optimizer.step()
    for i, shape in enumerate(_Small.SHAPES):
        torch.testing.assert_close(
            full_value(getattr(model, f"p{i}")), _Small.value(i, shape) / 2, rtol=1e-6, atol=0
        )


CASES: dict[str, list[Callable[[Comm], None]]] = {
    "R1": [_average],
    "R2": [_tied, _tied_across_units],
    "R3": [_tiny],
    "R4": [_checkpointed],
    "R5": [_zero_filled, _refused, _each_unit_zero_filled, _each_unit_refused],
    "R6": [_views],
    "R7": [_second_order, _penalty],
    "R8": [_inference_first],
    "R9": [_other_methods],
    "R10": [_adapters],
    "R11": [_weight_decay],
    "R12": [_small],
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, world_size: int) -> None:
    for check in CASES[case]:
        run_threads(check, world_size, timeout_s=20)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_case_in_shared_memory(case: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of any size stay where autograd put them, as large ones do."""
    monkeypatch.setattr("shard_fsdp._grad_buffer._KEPT_BYTES", 0)
    for check in CASES[case]:
        run_threads(check, world_size, timeout_s=20, shares_memory=True)


@pytest.mark.parametrize("world_size", [5, 6, 7, 8])
def test_r12_with_more_ranks_than_rows(world_size: int) -> None:
    run_threads(_small, world_size)


def _all_cases(comm: Comm) -> list[str]:
    for transport in (comm, GroupComm()):  # through memory, over Gloo
        for checks in CASES.values():
            for check in checks:
                check(transport)
                transport.barrier()  # the verdict of one case is not heard in the next
    return list(CASES)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_cases_over_processes(world_size: int) -> None:
    assert run_ranks(_all_cases, world_size) == [list(CASES)] * world_size
