"""Mistakes are refused by name, and leave everything as it was."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shard_comm import Comm, SoloComm
from shard_flat import FullBuffer, ParamSpec, ShardSpec, ShardTensor, plan_layout, shard_tensor
from shard_optim import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Shampoo,
    ShardedOptimizer,
)
from shard_testing import run_threads

KINDS: list[Callable[..., Any]] = [
    SGD,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Adafactor,
    Muon,
    SOAP,
    Shampoo,
]
MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]


def leaf(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape))


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -0.1}, "expected lr >= 0, got -0.1"),
        ({"lr": float("nan")}, "expected lr >= 0, got nan"),
        ({"lr": torch.tensor(-1.0)}, "expected lr >= 0"),
        ({"betas": (0.9, 1.0)}, r"expected two betas in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (-0.1, 0.9)}, r"expected two betas in \[0, 1\)"),
        ({"betas": (0.9,)}, r"expected two betas, got \(0.9,\)"),
        ({"eps": -1e-8}, "expected eps >= 0"),
        ({"weight_decay": -0.1}, "expected weight_decay >= 0"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        AdamW([leaf(2)], **hyper)
    with pytest.raises(ValueError, match=rf"^group 1 \(w, ...\): {message}"):
        AdamW([{"params": [("v", leaf(2))]}, {"params": [("w", leaf(2))], **hyper}])


NUMBER = "to be a number or a scalar tensor, got"


@pytest.mark.parametrize(
    ("kind", "hyper", "message"),
    [
        *((kind, {"lr": "x"}, f"expected lr {NUMBER} 'x'") for kind in KINDS),
        *((kind, {"lr": None}, f"expected lr {NUMBER} None") for kind in KINDS),
        *(
            (kind, {"weight_decay": [0]}, rf"expected weight_decay {NUMBER} \[0\]")
            for kind in KINDS
        ),
        *(
            (kind, {"betas": 0.9}, "expected betas to be two numbers, got 0.9")
            for kind in KINDS
            if kind not in (Adafactor, SGD)
        ),
        (AdamW, {"lr": torch.ones(2)}, rf"expected lr {NUMBER} tensor\(\[1., 1.\]\)"),
        (AdamW, {"betas": "ab"}, "expected betas to be two numbers, got 'ab'"),
        (AdamW, {"betas": (0.9, None)}, r"expected betas to be two numbers, got \(0.9, None\)"),
        (SGD, {"dampening": "x"}, f"expected dampening {NUMBER} 'x'"),
        (Adafactor, {"eps": 1e-3}, "expected eps to be two numbers, got 0.001"),
        (Adafactor, {"d": None}, f"expected d {NUMBER} None"),
        (Muon, {"momentum": "x"}, f"expected momentum {NUMBER} 'x'"),
        (Muon, {"ns_coefficients": 3}, "expected ns_coefficients to be three numbers, got 3"),
        (Muon, {"ns_steps": 5.5}, "expected ns_steps to be an integer, got 5.5"),
        (
            SOAP,
            {"precondition_frequency": None},
            "expected precondition_frequency to be an integer",
        ),
        (SOAP, {"shampoo_beta": "x"}, f"expected shampoo_beta {NUMBER} 'x'"),
        (Shampoo, {"max_preconditioner_dim": "x"}, "expected max_preconditioner_dim to be an inte"),
        (Shampoo, {"shampoo_beta": "x"}, f"expected shampoo_beta {NUMBER} 'x'"),
    ],
)
def test_hyper_parameters_that_are_no_numbers(
    kind: Callable[..., Any], hyper: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=f"^{message}"):
        kind([leaf(2, 2)], **hyper)
    with pytest.raises(TypeError, match=rf"^group 0 \(w, ...\): {message}"):
        kind([{"params": [("w", leaf(2, 2))], **hyper}])


MAKERS: dict[str, Callable[[Any], Any]] = {
    **{kind.__name__: kind for kind in KINDS},
    "ShardedOptimizer": lambda params: ShardedOptimizer(params, AdamW, comm=SoloComm()),
    "EMA": EMA,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_list_of_parameters(kind: str) -> None:
    """A Sequential can be iterated over, and is no list of parameters either."""
    make, model = MAKERS[kind], nn.Sequential(nn.Linear(2, 2))
    expected = r"params: expected an iterable of parameters or of \(name, parameter\) pairs, got"
    for module in (model, model[0]):
        name = type(module).__name__
        ways = r"pass its named_parameters\(\) or parameters\(\)$"
        with pytest.raises(TypeError, match=f"^{expected} the module {name}; {ways}"):
            make(module)
    with pytest.raises(TypeError, match=rf"^{expected} a OrderedDict; pass its items\(\)"):
        make(model.state_dict())
    with pytest.raises(TypeError, match=f"^{expected} 0.1$"):
        make(0.1)
    with pytest.raises(TypeError, match=r"iterable of parameters, got one Parameter; put it into"):
        make(leaf(2))
    if kind != "EMA":
        with pytest.raises(TypeError, match=f"^group 0: {expected} the module Sequential"):
            make([{"params": model}])


@pytest.mark.parametrize("kind", [Muon, SOAP, Shampoo])
def test_what_is_no_communicator(kind: Callable[..., Any]) -> None:
    message = "^expected comm to be a Comm of shard_comm, got 'x'; comm_for"
    with pytest.raises(TypeError, match=message):
        kind([leaf(2, 2)], comm="x")
    wrong: Any = "x"
    with pytest.raises(TypeError, match=message):
        ShardedOptimizer([leaf(2)], torch.optim.SGD, comm=wrong)


def test_saved_hyper_parameters_that_are_no_numbers() -> None:
    optimizer = stepped([("w", leaf(2))])
    state = optimizer.state_dict()
    state["param_groups"][0]["betas"] = 0.9
    with pytest.raises(TypeError, match=r"^group 0: expected betas to be two numbers, got 0.9"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_no_parameters() -> None:
    with pytest.raises(ValueError, match="expected at least one parameter, got none"):
        AdamW([])
    parameters = nn.Linear(2, 2).parameters()
    list(parameters)
    with pytest.raises(ValueError, match="gives its parameters only once"):
        AdamW(parameters)


def test_a_parameter_listed_twice() -> None:
    shared, other = leaf(2), leaf(2)
    message = "^0.1: the parameter is already there as 0.0; list it once"
    with pytest.raises(ValueError, match=message):
        AdamW([shared, shared])
    with pytest.raises(ValueError, match=r"^b: the parameter is already there as a"):
        AdamW([{"params": [("a", shared)]}, {"params": [("b", shared)]}])
    optimizer = AdamW([other, shared])
    with pytest.raises(ValueError, match=r"^1\.0: the parameter is already there as 0\.1"):
        optimizer.add_param_group({"params": shared})
    assert len(optimizer.param_groups) == 1


def test_two_names_that_agree() -> None:
    with pytest.raises(ValueError, match=r"^w: two parameters have this name"):
        AdamW([("w", leaf(2)), ("w", leaf(2))])
    comm = SoloComm()
    first, second = (nn.Parameter(shard_tensor(torch.ones(2), comm=comm)) for _ in range(2))
    optimizer = AdamW([first, second])  # names by default, which only a state dict needs
    with pytest.raises(ValueError, match=r"^tensor: two parameters have this name; pass"):
        optimizer.state_dict()


def test_plain_and_sharded_versions_of_one_parameter(make_params: MakeParams) -> None:
    """By memory, as on one rank, and by name."""
    (sharded,) = make_params(SoloComm(), [torch.ones(4)])
    alias = nn.Parameter(sharded.local.view(2, 2))
    with pytest.raises(ValueError, match=r"shares memory with .* list one of them, the sharded"):
        AdamW([sharded, alias])
    with pytest.raises(ValueError, match=r"^p0: two parameters have this name"):
        AdamW([("p0", sharded), ("p0", leaf(4))])
    overlapping = torch.zeros(10)
    with pytest.raises(ValueError, match=r"^b: shares memory with a"):
        AdamW([("a", nn.Parameter(overlapping[:6])), ("b", nn.Parameter(overlapping[5:]))])


def test_gathered_parameters() -> None:
    """A view of a full buffer whose storage has been released."""
    layout = plan_layout([ParamSpec("w", (4,), torch.float32)], 1)
    full = FullBuffer(layout, torch.ones(4))
    gathered = nn.Parameter(full.views()[0])
    optimizer = AdamW([("layer.w", gathered)])
    full.release()
    message = r"^layer.w: its memory was released.*outside of a forward"
    with pytest.raises(ValueError, match=message):
        AdamW([("layer.w", gathered)])
    with pytest.raises(ValueError, match=message):
        optimizer.step()


def test_what_is_no_trainable_leaf() -> None:
    with pytest.raises(ValueError, match=r"^0\.1: expected a leaf, got the result of <MulBackward"):
        AdamW([leaf(2), leaf(2) * 2])
    with pytest.raises(TypeError, match=r"^0\.0: expected a tensor, got float"):
        AdamW([1.0])
    with pytest.raises(ValueError, match=r"^w: expected a dense tensor of a floating dtype"):
        AdamW([("w", nn.Parameter(torch.ones(2, dtype=torch.complex64)))])
    with pytest.raises(ValueError, match=r"^w: expected a dense tensor of a floating dtype"):
        AdamW([("w", nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False))])
    with pytest.raises(ValueError, match=r"shape \(4,\) with strides \(2,\); make the parameter"):
        AdamW([nn.Parameter(torch.zeros(8)[::2])])
    with pytest.raises(TypeError, match="set"):
        AdamW([{"params": {leaf(2)}}])
    with pytest.raises(TypeError, match="iterable"):
        AdamW(leaf(2))


def test_torchs_own_dtensor() -> None:
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    tensor = DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False)
    with pytest.raises(TypeError, match=r"^w: .* got torch's DTensor .*use torch.optim for it"):
        AdamW([("w", tensor)])


def test_gradients_that_do_not_fit() -> None:
    """Refused before any parameter of any group has moved."""
    comm = SoloComm()
    good, plain = leaf(4), leaf(4)
    sharded = nn.Parameter(shard_tensor(torch.ones(4), comm=comm, name="w"))
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    other_range = ShardTensor(torch.ones(2), ShardSpec("w", (4,), 0, 2, 0, 2), comm=comm)
    plain.grad_dtype = None  # torch lets gradients have other dtypes where told so
    cases: list[tuple[torch.Tensor, torch.Tensor | None, str]] = [
        (
            table.weight,
            table.weight.grad,
            "expected a dense gradient of torch.float32, got torch.s",
        ),
        (plain, torch.ones(4).double(), "expected a dense gradient of torch.float32, got torch.st"),
        (plain, shard_tensor(torch.ones(4), comm=comm), r"kind \(plain\), got a ShardTensor"),
        (sharded, torch.ones(4), r"kind \(a ShardTensor\), got plain"),
        (sharded, other_range, r"range \[0, 4\), got \[0, 2\) \(rank 0 of 1\)"),
    ]
    for param, grad, message in cases:
        optimizer = AdamW([{"params": [("good", good)]}, {"params": [("bad.one", param)]}])
        good.grad, param.grad = torch.ones(4), grad
        with pytest.raises(ValueError, match=f"^bad.one: .*{message}"):
            optimizer.step()
        assert good.tolist() == [1, 1, 1, 1]
        assert not optimizer.state


def stepped(params: Sequence[Any]) -> AdamW:
    optimizer = AdamW(params, lr=0.1)
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def change(state: dict[str, Any], name: str, slot: str, value: Any) -> None:
    state["state"][name] = {**state["state"][name], slot: value}


def edited(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    state = stepped([("a", leaf(2)), ("b", leaf(3))]).state_dict()
    edit(state)
    return state


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: change(s, "b", "exp_avg", torch.ones(2)), r"^b: expected exp_avg of shape \(3,"),
        (lambda s: s["state"]["b"].pop("exp_avg_sq"), r"^b: the state has no 'exp_avg_sq', only"),
        (lambda s: s["state"]["b"].pop("step"), r"^b: the state has no 'step'"),
        (lambda s: s["state"].update(c=s["state"]["a"]), r"^state for \['c'\], which no group"),
        (
            lambda s: s["param_groups"][0].update(params=["a", "c"]),
            r"missing \['b'\], unexpected \['c",
        ),
        (lambda s: s["param_groups"][0].update(params=["a"]), r"missing \['b'\], unexpected \[\]"),
        (lambda s: s["param_groups"][0].update(lr=-1.0), "^group 0: expected lr >= 0, got -1.0"),
        (
            lambda s: s["param_groups"][0].update(maximize=True),
            "^group 0: saved with maximize=True",
        ),
        (lambda s: s["param_groups"].append({"params": []}), "^expected 1 parameter groups, got 2"),
        (lambda s: s.pop("param_groups"), r"^expected a state dictionary with \['param_groups'\]"),
    ],
)
def test_state_that_does_not_fit_changes_nothing(
    edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    state = edited(edit)
    optimizer = stepped([("a", leaf(2)), ("b", leaf(3))])
    optimizer.step()
    before = optimizer.state_dict()
    values = {n: {k: v.clone() for k, v in own.items()} for n, own in before["state"].items()}
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert sorted(after["state"]) == ["a", "b"]
    for name, own in values.items():
        assert all(torch.equal(after["state"][name][slot], old) for slot, old in own.items())


@pytest.mark.parametrize("switch", ["amsgrad", "maximize"])
def test_state_of_a_torch_optimizer_that_computes_otherwise(switch: str) -> None:
    param = leaf(2)
    switches: dict[str, Any] = {switch: True}
    theirs = torch.optim.AdamW([param], **switches)
    with pytest.raises(ValueError, match=f"^group 0: saved with {switch}=True"):
        AdamW([param]).load_state_dict(theirs.state_dict())


def test_state_of_adam_fits_only_without_decay() -> None:
    param = leaf(2)
    AdamW([param]).load_state_dict(torch.optim.Adam([param]).state_dict())
    decayed = torch.optim.Adam([param], weight_decay=0.1)
    with pytest.raises(ValueError, match="decoupled_weight_decay=False"):
        AdamW([param]).load_state_dict(decayed.state_dict())


def test_positions_that_do_not_fit() -> None:
    theirs = torch.optim.AdamW([leaf(2), leaf(2)])
    with pytest.raises(ValueError, match=r"^group 0: expected 1 parameters, got 2"):
        AdamW([leaf(2)]).load_state_dict(theirs.state_dict())


def test_pieces_of_another_sharding(make_params: MakeParams) -> None:
    def rank(comm: Comm) -> dict[str, Any]:
        params = make_params(comm, [torch.ones(32)])
        return AdamW(params).state_dict(allocate=True)

    halves = run_threads(rank, 2)[1]
    (whole,) = make_params(SoloComm(), [torch.ones(32)])
    message = re.escape("p0: exp_avg is a piece [16, 32) of another sharding; load it with shard_c")
    with pytest.raises(ValueError, match=message):
        AdamW([whole]).load_state_dict(halves)
    with pytest.raises(ValueError, match=message):
        AdamW([("p0", leaf(32))]).load_state_dict(halves)
