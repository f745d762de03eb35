"""Meshes of several dimensions, and parameters that are DTensors of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from shard_comm import Comm, SoloComm, comm_for
from shard_flat import Ragged, ShardTensor
from shard_fsdp import DataParallelMeshDims, fully_shard
from shard_testing import run_ranks


def _mlp(mesh: DeviceMesh, tp: str | None) -> Any:
    """An MLP of DTensors over a whole mesh: cut along ``tp``, replicated along the rest."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for own, param in list(module.named_parameters(recurse=False)):
            placements: list[Placement] = [Replicate() for _ in range(mesh.ndim)]
            if tp is not None and f"{name}.{own}" != "2.bias":
                assert mesh.mesh_dim_names is not None
                dim = 1 if name == "2" else 0
                placements[mesh.mesh_dim_names.index(tp)] = Shard(dim)
            value = distribute_tensor(param.data, mesh, placements)
            module.register_parameter(own, nn.Parameter(value))

    return distribute_module(model, mesh, cut)


def _grads(
    mesh: DeviceMesh, tp: str | None, shard: Any, dims: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    model = _mlp(mesh, tp)
    shard(model[0], mesh=mesh, dp_mesh_dims=dims)
    shard(model, mesh=mesh, dp_mesh_dims=dims)
    names = mesh.mesh_dim_names
    assert names is not None
    over = [Replicate() if name == tp else Shard(0) for name in names]
    batch = distribute_tensor(torch.arange(32.0).view(4, 8) / 32, mesh, over)
    model(batch).square().mean().backward()
    return model, {n: p.grad.full_tensor() for n, p in model.named_parameters()}


def _check_named(mesh: DeviceMesh, tp: str | None, **dims: Any) -> None:
    theirs = torch_fsdp.DataParallelMeshDims(**dims)
    _, want = _grads(mesh, tp, torch_fsdp.fully_shard, theirs)
    for ours in (DataParallelMeshDims(**dims), theirs):
        model, got = _grads(mesh, tp, fully_shard, ours)
        for name, grad in got.items():
            # torch sums in another order where it flattens dimensions
            torch.testing.assert_close(grad, want[name], rtol=1e-6, atol=1e-8)
            assert grad.abs().max() > 1e-3
        weight = model[2].weight
        assert isinstance(weight, ShardTensor)
        assert isinstance(weight.placements[0], Ragged)
        assert weight.placements[1:] == (() if tp is None else (Shard(1),))
        start = _mlp(mesh, tp)
        assert torch.equal(weight.full_tensor(), start[2].weight.full_tensor())


def _dimensions(comm: Comm) -> None:
    flat = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _check_named(flat, "tp", shard="dp")
    _check_named(flat, "tp", replicate="dp")
    _check_named(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), None, shard="dp")
    names = ("pods", "dp", "tp")
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=names)
    _check_named(deep, "tp", shard="dp", replicate="pods")
    _check_named(deep, "tp", shard=("pods", "dp"))


def _refusals(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def refused(match: str, placements: Any, of: DeviceMesh, **kwargs: Any) -> None:
        model: Any = nn.Linear(4, 4)
        local = torch.ones(2, 4)
        value = DTensor.from_local(local, of, placements, run_check=False)
        model.weight = nn.Parameter(value)
        with pytest.raises(ValueError, match=match):
            fully_shard(model, **kwargs)
        assert model.weight.data_ptr() == value.data_ptr()
        assert type(model) is nn.Linear

    tp = mesh["tp"]
    refused(
        "weight: expected a DTensor placed by Shard and Replicate", [Partial()], tp, mesh=mesh["dp"]
    )
    refused(r"weight: .* shares ranks \[\d, \d\] with", [Shard(0)], tp, mesh=tp)
    refused(r"weight: .* shares ranks", [Shard(0)], tp)
    refused("weight: .* no DeviceMesh beside it", [Shard(0)], tp, mesh=SoloComm())
    nameless = init_device_mesh("cpu", (4,))
    refused("weight: .* with mesh_dim_names", [Shard(0)], nameless, mesh=mesh["dp"])
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    by_name = DataParallelMeshDims(shard="dp")
    refused(
        "weight: expected a DTensor of the mesh",
        [Replicate(), Shard(0)],
        other,
        mesh=mesh,
        dp_mesh_dims=by_name,
    )
    refused(
        "weight: expected Replicate.. over .*'dp'",
        [Shard(0), Shard(0)],
        mesh,
        mesh=mesh,
        dp_mesh_dims=by_name,
    )
    for bad in (DataParallelMeshDims(shard="pp"), DataParallelMeshDims(shard="dp", replicate="dp")):
        with pytest.raises(
            ValueError, match=r"dp_mesh_dims: expected different names out of \('dp', "
        ):
            fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=bad)
    with pytest.raises(ValueError, match=r"weight: expected a DTensor of .*, got a plain tensor"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, dp_mesh_dims=by_name)
    for nothing in (None, nameless, comm_for()):
        with pytest.raises(
            ValueError, match="dp_mesh_dims: expected mesh= to be a DeviceMesh with"
        ):
            fully_shard(nn.Linear(2, 2), mesh=nothing, dp_mesh_dims=by_name)


def _everything(comm: Comm) -> None:
    _refusals(comm)
    comm.barrier()
    _dimensions(comm)


def test_named_dimensions_are_those_of_torch() -> None:
    run_ranks(_everything, 4)


def test_dimensions_must_be_given() -> None:
    with pytest.raises(ValueError, match="expected shard= or replicate=, got neither"):
        DataParallelMeshDims()
