"""Every world and way of cutting reads every other's checkpoint, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import inspect, load, save
from shard_comm import Comm
from shard_flat import ParamSpec, ShardTensor, plan_layout
from shard_testing import run_threads

WORLDS = [1, 2, 3, 4, 5, 8]
SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (7, 5),
    "bias": (3,),
    "scale": (),
    "none": (0, 4),
    "größe": (2, 3, 4),
}

Cut = Callable[[dict[str, torch.Tensor], Comm], dict[str, Any]]


def pieces(full: dict[str, torch.Tensor], comm: Comm, *, rows: bool) -> dict[str, Any]:
    """Cut as one group with one flat shard, between elements or between rows only."""
    specs = []
    for name, tensor in full.items():
        row = tensor[0].numel() if rows and tensor.ndim > 1 and len(tensor) else 1
        specs.append(ParamSpec(name, tuple(tensor.shape), tensor.dtype, block=row))
    layout = plan_layout(specs, comm.size, align_bytes=4)
    shard = torch.zeros(layout.shard_numel)
    result = {}
    for at, (spec, part) in enumerate(zip(specs, layout.pieces(comm.rank), strict=True)):
        local = shard[part.offset : part.offset + part.numel]
        local.copy_(full[spec.name].reshape(-1)[part.start : part.stop])
        result[spec.name] = ShardTensor(local, layout.shard_spec(comm.rank, at), comm=comm)
    return result


def replicated(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in full.items()}


def hybrid(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, Any]:
    """As many replicas as the smallest divisor of the world, each cut over the others."""
    replicas = next((n for n in range(2, comm.size + 1) if comm.size % n == 0), 1)
    return pieces(full, comm.split(comm.rank % replicas), rows=False)


STRATEGIES: dict[str, Cut] = {
    "full": lambda full, comm: pieces(full, comm, rows=False),
    "replicated": replicated,
    "hybrid": hybrid,
    "rows": lambda full, comm: pieces(full, comm, rows=True),
}


def weights(sign: float) -> dict[str, torch.Tensor]:
    result = {}
    at = 1
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        result[name] = sign * torch.arange(float(at), at + numel).view(shape)
        at += numel
    return result


def state_of(cut: Cut, comm: Comm, sign: float) -> dict[str, Any]:
    return {
        "model": cut(weights(sign), comm),
        "optim": {
            "state": {
                name: {"exp_avg": tensor} for name, tensor in cut(weights(2 * sign), comm).items()
            },
            "param_groups": [],
        },
    }


def values_of(state: dict[str, Any]) -> list[list[float]]:
    slots = [slots["exp_avg"] for slots in state["optim"]["state"].values()]
    tensors = [*state["model"].values(), *slots]
    held = [t.local if isinstance(t, ShardTensor) else t for t in tensors]
    return [tensor.reshape(-1).tolist() for tensor in held]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strategies")
    for name, cut in STRATEGIES.items():
        for world_size in WORLDS:

            def rank(
                comm: Comm, cut: Cut = cut, path: Path = folder / f"{name}-{world_size}"
            ) -> None:
                save(state_of(cut, comm, 1), path, comm=comm)

            run_threads(rank, world_size)
    return folder


@pytest.mark.parametrize("loaded_at", WORLDS)
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_all_read_all(checkpoints: Path, strategy: str, loaded_at: int) -> None:
    cut = STRATEGIES[strategy]
    paths = sorted(checkpoints.iterdir())
    assert len(paths) == len(WORLDS) * len(STRATEGIES)

    def rank(comm: Comm) -> list[str]:
        wrong = []
        template = state_of(cut, comm, 0)
        expected = values_of(state_of(cut, comm, 1))
        slots = [slot["exp_avg"] for slot in template["optim"]["state"].values()]
        for path in paths:
            for tensor in (*template["model"].values(), *slots):
                (tensor.local if isinstance(tensor, ShardTensor) else tensor).fill_(-1)
            load(template, path, comm=comm)
            if values_of(template) != expected:
                wrong.append(path.name)
        return wrong

    assert run_threads(rank, loaded_at) == [[]] * loaded_at


def test_the_strategies_store_differently(checkpoints: Path) -> None:
    """Else the pairs above would be one pair."""

    def starts(name: str) -> list[int]:
        records = {record.label: record for record in inspect(checkpoints / name).tensors}
        return [part.start for part in records["model: embed"].ranges]

    assert starts("replicated-4") == [0]
    assert starts("rows-8") == [0, 15, 30]
    assert starts("full-4") == [0, 16, 32]
    assert starts("full-8") == [0, 8, 16, 24, 32]
    assert starts("hybrid-4") == [0, 16, 32]
    files = [file.name for file in inspect(checkpoints / "hybrid-4").files]
    tensors = [name for name in files if name.endswith(".safetensors")]
    assert {name.partition("-r")[2][:5] for name in tensors} == {f"{n:05d}" for n in range(4)}
