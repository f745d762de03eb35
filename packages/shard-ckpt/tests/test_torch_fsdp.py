"""Models and optimizers that torch's own FSDP shards."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shard_ckpt import convert, inspect, load, save, verify
from shard_comm import Comm, SoloComm
from shard_testing import run_ranks

# Untyped: torch's annotations do not cover what these return.
get_state_dict: Any = helpers.get_state_dict
set_state_dict: Any = helpers.set_state_dict


class _Net(nn.Module):
    """Sizes that no number of ranks here divides."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.down(self.up(x).relu()))
        return out


def _train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.linspace(-1, 1, 12).view(2, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _wrapped(mesh: DeviceMesh) -> Any:
    """Shard over all dimensions but ``tp``, which cuts the matrices first."""
    model: Any = _Net()
    if "tp" in (mesh.mesh_dim_names or ()):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    fsdp.fully_shard(model.up, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model


def _meshes(comm: Comm) -> dict[str, DeviceMesh]:
    """Plain, hybrid and tensor-parallel sharding, as far as ranks go."""
    meshes = {"plain": init_device_mesh("cpu", (comm.size,))}
    if comm.size % 2 == 0:
        half = comm.size // 2
        meshes["hybrid"] = init_device_mesh("cpu", (2, half), mesh_dim_names=("out", "in"))
        meshes["tensor"] = init_device_mesh("cpu", (half, 2), mesh_dim_names=("dp", "tp"))
    return meshes


def _full(node: Any) -> Any:
    if isinstance(node, DTensor):
        return node.full_tensor()
    if isinstance(node, dict):
        return {key: _full(item) for key, item in node.items()}
    return node


def _save_all(comm: Comm, folder: Path) -> dict[str, Any]:
    full = {}
    for name, mesh in _meshes(comm).items():
        model = _wrapped(mesh)
        optimizer = _train(model)
        states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
        save(states, folder / name, comm=comm)
        full[name] = _full(states)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has deprecated it
        old = fsdp.FullyShardedDataParallel(_Net(), device_id=torch.device("cpu"))
        optimizer = _train(old)
        kind = fsdp.StateDictType.FULL_STATE_DICT
        with fsdp.FullyShardedDataParallel.state_dict_type(old, kind):
            model_state = old.state_dict()
            optim_state = fsdp.FullyShardedDataParallel.optim_state_dict(old, optimizer)
    if comm.rank == 0:
        torch.save({"model": model_state, "optim": optim_state, "epoch": 2}, folder / "fsdp1.pt")
        full["fsdp1"] = {"model": model_state, "optim": optim_state}
    return full


def _load_all(comm: Comm, folder: Path) -> dict[str, list[str]]:
    """Return where what was loaded differs from what was saved."""
    found = {}
    for name, mesh in _meshes(comm).items():
        for source in ("plain", "hybrid", "tensor"):
            model = _wrapped(mesh)
            optimizer = _train(model)
            optimizer.param_groups[0]["lr"] = 0.7
            states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            loaded = load(states, folder / source, comm=comm)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=loaded["model"],
                optim_state_dict=loaded["optim"],
            )
            states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
            want = torch.load(folder / f"{source}.pt")
            found[f"{source} on {name}"] = _differing(_full(states), want)
    return found


def _differing(got: Any, want: Any, path: str = "") -> list[str]:
    if isinstance(want, torch.Tensor):
        return [] if torch.equal(got, want) else [path]
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        return [text for key in want for text in _differing(got[key], want[key], f"{path}/{key}")]
    return [] if got == want else [path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp")
    full = run_ranks(_save_all, 4, folder)[0]
    for name, states in full.items():
        torch.save(states, folder / f"{name}.pt" if name != "fsdp1" else folder / "unused")
    return folder, full


def test_fully_sharded_models_load_on_other_meshes(saved: tuple[Path, dict[str, Any]]) -> None:
    found = run_ranks(_load_all, 2, saved[0])[0]
    assert len(found) == 9
    assert {name: text for name, text in found.items() if text} == {}


def _on_some_ranks(comm: Comm, folder: Path) -> list[float]:
    """Save and load what ranks 0 and 1 hold whole, and rank 2 not at all."""
    mesh = DeviceMesh("cpu", [0, 1])
    full = torch.arange(6.0).view(2, 3)
    save({"model": {"w": distribute_tensor(full, mesh, [Replicate()])}}, folder, comm=comm)
    state = {"model": {"w": distribute_tensor(torch.zeros(2, 3), mesh, [Replicate()])}}
    load(state, folder, comm=comm)
    return state["model"]["w"].to_local().flatten().tolist()


def test_a_replica_on_some_ranks_is_theirs(tmp_path: Path) -> None:
    values = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert run_ranks(_on_some_ranks, 3, tmp_path / "there") == [values, values, []]
    plain = {"model": {"w": torch.zeros(2, 3)}}
    load(plain, tmp_path / "there", comm=SoloComm())
    assert plain["model"]["w"].flatten().tolist() == values


def test_they_are_stored_as_they_were_cut(saved: tuple[Path, dict[str, Any]]) -> None:
    folder, full = saved
    ranges = {}
    for name in ("plain", "hybrid", "tensor"):
        assert verify(folder / name) == ()
        records = {record.label: record for record in inspect(folder / name).tensors}
        ranges[name] = [part.runs for part in records["model: down.weight"].ranges]
        assert len(records) == 5 + 3 * 5
        template = {"model": {key: torch.zeros_like(t) for key, t in full[name]["model"].items()}}
        load(template, folder / name, comm=SoloComm(), strict=False)
        assert _differing(template["model"], full[name]["model"]) == []
    assert [(part.start, part.stop) for part in ranges["plain"]] == [
        (0, 20),
        (20, 40),
        (40, 60),
        (60, 70),
    ]
    written = dict.fromkeys(range(4), 0)  # of replicas, ranks 0 and 2 say, each writes a half
    for record in inspect(folder / "hybrid").tensors:
        for part in record.ranges:
            name = inspect(folder / "hybrid").files[part.file].name
            written[int(name.split("-")[1][1:])] += part.numel * (record.numel > 1)
    assert sum(written.values()) == 3 * 154
    assert [abs(written[rank] - written[rank + 2]) <= 1 for rank in (0, 1)] == [True, True]
    assert ranges["tensor"] == [
        (0, 35, 4, 10),
        (5, 40, 4, 10),
        (40, 65, 3, 10),
        (45, 70, 3, 10),
    ]


def test_a_full_state_dict_of_the_older_fsdp(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, full = saved
    convert(folder / "fsdp1.pt", tmp_path / "a")
    plain = _Net()
    optimizer = _train(plain)
    expected = plain.state_dict(), optimizer.state_dict()["state"]
    model = _Net()
    names = [name for name, _ in model.named_parameters()]
    slots = {name: {"exp_avg": torch.zeros_like(p)} for name, p in model.named_parameters()}
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optim": {"state": slots, "param_groups": []},
        "epoch": 0,
    }
    loaded = load(state, tmp_path / "a", comm=SoloComm(), strict=False)
    assert loaded["epoch"] == 2
    assert loaded["optim"]["param_groups"][0]["lr"] == 0.1
    assert loaded["optim"]["param_groups"][0]["params"] == names
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, full["fsdp1"]["model"][key]), key
        torch.testing.assert_close(tensor, expected[0][key])  # ranks sum in another order
    for number, name in enumerate(names):
        torch.testing.assert_close(slots[name]["exp_avg"], expected[1][number]["exp_avg"])
