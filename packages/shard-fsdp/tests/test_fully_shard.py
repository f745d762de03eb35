"""Wrapping: what a module looks like afterwards, and what is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import shard_fsdp
from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_fsdp import FSDPModule
from shard_testing import DecoderBlock, TinyDecoder, full_value, run_threads
from shard_wrap import by_class

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard


def test_class_name_and_parameters() -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=SoloComm())
    assert type(model).__name__ == "FSDPLinear"
    assert isinstance(model, nn.Linear)
    assert isinstance(model, FSDPModule)
    assert all(isinstance(p, (ShardTensor, nn.Parameter)) for p in model.parameters())
    assert [tuple(p.shape) for p in model.parameters()] == [(2, 3), (2,)]


def test_two_modules_of_one_class_share_the_wrapped_class() -> None:
    a, b = (fully_shard(nn.Linear(2, 2), mesh=SoloComm()) for _ in range(2))
    assert type(a) is type(b)


def _same_objects(comm: Comm) -> None:
    model: Any = fully_shard(TinyDecoder(), mesh=comm, policy=by_class(DecoderBlock))
    before = [id(p) for p in model.parameters()]
    inside: list[bool] = []
    model.blocks[0].register_forward_pre_hook(
        lambda module, args: inside.append(isinstance(module.qkv.weight, ShardTensor))
    )
    model.loss(torch.zeros(1, 4, dtype=torch.long)).backward()
    assert inside == [False]  # a forward sees full parameters
    assert [id(p) for p in model.parameters()] == before
    model.unshard()
    assert [id(p) for p in model.parameters()] == before
    model.reshard()


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_are_always_the_same_objects(world_size: int) -> None:
    run_threads(_same_objects, world_size)


def test_names_are_those_of_the_outermost_module() -> None:
    model: Any = TinyDecoder()
    for block in model.blocks:
        fully_shard(block, mesh=SoloComm())
    first = next(model.blocks[0].parameters())
    assert isinstance(first, ShardTensor)
    assert first.spec.name == "norm1.weight"
    fully_shard(model, mesh=SoloComm())
    for name, param in model.named_parameters():
        assert isinstance(param, ShardTensor)
        assert param.spec.name == name


def _values(comm: Comm) -> None:
    plain, model = TinyDecoder(seed=3), TinyDecoder(seed=3)
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert isinstance(got, ShardTensor)
        assert torch.equal(full_value(got), want)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_survive_sharding(world_size: int) -> None:
    run_threads(_values, world_size)


def test_the_plain_parameters_are_freed() -> None:
    import weakref

    model: Any = TinyDecoder()
    watched = [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    fully_shard(model, mesh=SoloComm(), policy=by_class(DecoderBlock))
    assert all(ref() is None for ref in watched)


def test_mixed_dtypes_and_frozen_parameters_make_groups() -> None:
    model: Any = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4)))
    model.b.to(torch.float64)
    model.c.requires_grad_(False)
    unit = fully_shard(model, mesh=SoloComm())._shard_unit
    kinds = [(g.layout.dtype, g.sharded_params[0].requires_grad) for g in unit.groups]
    assert kinds == [(torch.float32, True), (torch.float64, True), (torch.float32, False)]


def test_ignored_parameters_stay_plain() -> None:
    model: Any = nn.Linear(3, 2)
    fully_shard(model, mesh=SoloComm(), ignored_params={model.bias})
    assert isinstance(model.weight, ShardTensor)
    assert not isinstance(model.bias, ShardTensor)


def test_list_of_modules_is_one_unit() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    fully_shard([model[0], model[1]], mesh=SoloComm())
    assert model[0]._shard_unit is model[1]._shard_unit
    fully_shard(model, mesh=SoloComm())
    (group,) = model[0]._shard_unit.groups
    names = [p.spec.name for p in group.sharded_params]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fully_shard(nn.ModuleList([nn.Linear(2, 2)]), mesh=SoloComm()), "no forward"),
        (lambda: fully_shard([], mesh=SoloComm()), "empty list"),
        (
            lambda: fully_shard(fully_shard(nn.Linear(2, 2), mesh=SoloComm()), mesh=SoloComm()),
            "FSDPLinear: the module is wrapped already",
        ),
    ],
)
def test_refused_with_a_reason(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_child_after_parent_is_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(2, 2)), mesh=SoloComm())
    with pytest.raises(ValueError, match=r"weight: the parameter is sharded already"):
        fully_shard(model[0], mesh=SoloComm())


def test_not_a_module() -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module, got str"):
        fully_shard("model", mesh=SoloComm())


def _cast_after_sharding(comm: Comm) -> None:
    model = fully_shard(nn.Linear(3, 2), mesh=comm)
    model.load_state_dict({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    weight = model.weight
    assert model.to("cpu") is model
    model.double()
    assert model.weight is weight
    assert weight.dtype == torch.float64
    (group,) = model._shard_unit.groups
    assert group.shard.dtype == torch.float64
    if weight.local.numel():
        assert weight.local.data_ptr() == group._local(0).data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert full_value(weight).tolist() == [[0.5, 0.0, -0.5]] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_model_cast_after_sharding_trains(world_size: int) -> None:
    run_threads(_cast_after_sharding, world_size)


def test_buffers_stay_and_are_cast() -> None:
    model = fully_shard(nn.BatchNorm1d(3), mesh=SoloComm())
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [0, 0, 0]


def _state_dict(comm: Comm) -> None:
    model: Any = fully_shard(TinyDecoder(seed=1), mesh=comm, policy=by_class(DecoderBlock))
    state = model.state_dict()
    assert list(state) == list(TinyDecoder().state_dict())
    assert all(isinstance(v, ShardTensor) for v in state.values())
    pointers = [p.local.data_ptr() for p in model.parameters() if isinstance(p, ShardTensor)]

    saved = {k: v.clone() for k, v in state.items()}
    model.load_state_dict(TinyDecoder(seed=2).state_dict())  # full tensors
    assert torch.equal(full_value(model.head.weight), TinyDecoder(seed=2).head.weight)
    model.load_state_dict(saved)  # pieces
    assert torch.equal(full_value(model.head.weight), TinyDecoder(seed=1).head.weight)
    after = [p.local.data_ptr() for p in model.parameters() if isinstance(p, ShardTensor)]
    assert after == pointers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_dict_and_load_state_dict(world_size: int) -> None:
    run_threads(_state_dict, world_size)


def test_plain_copy_of_a_model_can_be_sharded_twice() -> None:
    model: Any = TinyDecoder()
    a, b = (fully_shard(copy.deepcopy(model), mesh=SoloComm()) for _ in range(2))
    assert torch.equal(full_value(a.head.weight), full_value(b.head.weight))


def test_an_optimizer_of_before_is_told_so() -> None:
    model = nn.Linear(2, 2)
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"weight: SGD holds the parameter as it was before"):
        early.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
