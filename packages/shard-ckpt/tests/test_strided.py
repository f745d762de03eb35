"""DTensors of which one dimension is cut from right to left, as FSDP does what others cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shard_ckpt import load, save, verify
from shard_ckpt._runs import Box
from shard_ckpt._strided import Cut, strided_boxes
from shard_comm import Comm, SoloComm
from shard_testing import run_threads

SOLO = SoloComm()
Numbers = list[int]


def chunk(numbers: Numbers, parts: int, part: int) -> Numbers:
    """Cut as torch does."""
    chunks = torch.tensor(numbers, dtype=torch.int64).chunk(parts) if numbers else ()
    return chunks[part].tolist() if part < len(chunks) else []


def by_placements(size: int, cuts: list[Cut]) -> Numbers:
    """Return what a rank holds of numbered rows that are distributed by their placements."""
    held = list(range(size))
    for cut in cuts:
        groups = [chunk(held, cut.factor, number) for number in range(cut.factor)]
        held = [number for group in groups for number in chunk(group, cut.parts, cut.part)]
    return held


def strided(dp: int, tp: int, rank: int) -> list[Cut]:
    return [Cut(0, dp, rank // tp, tp), Cut(0, tp, rank % tp, 1)]


def boxes(size: int, held: Numbers, cuts: list[Cut]) -> list[Numbers]:
    """Return the rows that may be held, by what ``strided_boxes`` says."""
    found = strided_boxes((size,), (len(held),), cuts)
    return [list(range(box.offsets[0], box.offsets[0] + box.sizes[0])) for box in found]


def test_the_example() -> None:
    last = Box((6,), (1,))
    assert strided_boxes((7,), (1,), [Cut(0, 3, 2, 2), Cut(0, 2, 1, 1)]) == {last}
    assert strided_boxes((7,), (1,), [Cut(0, 3, 2, 2), Cut(0, 2, 0, 1)]) == {last}


def test_what_may_be_in_pieces_is_not_taken_for_a_block() -> None:
    cuts = [Cut(0, 2, 0, 6), Cut(0, 2, 0, 3), Cut(0, 3, 1, 1)]
    assert by_placements(13, cuts) == [4, 6]  # by the order of making rows 5 and 6
    assert strided_boxes((13,), (2,), cuts) == set()
    assert strided_boxes((12,), (1,), cuts) == {Box((4,), (1,))}


def test_both_readings_are_found_for_every_size() -> None:
    """By number, for up to 5 x 5 ranks; a part in two pieces is no block."""
    unlike = pieces = 0
    for size in range(30):
        for dp in range(1, 6):
            for tp in range(2, 6):
                for rank in range(dp * tp):
                    cuts = strided(dp, tp, rank)
                    wrapped = chunk(chunk(list(range(size)), tp, rank % tp), dp, rank // tp)
                    placed = by_placements(size, cuts)
                    whole = not placed or placed[-1] - placed[0] == len(placed) - 1
                    unlike += wrapped != placed
                    pieces += not whole
                    if wrapped:
                        assert wrapped in boxes(size, wrapped, cuts)
                    if placed and whole:
                        assert placed in boxes(size, placed, cuts)
                    elif placed:
                        assert placed not in boxes(size, placed, cuts)
    assert (unlike > 50, pieces > 5) == (True, True)


@pytest.mark.parametrize(("size", "most"), [(16, 1), (13, 2)])
def test_three_cuts_and_other_dimensions(size: int, most: int) -> None:
    """Sharding over 2 of rows that two more ways of parallelism cut; columns are cut by 2."""
    for rank in range(16):
        a, b, c, d = rank // 8, rank // 4 % 2, rank // 2 % 2, rank % 2
        rows = chunk(chunk(chunk(list(range(size)), 2, b), 2, d), 2, a)
        cuts = [Cut(0, 2, a, 4), Cut(0, 2, b, 1), Cut(1, 2, c, 1), Cut(0, 2, d, 1)]
        if rows:
            found = strided_boxes((size, 6), (len(rows), 3), cuts)
            assert Box((rows[0], 3 * c), (len(rows), 3)) in found
            assert len(found) <= most


def wrapped(full: torch.Tensor, comm: Comm, shape: tuple[int, ...]) -> Any:
    """Cut a tensor as ``fully_shard`` does what ``tp`` ranks hold; the first may be replicas."""
    dp, tp = shape[-2:]
    mesh = DeviceMesh(
        "cpu", torch.arange(comm.size).view(shape), _init_backend=False, _rank=comm.rank
    )
    numbers = chunk(list(range(len(full))), tp, comm.rank % tp)
    rows = chunk(numbers, dp, comm.rank // tp % dp)
    placements: list[Placement] = [Replicate()] * (len(shape) - 2)
    placements += [_StridedShard(0, split_factor=tp), Shard(0)]
    return DTensor.from_local(
        full[rows].clone(),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


@pytest.mark.parametrize("shape", [(3, 2), (2, 2, 2), (2, 3)])
@pytest.mark.parametrize("rows", [1, 7, 13])
def test_uneven_parameters_are_stored_and_loaded(
    tmp_path: Path, shape: tuple[int, ...], rows: int
) -> None:
    full = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)

    def rank(comm: Comm) -> bool:
        held = wrapped(full, comm, shape)
        save({"m": {"w": held}}, tmp_path / "a", comm=comm)
        template = wrapped(torch.zeros_like(full), comm, shape)
        load({"m": {"w": template}}, tmp_path / "a", comm=comm)
        return torch.equal(template.to_local(), held.to_local())

    ranks = int(torch.Size(shape).numel())
    assert run_threads(rank, ranks) == [True] * ranks
    assert verify(tmp_path / "a") == ()
    template = torch.zeros_like(full)
    load({"m": {"w": template}}, tmp_path / "a", comm=SOLO)
    assert torch.equal(template, full)


def placed(rows: int, shape: tuple[int, ...], rank: int, placements: list[Placement]) -> Any:
    """Return a template of which a rank holds so many rows."""
    ranks = int(torch.Size(shape).numel())
    mesh = DeviceMesh("cpu", torch.arange(ranks).view(shape), _init_backend=False, _rank=rank)
    whole = torch.Size((27, 1))
    local = torch.zeros(rows, 1)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole, stride=(1, 1))


def test_what_may_be_two_blocks_or_is_in_pieces_is_refused(tmp_path: Path) -> None:
    save({"m": {"w": torch.zeros(27, 1)}}, tmp_path / "a", comm=SOLO)
    both: list[Placement] = [_StridedShard(0, split_factor=4), Shard(0)]
    with pytest.raises(TypeError, match=r"m: w: expected a DTensor with one block.*redistribute"):
        load({"m": {"w": placed(1, (3, 4), 10, both)}}, tmp_path / "a", comm=SOLO)
    alone: list[Placement] = [_StridedShard(0, split_factor=2)]
    with pytest.raises(TypeError, match=r"over \(2,\) ranks with a local part of \(14, 1\)"):
        load({"m": {"w": placed(14, (2,), 0, alone)}}, tmp_path / "a", comm=SOLO)
