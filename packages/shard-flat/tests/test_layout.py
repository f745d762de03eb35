from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_flat import FlatLayout, ParamSpec, Piece, _layout, plan_layout

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]
R12_SHAPES = [(1,), (3, 5), (9, 4), (), (0, 3)]


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32, block: int = 1) -> ParamSpec:
    return ParamSpec(name, shape, dtype, block)


@st.composite
def plans(draw: st.DrawFn, blocks: bool = False) -> tuple[list[ParamSpec], int, int]:
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=8))
    specs = []
    for i, shape in enumerate(shapes):
        row = shape[-1] if shape else 1
        choices = [1, row, math.prod(shape), 3, math.prod(shape) + 1] if blocks else [1]
        specs.append(
            ParamSpec(f"p{i}", tuple(shape), dtype, max(draw(st.sampled_from(choices)), 1))
        )
    align_bytes = draw(st.sampled_from([1, 2, 3, 8])) * dtype.itemsize
    return specs, draw(st.integers(1, 9)), align_bytes


def check_owned_once(layout: FlatLayout) -> None:
    """Cut an array that holds every element's own number; each piece must find its elements."""
    array = torch.full((layout.numel,), -1)
    first = 0
    for each, start in zip(layout.specs, layout.starts, strict=True):
        place = array[start : start + each.numel]
        assert place.numel() == each.numel
        assert bool((place == -1).all()), "two parameters overlap"
        place.copy_(torch.arange(first, first + each.numel))
        first += each.numel
    found = []
    for rank, shard in enumerate(array.split(layout.shard_numel)):
        for index, piece in enumerate(layout.pieces(rank)):
            begin = sum(s.numel for s in layout.specs[:index])
            held = shard[piece.offset : piece.offset + piece.numel]
            assert held.tolist() == list(range(begin + piece.start, begin + piece.stop))
            found += held.tolist()
    assert sorted(found) == list(range(first))
    unowned = [i for i, value in enumerate(array.tolist()) if value == -1]
    assert [i for start, stop in layout.gaps() for i in range(start, stop)] == unowned
    assert layout.padding_numel == len(unowned)


def test_worked_example() -> None:
    a, b, c = spec("a", 5), spec("b", 2, 3), spec("c", 4)
    layout = plan_layout([a, b, c], 3, align_bytes=4)
    assert layout == FlatLayout((a, b, c), (0, 5, 11), 5, 3)
    assert layout.pieces(0) == (Piece(a, 0, 5, 0), Piece(b, 0, 0, 0), Piece(c, 0, 0, 0))
    assert layout.pieces(1) == (Piece(a, 5, 5, 0), Piece(b, 0, 5, 0), Piece(c, 0, 0, 0))
    assert layout.pieces(2) == (Piece(a, 5, 5, 0), Piece(b, 5, 6, 0), Piece(c, 0, 4, 1))
    assert (layout.numel, layout.padding_numel, layout.gaps()) == (15, 0, [])
    assert layout.dtype == torch.float32


def test_aligned_parameters_come_first_and_padding_last() -> None:
    """16 bytes are 4 elements: b and d fill whole ones, a and c do not."""
    specs = [spec("a", 3), spec("b", 2, 4), spec("c", 1), spec("d", 4)]
    layout = plan_layout(specs, 2)
    assert layout.starts == (12, 0, 15, 8)
    assert (layout.shard_numel, layout.padding_numel) == (8, 0)
    layout = plan_layout([*specs, spec("e", 1)], 2)
    assert layout.starts == (12, 0, 15, 8, 16)
    assert (layout.shard_numel, layout.gaps()) == (12, [(17, 24)])
    assert [(p.start, p.stop, p.offset) for p in layout.pieces(1)] == [
        (0, 3, 0),
        (8, 8, 0),
        (0, 1, 3),
        (4, 4, 0),
        (0, 1, 4),
    ]


def test_more_ranks_than_elements() -> None:
    layout = plan_layout([spec("a", 3)], 4, align_bytes=4)
    assert layout.shard_numel == 1
    assert [(p.start, p.stop) for r in range(4) for p in layout.pieces(r)] == [
        (0, 1),
        (1, 2),
        (2, 3),
        (3, 3),
    ]


@pytest.mark.parametrize("world_size", range(1, 9))
def test_small_first_dimensions(world_size: int) -> None:
    specs = [ParamSpec(f"p{i}", shape, torch.float32) for i, shape in enumerate(R12_SHAPES)]
    layout = plan_layout(specs, world_size)
    check_owned_once(layout)
    assert layout.padding_numel * 4 <= 16 * world_size
    assert layout.numel - layout.padding_numel == 1 + 15 + 36 + 1 + 0


@given(plans())
def test_without_blocks(plan: tuple[list[ParamSpec], int, int]) -> None:
    specs, world_size, align_bytes = plan
    layout = plan_layout(specs, world_size, align_bytes=align_bytes)
    check_owned_once(layout)
    itemsize = specs[0].dtype.itemsize
    assert layout.shard_numel * itemsize % align_bytes == 0
    assert layout.padding_numel * itemsize <= align_bytes * world_size


@given(plans(blocks=True))
def test_no_block_is_cut(plan: tuple[list[ParamSpec], int, int]) -> None:
    specs, world_size, align_bytes = plan
    layout = plan_layout(specs, world_size, align_bytes=align_bytes)
    check_owned_once(layout)
    itemsize = specs[0].dtype.itemsize
    assert layout.shard_numel * itemsize % align_bytes == 0
    for rank in range(1, world_size):
        boundary = rank * layout.shard_numel
        for each, start in zip(layout.specs, layout.starts, strict=True):
            if start < boundary < start + each.numel:
                assert (boundary - start) % each.block == 0, (each, start, boundary)
    # One rank could hold everything, so nobody needs more room than that.
    total_bytes = sum(s.numel for s in specs) * itemsize
    assert layout.shard_numel * itemsize <= max(-(-total_bytes // align_bytes), 1) * align_bytes


@given(plans(blocks=True))
def test_same_arguments_same_layout(plan: tuple[list[ParamSpec], int, int]) -> None:
    specs, world_size, align_bytes = plan
    layout = plan_layout(specs, world_size, align_bytes=align_bytes)
    assert plan_layout(iter(specs), world_size, align_bytes=align_bytes) == layout
    pieces = {rank: layout.pieces(rank) for rank in reversed(range(world_size))}
    for index, each in enumerate(layout.specs):
        ends = [0]
        for rank in range(world_size):
            piece = pieces[rank][index]
            assert piece == layout.piece(rank, index)
            assert piece.numel == 0 or piece.start == ends[-1]
            ends.append(max(piece.stop, ends[-1]))
        assert ends[-1] == each.numel


def test_other_processes_plan_the_same() -> None:
    """Ranks are processes with hash seeds of their own; nothing may depend on those."""
    program = (
        "import torch; from shard_flat import ParamSpec, plan_layout\n"
        "specs = [ParamSpec(f'p{i}', (7 + i, 3 + i % 4), torch.bfloat16, 3 + i % 4)"
        " for i in range(9)]\n"
        "print(plan_layout(specs, 5))"
    )
    specs = [ParamSpec(f"p{i}", (7 + i, 3 + i % 4), torch.bfloat16, 3 + i % 4) for i in range(9)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(plan_layout(specs, 5))


def test_rows_stay_whole() -> None:
    """3 rows of 5 on two ranks: two rows and one, and a row of padding."""
    layout = plan_layout([spec("a", 3, 5, block=5)], 2, align_bytes=4)
    assert (layout.starts, layout.shard_numel) == ((0,), 10)
    assert [(p.start, p.stop) for r in (0, 1) for p in layout.pieces(r)] == [(0, 10), (10, 15)]


def test_rows_move_up_to_a_boundary() -> None:
    """b's row would be cut at 6, so it begins there and the gap lies between the two."""
    layout = plan_layout([spec("a", 5), spec("b", 2, 3, block=3)], 2, align_bytes=4)
    assert layout.shard_numel == 6
    assert layout.starts == (0, 6)
    assert layout.gaps() == [(5, 6)]


def test_whole_matrices_go_to_one_rank_each() -> None:
    specs = [spec(f"m{i}", 3, 3, block=9) for i in range(4)]
    layout = plan_layout(specs, 2, align_bytes=4)
    assert (layout.starts, layout.shard_numel, layout.padding_numel) == ((0, 9, 18, 27), 18, 0)
    holders = [[r for r in (0, 1) if layout.piece(r, i).numel] for i in range(4)]
    assert holders == [[0], [0], [1], [1]]


def test_whole_matrices_of_unlike_sizes_pack_tightly() -> None:
    """Two of the three share a rank, whatever one does; no common multiple is called for."""
    sizes = [1_000_003, 1_000_033, 1_000_037]
    layout = plan_layout([spec(f"m{n}", n, block=n) for n in sizes], 2)
    assert layout.shard_numel == 2_000_036  # the first two, a multiple of 4 already
    assert layout.starts == (0, 1_000_003, 2_000_036)


def test_mixed_blocks_pad_only_where_they_must() -> None:
    specs = [spec("a", 4, 6, block=6), spec("b", 10), spec("c", 3, 4, block=12)]
    layout = plan_layout(specs, 2, align_bytes=4)
    assert layout.shard_numel == 24
    assert [(p.start, p.stop, p.offset) for p in layout.pieces(0)] == [
        (0, 24, 0),
        (0, 0, 0),
        (0, 0, 0),
    ]
    assert [(p.start, p.stop, p.offset) for p in layout.pieces(1)] == [
        (24, 24, 0),
        (0, 10, 0),
        (0, 12, 10),
    ]


def test_a_block_longer_than_its_parameter_keeps_it_whole() -> None:
    layout = plan_layout([spec("a", 5), spec("b", 5, block=100)], 2, align_bytes=4)
    assert layout.shard_numel == 5
    assert layout.starts == (0, 5)


def count_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    walks = [0]
    walk = _layout._walk

    def counted(*args: Any) -> list[int] | None:
        walks[0] += 1
        return walk(*args)

    monkeypatch.setattr(_layout, "_walk", counted)
    return walks


def frontier_group(index: int, *, rows: bool) -> list[ParamSpec]:
    """About 405M parameters in unequal matrices: a thousandth of a 405B model."""
    shapes = [(16_384, 16_384), (1_024, 16_384), (1_024, 16_384), (6_249 + index, 16_384), (257,)]
    return [
        ParamSpec(f"p{i}", s, torch.bfloat16, s[-1] if rows and len(s) == 2 else 1)
        for i, s in enumerate(shapes)
    ]


@pytest.mark.parametrize(("rows", "walks_per_group"), [(False, 1), (True, 200)])
def test_planning_a_frontier_model_takes_under_a_second(
    rows: bool, walks_per_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured: 0.03 s without blocks and 0.2 s with rows kept whole, on one core."""
    walks = count_walks(monkeypatch)
    groups = [frontier_group(i, rows=rows) for i in range(1_000)]
    began = time.process_time()
    layouts = [plan_layout(group, 16_384) for group in groups]
    spent_s = time.process_time() - began
    assert sum(layout.numel - layout.padding_numel for layout in layouts) > 400e9
    assert walks[0] <= walks_per_group * 1_000
    assert spent_s < 1.0
    last = layouts[-1]
    assert sum(p.numel for p in last.pieces(16_383)) <= last.shard_numel


@pytest.mark.parametrize(
    ("specs", "world_size", "align_bytes", "message"),
    [
        ([], 1, 16, "at least one parameter"),
        ([spec("a", 1)], 0, 16, "world_size >= 1, got 0"),
        ([spec("a", 1)], 1, 6, "multiple of the 4 bytes of torch.float32, got 6"),
        ([spec("a", 1)], 1, 0, "multiple of the 4 bytes"),
        ([spec("a", 1), spec("b", 1, dtype=torch.float64)], 1, 16, "b: expected dtype .*float32"),
        ([spec("a", 1), spec("a", 2)], 1, 16, "a: the name occurs twice"),
    ],
)
def test_bad_plans_are_refused(
    specs: list[ParamSpec], world_size: int, align_bytes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_layout(specs, world_size, align_bytes=align_bytes)


def test_wide_elements_need_no_further_alignment() -> None:
    layout = plan_layout([spec("a", 3, dtype=torch.complex128)], 2, align_bytes=8)
    assert layout.shard_numel == 2


def test_bad_specs_are_refused() -> None:
    with pytest.raises(ValueError, match="w: expected block >= 1, got 0"):
        spec("w", 1, block=0)
    with pytest.raises(ValueError, match=r"w: expected dimensions >= 0, got shape \(2, -1\)"):
        spec("w", 2, -1)
    with pytest.raises(TypeError):
        ParamSpec("w", (2.5,), torch.float32)  # type: ignore[arg-type]
    assert ParamSpec("w", torch.Size([2, 3]), torch.float32).shape == (2, 3)
    assert spec("w").numel == 1
    assert spec("w", 0, 3).numel == 0


@pytest.mark.parametrize("rank", [-1, 3])
def test_ranks_outside_of_the_world_are_refused(rank: int) -> None:
    layout = plan_layout([spec("a", 5)], 3)
    with pytest.raises(ValueError, match=rf"rank in \[0, 3\), got {rank}"):
        layout.pieces(rank)
    with pytest.raises(ValueError, match=rf"rank in \[0, 3\), got {rank}"):
        layout.piece(rank, 0)
