"""Saved at one number of ranks, loaded at another, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from shard_ckpt import load, save, verify
from shard_comm import Comm, SoloComm
from shard_flat import ParamSpec, ShardSpec, ShardTensor, plan_layout
from shard_testing import STORED_DTYPES, run_threads

WORLDS = [1, 2, 3, 4, 5, 8]

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (5, 3),
    "one": (1,),
    "scalar": (),
    "nothing": (0, 3),
    "odd": (7, 11),
    "größe.行列": (3, 5, 7),
    "six": (6,),
    "wide": (2, 1000),
}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    held = tensor.local if isinstance(tensor, ShardTensor) else tensor.detach()
    flat = held.contiguous().view(-1).view(torch.uint8)
    values: list[int] = flat.tolist()
    return values


def sharded(full: dict[str, torch.Tensor], comm: Comm) -> dict[str, ShardTensor]:
    """Cut as one group: pieces are views of one flat shard and begin in the middle of rows."""
    specs = [ParamSpec(name, tuple(t.shape), t.dtype) for name, t in full.items()]
    itemsize = specs[0].dtype.itemsize
    layout = plan_layout(specs, comm.size, align_bytes=itemsize)
    shard = torch.zeros(layout.shard_numel * itemsize, dtype=torch.uint8).view(specs[0].dtype)
    result = {}
    for at, (spec, part) in enumerate(zip(specs, layout.pieces(comm.rank), strict=True)):
        local = shard[part.offset : part.offset + part.numel]
        flat = full[spec.name].reshape(-1)[part.start : part.stop]
        local.view(torch.uint8).copy_(flat.view(torch.uint8))
        result[spec.name] = ShardTensor(local, layout.shard_spec(comm.rank, at), comm=comm)
    return result


def make_state(comm: Comm, *, seed: int) -> dict[str, Any]:
    """Sharded fp32 and bf16 groups with optimizer state, and replicated tensors of every dtype."""
    full = {n: random_bits(s, torch.float32, seed + at) for at, (n, s) in enumerate(SHAPES.items())}
    half = {f"half.{n}": random_bits(s, torch.bfloat16, seed) for n, s in SHAPES.items()}
    exp_avg = sharded({n: t.flip(0) if t.ndim else t for n, t in full.items()}, comm)
    replicated: dict[str, Any] = {
        str(dtype): random_bits((3, 5), dtype, seed) for dtype in STORED_DTYPES
    }
    replicated["0-dim"] = random_bits((), torch.float8_e5m2, seed)
    replicated["empty"] = random_bits((2, 0), torch.int16, seed)
    replicated["big"] = random_bits((300, 1001), torch.float32, seed)
    replicated["strided"] = random_bits((4, 6), torch.int64, seed).t()
    return {
        "model": {**sharded(full, comm), **sharded(half, comm)},
        "optim": {
            "state": {
                name: {"step": random_bits((), torch.float32, seed), "exp_avg": exp_avg[name]}
                for name in SHAPES
            },
            "param_groups": [{"lr": 0.1 * seed, "params": list(SHAPES)}],
        },
        "buffers": replicated,
        "step": seed,
    }


def tensors_of(node: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return {path: node}
    items = node.items() if isinstance(node, dict) else ()
    return {p: t for key, item in items for p, t in tensors_of(item, f"{path}/{key}").items()}


def differing(got: Any, expected: Any) -> list[str]:
    left, right = tensors_of(got), tensors_of(expected)
    assert left.keys() == right.keys()
    return [path for path, tensor in left.items() if bits(tensor) != bits(right[path])]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    for world_size in WORLDS:
        path = folder / str(world_size)
        run_threads(
            lambda comm, path=path: save(make_state(comm, seed=1), path, comm=comm), world_size
        )
    return folder


@pytest.mark.parametrize("loaded_at", WORLDS)
@pytest.mark.parametrize("saved_at", WORLDS)
def test_any_world_reads_any_other(checkpoints: Path, saved_at: int, loaded_at: int) -> None:
    def rank(comm: Comm) -> tuple[list[str], int, float]:
        template = make_state(comm, seed=2)
        expected = make_state(comm, seed=1)
        assert len(differing(template, expected)) > 20
        out = load(template, checkpoints / str(saved_at), comm=comm)
        return differing(out, expected), out["step"], out["optim"]["param_groups"][0]["lr"]

    assert run_threads(rank, loaded_at) == [([], 1, 0.1)] * loaded_at


@pytest.mark.parametrize("world_size", WORLDS)
def test_every_world_is_readable_by_stock_tools_and_verifies(
    checkpoints: Path, world_size: int
) -> None:
    path = checkpoints / str(world_size)
    assert verify(path) == ()
    expected = make_state(SoloComm(), seed=1)
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for file_path in sorted(path.glob("model-*.safetensors")):
        with safe_open(file_path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                name, _, extent = key.partition("@")
                start = int(extent.split(":")[0]) if extent else 0
                parts.setdefault(name, []).append((start, file.get_tensor(key).view(-1)))
    assert parts.keys() == expected["model"].keys()
    for name, found in parts.items():
        whole = torch.cat([tensor for _, tensor in sorted(found, key=lambda pair: pair[0])])
        assert bits(whole) == bits(expected["model"][name]), name


def cut(full: torch.Tensor, comm: Comm, share: int, origin: int = 0) -> ShardTensor:
    """Cut so that rank ``r`` holds ``[r * share - origin, (r + 1) * share - origin)``."""
    shape = tuple(full.shape)
    start, stop = ShardSpec("w", shape, 0, 0, origin, share).range_of(comm.rank)
    spec = ShardSpec("w", shape, start, stop, origin, share)
    return ShardTensor(full.reshape(-1)[start:stop].clone(), spec, comm=comm)


def even(full: torch.Tensor, comm: Comm) -> ShardTensor:
    return cut(full, comm, max(-(-full.numel() // comm.size), 1))


class TestCase3:
    """Empty shards and cuts in the middle of rows."""

    @pytest.mark.parametrize("saved_at", range(1, 9))
    def test_0_to_7_elements_on_1_to_8_ranks(self, tmp_path: Path, saved_at: int) -> None:
        shapes = [(0,), (1,), (2, 1), (3,), (2, 2), (5,), (2, 3), (7,), (1, 1, 1), (3, 0)]
        full = {str(s): torch.arange(1.0, 1 + torch.Size(s).numel()).view(s) for s in shapes}

        def saved(comm: Comm) -> None:
            state = {name: even(tensor, comm) for name, tensor in full.items()}
            save({"m": state}, tmp_path / "a", comm=comm)

        def loaded(comm: Comm) -> list[str]:
            template = {n: even(torch.zeros_like(tensor), comm) for n, tensor in full.items()}
            load({"m": template}, tmp_path / "a", comm=comm)
            return differing(template, {n: even(tensor, comm) for n, tensor in full.items()})

        run_threads(saved, saved_at)
        for loaded_at in range(1, 9):
            assert run_threads(loaded, loaded_at) == [[]] * loaded_at

    @settings(max_examples=20, deadline=None)
    @given(st.data())
    def test_any_cuts(self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
        numel = data.draw(st.integers(0, 12))
        full = torch.arange(1, numel + 1, dtype=torch.int16)
        layouts = []
        for _ in range(2):
            world_size = data.draw(st.integers(1, 5))
            share = data.draw(st.integers(max(-(-numel // world_size), 1), numel + 2))
            origin = data.draw(st.integers(0, world_size * share - numel))
            layouts.append((world_size, share, origin))
        path = tmp_path_factory.mktemp("cuts") / "a"

        def saved(comm: Comm, share: int, origin: int) -> None:
            save({"m": {"w": cut(full, comm, share, origin)}}, path, comm=comm)

        def loaded(comm: Comm, share: int, origin: int) -> list[int]:
            template = cut(torch.zeros_like(full), comm, share, origin)
            load({"m": {"w": template}}, path, comm=comm)
            values: list[int] = template.local.tolist()
            return values

        run_threads(saved, *layouts[0])
        parts = run_threads(loaded, *layouts[1])
        assert [value for part in parts for value in part] == full.tolist()
