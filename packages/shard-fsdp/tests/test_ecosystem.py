"""What programs written for torch's FSDP2 call on models, besides training them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from shard_comm import Comm
from shard_flat import Ragged, ShardTensor
from shard_fsdp import fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_ranks, token_batches
from shard_wrap import by_class

# Untyped: torch's annotations do not cover what these return.
get_model_state_dict: Any = helpers.get_model_state_dict
get_optimizer_state_dict: Any = helpers.get_optimizer_state_dict
set_model_state_dict: Any = helpers.set_model_state_dict
set_optimizer_state_dict: Any = helpers.set_optimizer_state_dict

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _wrapped(seed: int = 0) -> Any:
    model = TinyDecoder(seed=seed)
    fully_shard(model, policy=by_class(DecoderBlock))
    return model


def _trained(comm: Comm) -> tuple[Any, torch.optim.Optimizer, dict[str, torch.Tensor]]:
    model = _wrapped()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _step(comm, model, optimizer)
    return model, optimizer, {n: p.full_tensor().detach() for n, p in model.named_parameters()}


def _step(comm: Comm, model: Any, optimizer: torch.optim.Optimizer) -> None:
    model.loss(token_batches(1, comm.size)[0][comm.rank]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _check_model(model: Any, want: dict[str, torch.Tensor]) -> None:
    for name, param in model.named_parameters():
        assert isinstance(param, ShardTensor)
        assert torch.equal(param.full_tensor().detach(), want[name]), name


def _check_same_moments(a: Any, b: Any) -> None:
    """Both optimizers belong to models of the same structure."""
    mine, other = list(a.state.values()), list(b.state.values())
    assert len(mine) == len(other) > 0
    for x, y in zip(mine, other, strict=True):
        assert torch.equal(x["exp_avg"].to_local().flatten(), y["exp_avg"].to_local().flatten())
        assert x["step"] == y["step"]


def _parameters(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (comm.size,))
    model: Any = nn.Linear(3, 5, bias=False)
    fully_shard(model, mesh=mesh)
    weight = model.weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh == mesh
    (placement,) = weight.placements
    assert isinstance(placement, Ragged)
    assert weight.to_local().shape == (placement.stop - placement.start,)
    assert weight.full_tensor().shape == (5, 3)
    full = torch.arange(15.0).view(5, 3)
    cut = distribute_tensor(full, weight.device_mesh, weight.placements)
    assert torch.equal(cut.full_tensor(), full)
    with torch.no_grad():
        weight.copy_(cut)
    assert torch.equal(weight.full_tensor(), full)
    model.load_state_dict({"weight": nn.Parameter(cut)}, assign=True)
    assert isinstance(model.weight, ShardTensor)
    assert torch.equal(model.weight.full_tensor(), full)
    with torch.no_grad():
        model.weight.to_local().copy_(full * 2)  # the whole tensor: its own range is taken
    assert torch.equal(model.weight.full_tensor(), full * 2)


def _get_model(comm: Comm) -> None:
    model, _, want = _trained(comm)
    sharded = get_model_state_dict(model)
    assert all(isinstance(v, ShardTensor) for v in sharded.values())
    full = get_model_state_dict(model, options=FULL)
    assert all(torch.equal(full[name], value) for name, value in want.items())
    on_cpu = get_model_state_dict(model, options=FULL_ON_CPU)
    assert set(on_cpu) == (set(want) if comm.rank == 0 else set())
    part = get_model_state_dict(model, submodules={model.blocks[1]}, options=FULL)
    assert set(part) == {n for n in want if n.startswith("blocks.1.")}


def _set_model(comm: Comm) -> None:
    _, _, want = _trained(comm)
    for options, given in ((FULL, want), (FROM_RANK_0, want if comm.rank == 0 else {})):
        model = _wrapped(seed=9)
        set_model_state_dict(model, dict(given), options=options)
        _check_model(model, want)
    model = _wrapped(seed=9)
    partial = {n: v for n, v in want.items() if n != "norm.weight"}
    loose = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(partial), options=loose)
    _check_model(model, {**want, "norm.weight": torch.ones(24)})


def _optimizers(comm: Comm) -> None:
    model, optimizer, _ = _trained(comm)
    sharded = get_optimizer_state_dict(model, optimizer)
    assert isinstance(sharded["state"]["head.weight"]["exp_avg"], ShardTensor)
    full = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert full["state"]["head.weight"]["exp_avg"].shape == (61, 24)
    on_cpu = get_optimizer_state_dict(model, optimizer, options=FULL_ON_CPU)
    for options, given in ((FULL, full), (FROM_RANK_0, on_cpu)):
        twin = _wrapped()
        twin.load_state_dict(model.state_dict())
        resumed = torch.optim.AdamW(twin.parameters(), lr=0.5)
        given = copy.deepcopy(given)  # torch's helpers share step counters otherwise
        set_optimizer_state_dict(twin, resumed, given, options=options)
        assert resumed.param_groups[0]["lr"] == 1e-3
        _check_same_moments(optimizer, resumed)
    before = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    _step(comm, twin, resumed)
    _step(comm, model, optimizer)
    _check_model(twin, {n: p.full_tensor().detach() for n, p in model.named_parameters()})
    assert not torch.equal(before["head.weight"], model.head.weight.full_tensor())
    assert all(isinstance(s["exp_avg"], ShardTensor) for s in resumed.state.values())


def _save(comm: Comm, folder: str) -> None:
    model, optimizer, _ = _trained(comm)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp_save(state, checkpoint_id=folder)


def _load(comm: Comm, folder: str) -> dict[str, torch.Tensor]:
    model = _wrapped(seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    state = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }
    dcp_load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    found = {n: p.full_tensor().detach() for n, p in model.named_parameters()}
    for name, param in model.named_parameters():
        found[f"{name}#exp_avg"] = optimizer.state[param]["exp_avg"].full_tensor()
    return found


def _transforms(comm: Comm) -> None:
    """torch.func with respect to inputs; parameters are gathered outside of the transform."""
    plain = [nn.Linear(4, 4), nn.Linear(4, 4)]
    ours = copy.deepcopy(plain)
    for layer in ours:
        fully_shard(layer, mesh=comm, reshard_after_forward=True)
    one, two = nn.Sequential(*plain), fully_shard(nn.Sequential(*ours), mesh=comm)
    for layer, other in zip(plain, ours, strict=True):
        other.load_state_dict(layer.state_dict())
    x = torch.linspace(-1, 1, 12).view(3, 4)

    def loss(model: Any) -> Any:
        return lambda x: model(x).square().sum()

    transforms: list[Callable[[Any], Any]] = [
        lambda model: torch.func.vmap(model)(x),
        lambda model: torch.func.grad(loss(model))(x),
        lambda model: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
        lambda model: torch.func.hessian(loss(model))(x),
    ]
    for transform in transforms:
        torch.testing.assert_close(transform(two), transform(one), rtol=1e-6, atol=1e-7)


def _everything(comm: Comm) -> None:
    for check in (_parameters, _get_model, _set_model, _optimizers, _transforms):
        check(comm)
        comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torchs_helpers_work_on_our_models(world_size: int) -> None:
    run_ranks(_everything, world_size)


def test_torchs_checkpoints_move_between_world_sizes(tmp_path: Path) -> None:
    run_ranks(_save, 3, str(tmp_path))
    want = run_ranks(_load, 3, str(tmp_path))[0]
    assert float(want["head.weight#exp_avg"].abs().sum()) > 0
    for world_size in (1, 2):
        for found in run_ranks(_load, world_size, str(tmp_path)):
            assert all(torch.equal(found[name], value) for name, value in want.items())
