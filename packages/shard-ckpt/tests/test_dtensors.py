"""DTensors of torch, saved and loaded by the ranks that hold them, on any mesh."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shard_ckpt import (
    FileRecord,
    Range,
    TensorRecord,
    export_hf,
    inspect,
    load,
    reindex,
    save,
    save_async,
    verify,
)
from shard_ckpt._commit import Manifest, build_index
from shard_ckpt._index import encode_index
from shard_ckpt._leaf import Leaf
from shard_ckpt._marker import read_index
from shard_ckpt._runs import Box, box_runs
from shard_comm import Comm, SoloComm
from shard_flat import Outer, ParamSpec, ShardTensor, plan_layout
from shard_testing import run_threads

FULL = {
    "matrix": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
    "cube": torch.arange(3 * 4 * 5, dtype=torch.bfloat16).view(3, 4, 5),
    "größe": torch.arange(4, dtype=torch.int64),
    "scalar": torch.tensor(3.0),
    "none": torch.zeros(0, 4),
}

Cut = tuple[tuple[int, ...], tuple[Placement, ...]]
"""Shape of the mesh and a placement per dimension."""

CUTS: dict[str, Cut] = {
    "alone": ((1,), (Shard(0),)),
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "replicas": ((3,), (Replicate(),)),
    "hybrid": ((2, 2), (Replicate(), Shard(0))),
    "hybrid columns": ((2, 2), (Shard(1), Replicate())),
    "tiles": ((2, 3), (Shard(0), Shard(1))),
    "tiles of tiles": ((2, 2, 2), (Shard(1), Shard(0), Shard(1))),
    "rows of rows": ((2, 2), (Shard(0), Shard(0))),
}


def placed(full: torch.Tensor, comm: Comm, cut: Cut) -> Any:
    """Cut a tensor as torch would, without process groups; dimensions that it lacks are whole."""
    shape, wanted = cut
    ranks = torch.arange(comm.size).view(shape)
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=comm.rank)
    placements: list[Placement] = []
    local = full
    for dim, placement in enumerate(wanted):
        if isinstance(placement, Shard) and placement.dim < full.ndim:
            coordinate = (mesh.get_coordinate() or [])[dim]
            chunks = torch.chunk(local, shape[dim], placement.dim) if len(full) else (local,)
            empty = local.narrow(placement.dim, 0, 0)
            local = chunks[coordinate] if coordinate < len(chunks) else empty
            placements.append(placement)
        else:
            placements.append(Replicate())
    return DTensor.from_local(
        local.clone().contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def state_of(comm: Comm, cut: Cut, scale: float = 1) -> dict[str, Any]:
    full = {name: (tensor * scale).to(tensor.dtype) for name, tensor in FULL.items()}
    return {
        "model": {name: placed(tensor, comm, cut) for name, tensor in full.items()},
        "optim": {
            "state": {"matrix": {"exp_avg": placed(full["matrix"] * 2, comm, cut)}},
            "param_groups": [{"params": ["matrix"]}],
        },
    }


def locals_of(state: dict[str, Any]) -> list[Any]:
    held = [*state["model"].values(), state["optim"]["state"]["matrix"]["exp_avg"]]
    return [tensor.to_local().tolist() for tensor in held]


def ranks_of(cut: Cut) -> int:
    return int(torch.Size(cut[0]).numel())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dtensors")
    for name, cut in CUTS.items():

        def rank(comm: Comm, cut: Cut = cut, path: Path = folder / name) -> None:
            save(state_of(comm, cut), path, comm=comm)

        run_threads(rank, ranks_of(cut))
    return folder


@pytest.mark.parametrize("name", list(CUTS))
def test_any_placement_reads_any_other(checkpoints: Path, name: str) -> None:
    cut = CUTS[name]

    def rank(comm: Comm) -> list[str]:
        expected = locals_of(state_of(comm, cut))
        wrong = []
        for path in sorted(checkpoints.iterdir()):
            template = state_of(comm, cut, scale=0)
            load(template, path, comm=comm)
            if locals_of(template) != expected:
                wrong.append(path.name)
        return wrong

    assert len(list(checkpoints.iterdir())) == len(CUTS)
    assert run_threads(rank, ranks_of(cut)) == [[]] * ranks_of(cut)


@pytest.mark.parametrize("name", list(CUTS))
def test_plain_tensors_read_them_and_all_is_whole(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    assert verify(path) == ()
    template: dict[str, Any] = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in FULL.items()},
        "optim": {"state": {"matrix": {"exp_avg": torch.zeros(7, 5)}}, "param_groups": []},
    }
    load(template, path, comm=SoloComm())
    for key, tensor in FULL.items():
        assert torch.equal(template["model"][key], tensor), key
    assert torch.equal(template["optim"]["state"]["matrix"]["exp_avg"], FULL["matrix"] * 2)


@pytest.mark.parametrize("name", list(CUTS))
def test_exports_are_whole(checkpoints: Path, tmp_path: Path, name: str) -> None:
    export_hf(checkpoints / name, tmp_path / "hf", comm=SoloComm())
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == FULL.keys()
    for key, tensor in FULL.items():
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", ["columns", "tiles", "tiles of tiles"])
def test_a_lost_index_comes_out_as_it_was(checkpoints: Path, name: str) -> None:
    index = (checkpoints / name / "index.json").read_bytes()
    (checkpoints / name / "index.json").unlink()
    assert reindex(checkpoints / name) is True
    assert (checkpoints / name / "index.json").read_bytes() == index


def record_of(path: Path, name: str) -> TensorRecord:
    return next(record for record in inspect(path).tensors if record.name == name)


def test_columns_are_one_range_per_rank(checkpoints: Path) -> None:
    """5 columns over 4 ranks are 2, 2 and 1."""
    ranges = record_of(checkpoints / "columns", "matrix").ranges
    assert [(part.start, part.stop, part.times, part.stride) for part in ranges] == [
        (0, 32, 7, 5),
        (2, 34, 7, 5),
        (4, 35, 7, 5),
    ]
    raw = (checkpoints / "columns" / "model-r00001-of-00004.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["matrix@2:34:7x5"]["shape"] == [14]
    assert record_of(checkpoints / "rows", "matrix").ranges[1][:2] == (10, 20)


def test_replicas_each_write_an_equal_part(checkpoints: Path) -> None:
    """On 2 x 2 ranks, two cuts along different dimensions of the mesh, in one state."""
    ranges = record_of(checkpoints / "hybrid columns", "matrix").ranges
    assert len({part.file for part in ranges}) == 4
    assert sum(part.numel for part in ranges) == 35

    def rank(comm: Comm) -> int:
        first = placed(FULL["matrix"], comm, ((2, 2), (Shard(0), Replicate())))
        second = placed(FULL["matrix"], comm, ((2, 2), (Replicate(), Shard(0))))
        path = checkpoints.parent / "two-ways"
        save({"m": {"a": first, "b": second}}, path, comm=comm)
        file = path / f"m-r{comm.rank:05d}-of-00004.safetensors"
        return file.stat().st_size - 4096

    written = run_threads(rank, 4)
    assert sum(written) == 2 * 35 * 4
    assert written == [80, 72, 72, 56]  # ranks hold 4 or 3 of 7 rows, and write half of each
    template = {"m": {"a": torch.zeros(7, 5), "b": torch.zeros(7, 5)}}
    load(template, checkpoints.parent / "two-ways", comm=SoloComm())
    assert torch.equal(template["m"]["a"], FULL["matrix"])
    assert torch.equal(template["m"]["b"], FULL["matrix"])


def test_nothing_travels_and_staging_holds_the_own_part(tmp_path: Path) -> None:
    cut = CUTS["tiles"]

    def rank(comm: Comm) -> None:
        state = state_of(comm, cut)
        handle = save_async(state, tmp_path / "a", comm=comm)
        for tensor in state["model"].values():
            tensor.to_local().zero_()
        handle.wait()

    run_threads(rank, 6)
    template = {"model": {"cube": torch.zeros(3, 4, 5, dtype=torch.bfloat16)}}
    load(template, tmp_path / "a", comm=SoloComm(), strict=False)
    assert torch.equal(template["model"]["cube"], FULL["cube"])


def test_a_large_matrix_cut_by_columns_has_a_small_index(tmp_path: Path) -> None:
    full = torch.arange(4096 * 4096, dtype=torch.int32).view(4096, 4096)

    def rank(comm: Comm) -> None:
        cut: Cut = ((4,), (Shard(1),))
        save({"m": {"w": placed(full, comm, cut)}}, tmp_path / "a", comm=comm)
        template = placed(torch.zeros(4096, 4096, dtype=torch.int32), comm, cut)
        load({"m": {"w": template}}, tmp_path / "a", comm=comm)
        want = full[:, 1024 * comm.rank : 1024 * (comm.rank + 1)]
        assert torch.equal(template.to_local(), want)

    run_threads(rank, 4)
    assert len(record_of(tmp_path / "a", "w").ranges) == 4
    assert len((tmp_path / "a" / "index.json").read_bytes()) < 3500
    assert max(file.stat().st_size for file in (tmp_path / "a").iterdir()) == 4096 + (16 << 20)
    template = torch.zeros(4096, 4096, dtype=torch.int32)
    load({"m": {"w": template}}, tmp_path / "a", comm=SoloComm())
    assert torch.equal(template, full)


def outer_of(comm: Comm, tp: int, shape: Sequence[int]) -> tuple[Outer, Comm]:
    """Return the DTensor around pieces: ``tp`` ranks cut columns, the others what these leave."""
    dp = comm.size // tp
    mesh = DeviceMesh(
        "cpu", torch.arange(comm.size).view(dp, tp), _init_backend=False, _rank=comm.rank
    )
    inside, across = comm.split(comm.rank // tp), comm.split(comm.rank % tp)
    return Outer(tuple(shape), (Shard(1),), (inside,), mesh), across


@pytest.mark.parametrize(("saved_dp", "saved_tp", "dp", "tp"), [(3, 2, 1, 4), (1, 4, 3, 2)])
def test_pieces_of_column_cut_parameters(
    tmp_path: Path, saved_dp: int, saved_tp: int, dp: int, tp: int
) -> None:
    """Each piece is the end of a row, whole rows, and the beginning of one: three ranges."""
    full = torch.arange(40 * 12, dtype=torch.float32).view(40, 12)

    def sharded(comm: Comm, tp: int, values: torch.Tensor) -> ShardTensor:
        outer, across = outer_of(comm, tp, values.shape)
        part = outer.part_of(values).reshape(-1)
        layout = plan_layout([ParamSpec("w", outer.local_shape, values.dtype)], across.size)
        spec = replace(layout.shard_spec(across.rank, 0), outer=outer)
        return ShardTensor(part[spec.start : spec.stop].clone(), spec, comm=across)

    def saved(comm: Comm) -> None:
        save({"m": {"w": sharded(comm, saved_tp, full)}}, tmp_path / "a", comm=comm)

    def loaded(comm: Comm) -> bool:
        template = sharded(comm, tp, torch.zeros_like(full))
        load({"m": {"w": template}}, tmp_path / "a", comm=comm)
        return torch.equal(template.local, sharded(comm, tp, full).local)

    run_threads(saved, saved_dp * saved_tp)
    ranges = record_of(tmp_path / "a", "w").ranges
    assert len(ranges) <= 3 * saved_dp * saved_tp
    assert max(part.times for part in ranges) >= 12
    assert run_threads(loaded, dp * tp) == [True] * (dp * tp)
    index = (tmp_path / "a" / "index.json").read_bytes()
    assert encode_index(read_index(tmp_path / "a")) == index
    (tmp_path / "a" / "index.json").unlink()
    assert reindex(tmp_path / "a") is True
    assert (tmp_path / "a" / "index.json").read_bytes() == index


def test_an_index_of_column_cuts_on_1024_ranks_takes_under_a_second() -> None:
    """1,000 parameters, columns over 8 ranks, what these hold in groups of 20 over 128."""
    shape, local = (2048, 1024), (2048, 128)
    specs = [ParamSpec(f"w{at:03d}", local, torch.float32) for at in range(1000)]
    layouts = [plan_layout(specs[at : at + 20], 128) for at in range(0, 1000, 20)]
    none = torch.zeros(1)
    leaves = [Leaf("model", spec.name, none, shape, 0, 0, 1024, none) for spec in specs]
    manifests = []
    for rank in range(1024):
        box, ranges, offset = Box((0, rank % 8 * 128), local), [], 4096
        for group, layout in enumerate(layouts):
            for at, part in enumerate(layout.pieces(rank // 8)):
                for runs, _ in box_runs(shape, box, first=part.start, last=part.stop):
                    start, stop, times, stride = runs
                    place = Range(start, stop, 0, offset, times, stride)
                    ranges.append((group * 20 + at, place))
                    offset += runs.numel * 4
        manifests.append(Manifest((FileRecord(f"r{rank}", offset, b""),), tuple(ranges)))
    started = time.process_time()
    index = build_index(leaves, "id", manifests=manifests)
    assert time.process_time() - started < 1.0
    assert sum(len(record.ranges) for record in index.tensors.values()) < 60_000  # not 2 million
    assert len(encode_index(index)) < 3 << 20


def test_what_cannot_be_stored_is_named() -> None:
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    partial = DTensor.from_local(torch.zeros(3), mesh, (Partial(),), run_check=False)
    with pytest.raises(TypeError, match=r"model: w: .*sum that was not taken yet.*redistribute"):
        save({"model": {"w": partial}}, "nowhere", comm=SoloComm())


def test_a_range_says_which_elements() -> None:
    part = Range(2, 34, 1, 4096, 7, 5)
    assert (part.numel, part.runs.length, part.row()) == (14, 2, [2, 34, 1, 4096, 7, 5])
    assert Range(2, 34, 1, 4096).row() == [2, 34, 1, 4096]


def test_parts_that_share_memory_are_copied_each_as_a_whole(tmp_path: Path) -> None:
    """Each local part is two runs of runs; a file has those of one tensor, then of the other."""
    full = torch.arange(32.0).view(2, 4, 4)
    cut: Cut = ((2, 2), (Shard(1), Shard(2)))

    def rank(comm: Comm) -> None:
        one = placed(full, comm, cut)
        bits = one.to_local().view(torch.int32)
        other = DTensor.from_local(
            bits, one.device_mesh, one.placements, shape=full.shape, stride=full.stride()
        )
        state = {"m": {"a": one, "b": other}}
        save_async(state, tmp_path / "a", comm=comm).wait()

    run_threads(rank, 4)
    template = {"m": {"a": torch.zeros_like(full), "b": torch.zeros_like(full).int()}}
    load(template, tmp_path / "a", comm=SoloComm())
    assert torch.equal(template["m"]["a"], full)
    assert torch.equal(template["m"]["b"], full.view(torch.int32))
