"""torch.optim on ShardTensors: the parameters and states that it makes of whole tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_flat import ShardTensor, shard_tensor

OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SHAPES = [(1,), (3, 5), (9, 4), (), (0, 3)]
STEPS = 3

ANY_FORM: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **kw: torch.optim.SGD(p, lr=0.1, **kw),
    "sgd_nesterov": lambda p, **kw: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **kw
    ),
    "adam": lambda p, **kw: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, **kw),
    "adamw": lambda p, **kw: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **kw),
    "adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
}
TENSOR_LR: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw_tensor_lr": lambda p, **kw: torch.optim.AdamW(p, lr=torch.tensor(0.1), **kw),
}
LOOPED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rmsprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.9, **kw),
    "adadelta": lambda p, **kw: torch.optim.Adadelta(p, lr=0.1, **kw),
    "adamax": lambda p, **kw: torch.optim.Adamax(p, lr=0.1, **kw),
    "nadam": lambda p, **kw: torch.optim.NAdam(p, lr=0.1, **kw),
    "radam": lambda p, **kw: torch.optim.RAdam(p, lr=0.1, **kw),
    "asgd": lambda p, **kw: torch.optim.ASGD(p, lr=0.1, **kw),
    "rprop": lambda p, **kw: torch.optim.Rprop(p, lr=0.1, **kw),
}
FORMS: dict[str, dict[str, Any]] = {
    "for": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    *((name, make, form) for name, make in ANY_FORM.items() for form in FORMS),
    *((name, make, form) for name, make in TENSOR_LR.items() for form in ("for", "fused")),
    *((name, make, form) for name, make in LOOPED.items() for form in ("for", "foreach")),
]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def whole(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if isinstance(tensor, ShardTensor) else tensor
    return full.detach()


def train(
    make: Make, cut: Callable[[torch.Tensor, str], torch.Tensor], *, scalar: bool = True
) -> list[list[torch.Tensor]]:
    """Take some steps; return whole parameters and whole states."""
    chosen = [i for i, shape in enumerate(SHAPES) if shape or scalar]
    params = [nn.Parameter(cut(values(0)[i], f"p{i}")) for i in chosen]
    optimizer = make(params)
    for step in range(STEPS):
        grads = values(step + 1)
        for i, param in zip(chosen, params, strict=True):
            param.grad = cut(grads[i], f"p{i}")
        optimizer.step()
    states = [
        [whole(v) for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)]
        for p in params
    ]
    return [[whole(p), *state] for p, state in zip(params, states, strict=True)]


def plain(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.clone()


@pytest.mark.parametrize(
    ("name", "make", "form"), CASES, ids=[f"{name}-{form}" for name, _, form in CASES]
)
def test_steps_are_those_of_the_whole_tensors(
    name: str, make: Callable[..., torch.optim.Optimizer], form: str, on_ranks: OnRanks
) -> None:
    def build(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return make(params, **FORMS[form])

    scalar = name != "rprop"  # it writes through a mask, and a scalar's mask needs another shape
    expected = train(build, plain, scalar=scalar)
    sizes = (1, 2, 4) if name.startswith("adamw") else (2,)
    for size in sizes:

        def sharded(comm: Any) -> list[list[torch.Tensor]]:
            return train(build, lambda t, n: shard_tensor(t, comm=comm, name=n), scalar=scalar)

        for result in on_ranks(size, sharded):
            for ours, theirs in zip(result, expected, strict=True):
                assert len(ours) == len(theirs)
                for a, b in zip(ours, theirs, strict=True):
                    # Vector kernels and their tails may round differently, nothing else may.
                    torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
    assert not torch.equal(expected[1][0], values(0)[1])


def test_sharded_and_plain_parameters_share_an_optimizer(on_ranks: OnRanks) -> None:
    def run(comm: Any, form: str) -> list[torch.Tensor]:
        def cut(tensor: torch.Tensor, name: str) -> torch.Tensor:
            return tensor.clone() if name == "p2" else shard_tensor(tensor, comm=comm, name=name)

        return [r[0] for r in train(lambda p: torch.optim.AdamW(p, 0.1, **FORMS[form]), cut)]

    expected = [r[0] for r in train(lambda p: torch.optim.AdamW(p, 0.1), plain)]
    for form in FORMS:
        for result in on_ranks(2, partial(run, form=form)):
            torch.testing.assert_close(result, expected)


class Operators(TorchDispatchMode):
    """Counts the operators that a program calls on ShardTensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(t, ShardTensor) for t in types)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_a_step_costs_as_many_calls_for_many_parameters_as_for_one(
    form: str, on_ranks: OnRanks
) -> None:
    def calls(comm: Any) -> list[int]:
        counts = []
        for number in (1, 40):
            params = [nn.Parameter(shard_tensor(torch.ones(8), comm=comm)) for _ in range(number)]
            for param in params:
                param.grad = shard_tensor(torch.ones(8), comm=comm)
            optimizer = torch.optim.AdamW(params, **FORMS[form])
            optimizer.step()
            with Operators() as operators:
                optimizer.step()
            counts.append(operators.count)
        assert comm.calls == []  # and nobody talked
        return counts

    for one, many in on_ranks(2, calls):
        assert one == many > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_plain_gradient_is_refused_by_name(form: str, on_ranks: OnRanks) -> None:
    """Such as autograd leaves behind where the parameter was summed and nothing else."""

    def step(comm: Any) -> list[float]:
        param = nn.Parameter(shard_tensor(torch.ones(3, 5), comm=comm, name="w"))
        param.sum().backward()
        assert type(param.grad) is torch.Tensor
        optimizer = torch.optim.AdamW([param], **FORMS[form])
        with pytest.raises(RuntimeError, match=r"w: .*mixes a ShardTensor with a Tensor"):
            optimizer.step()
        return whole(param).flatten().tolist()

    for values_left in on_ranks(2, step):
        assert values_left == pytest.approx([1.0] * 15, abs=1e-4)  # decay alone may have happened


def test_gradients_of_other_cuts_are_refused_by_name(on_ranks: OnRanks) -> None:
    def step(comm: Any) -> None:
        param = nn.Parameter(shard_tensor(torch.ones(3, 5), comm=comm, name="w"))
        param.grad = torch.zeros_like(param)
        with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
            param.grad = torch.ones(8)
        optimizer = torch.optim.SGD([param], lr=1.0)
        optimizer.step()
        assert whole(param).sum() == 15

    on_ranks(2, step)


REFUSED: dict[str, Make] = {
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "muon": lambda p: torch.optim.Muon(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p),
}


@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_whole_matrices_are_refused_by_name(
    name: str, on_ranks: OnRanks
) -> None:
    def step(comm: Any) -> None:
        param = nn.Parameter(shard_tensor(torch.ones(4, 6), comm=comm, name="w"))
        param.grad = shard_tensor(torch.ones(4, 6), comm=comm, name="w")
        optimizer = REFUSED[name]([param])
        with pytest.raises(RuntimeError, match=r"w: .*full_tensor\(\)"):
            optimizer.step(lambda: 0.0)
        assert whole(param).flatten().tolist() == [1.0] * 24

    on_ranks(2, step)


def test_states_load_back(on_ranks: OnRanks) -> None:
    def step(comm: Any) -> list[list[float]]:
        def make() -> tuple[nn.Parameter, torch.optim.Optimizer]:
            param = nn.Parameter(shard_tensor(torch.ones(6), comm=comm, name="w"))
            param.grad = shard_tensor(torch.arange(6.0), comm=comm, name="w")
            return param, torch.optim.AdamW([param], lr=0.1)

        first, optimizer = make()
        optimizer.step()
        optimizer.step()
        second, other = make()
        other.step()
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            second.copy_(first)
        assert isinstance(other.state[second]["exp_avg"], ShardTensor)
        optimizer.step()
        other.step()
        return [whole(first).tolist(), whole(second).tolist()]

    for first, second in on_ranks(2, step):
        assert first == second
        assert first[0] != first[1]


def test_moving_averages_of_a_module(on_ranks: OnRanks) -> None:
    def average(comm: Any) -> list[float]:
        model = nn.Module()
        model.w = nn.Parameter(shard_tensor(torch.arange(6.0), comm=comm, name="w"))
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
        ema.update_parameters(model)
        with torch.no_grad():
            model.w.zero_()
        ema.update_parameters(model)
        assert ema.module.w is not model.w
        return whole(ema.module.w).tolist()

    for averaged in on_ranks(2, average):
        assert averaged == [0.0, 0.75, 1.5, 2.25, 3.0, 3.75]
