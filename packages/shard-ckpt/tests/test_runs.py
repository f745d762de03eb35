from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_ckpt._runs import Box, Runs, box_runs, overlaps, tiling_problem


def elements(runs: Runs) -> list[int]:
    return [
        runs.start + run * runs.stride + at
        for run in range(runs.times)
        for at in range(runs.length)
    ]


def test_the_examples_of_the_docstrings() -> None:
    columns = Runs(1, 13, times=3, stride=5)
    assert elements(columns) == [1, 2, 6, 7, 11, 12]
    assert (columns.length, columns.numel) == (2, 6)
    assert list(box_runs((3, 5), Box((0, 1), (3, 2)), first=0, last=6)) == [(columns, 0)]
    assert list(box_runs((3, 5), Box((0, 1), (3, 2)), first=1, last=6)) == [
        (Runs(2, 3), 1),
        (Runs(6, 13, times=2, stride=5), 2),
    ]
    assert list(overlaps(columns, Runs(7, 13))) == [(3, 0, 1), (4, 4, 2)]


def test_corners() -> None:
    assert list(box_runs((), Box((), ()), first=0, last=1)) == [(Runs(0, 1), 0)]
    assert list(box_runs((4,), Box((1,), (0,)), first=0, last=0)) == []
    assert list(box_runs((2, 3, 4), Box((0, 0, 0), (2, 3, 4)), first=3, last=20)) == [
        (Runs(3, 20), 3)
    ]
    assert list(box_runs((4, 5), Box((1, 0), (2, 5)), first=0, last=10)) == [(Runs(5, 15), 0)]


def test_a_matrix_cut_by_columns_is_one_record() -> None:
    (one,) = box_runs((4096, 4096), Box((0, 1024), (4096, 1024)), first=0, last=4096 * 1024)
    assert one == (Runs(1024, 4095 * 4096 + 2048, 4096, 4096), 0)
    tiles = list(box_runs((3, 8, 8), Box((0, 4, 4), (3, 4, 4)), first=0, last=48))
    assert [(runs.times, at) for runs, at in tiles] == [(4, 0), (4, 16), (4, 32)]


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[int], Box, int, int]:
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    offsets = [draw(st.integers(0, dim - 1)) for dim in shape]
    sizes = [draw(st.integers(0, dim - at)) for dim, at in zip(shape, offsets, strict=True)]
    last = draw(st.integers(0, math.prod(sizes)))
    return shape, Box(tuple(offsets), tuple(sizes)), draw(st.integers(0, last)), last


@given(blocks())
def test_runs_are_the_elements_of_the_block_in_order(
    block: tuple[list[int], Box, int, int],
) -> None:
    shape, box, first, last = block
    view = torch.arange(math.prod(shape)).view(shape)
    for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        view = view.narrow(dim, at, size)
    found = list(box_runs(shape, box, first=first, last=last))
    assert [i for runs, _ in found for i in elements(runs)] == view.flatten().tolist()[first:last]
    at = first
    for runs, place in found:
        assert place == at
        at += runs.numel
    cuts = sum(size != dim for size, dim in zip(box.sizes, shape, strict=True))
    assert cuts > 2 or len(found) <= 3 * max(box.sizes[:1] or (1,), default=1) + 2


@given(blocks(), blocks())
def test_overlaps_are_the_elements_of_both(
    one: tuple[list[int], Box, int, int], other: tuple[list[int], Box, int, int]
) -> None:
    for left, _ in box_runs(one[0], one[1], first=one[2], last=one[3]):
        for right, _ in box_runs(other[0], other[1], first=other[2], last=other[3]):
            mine, theirs = elements(left), elements(right)
            found = []
            for at, to, numel in overlaps(left, right):
                assert numel > 0
                assert mine[at : at + numel] == theirs[to : to + numel]
                found += mine[at : at + numel]
            assert sorted(found) == sorted(set(mine) & set(theirs))


def test_equal_columns_are_one_overlap() -> None:
    columns = Runs(1, 4094, times=1024, stride=4)
    assert columns.numel == 1024
    assert list(overlaps(columns, columns)) == [(0, 0, 1024)]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([Runs(0, 13, 3, 5), Runs(3, 15, 3, 5)], None),
        ([Runs(0, 3), Runs(5, 13, 2, 5), Runs(3, 15, 3, 5)], None),
        ([Runs(0, 13, 3, 5)], r"nobody stored 6 of 15 elements"),
        ([Runs(0, 13, 3, 5), Runs(2, 14, 3, 5), Runs(4, 15, 3, 5)], r"from 0 on are stored twice"),
        ([Runs(0, 13, 3, 5), Runs(3, 10, 2, 5), Runs(12, 15), Runs(13, 14)], "from 10 on"),
        ([Runs(0, 13, 3, 5), Runs(2, 14, 3, 5)], "from 0 on are stored twice"),  # as many, not all
        ([Runs(0, 13, 3, 5), Runs(3, 15, 3, 6)], r"different distances, \[5, 6\]"),
        ([Runs(0, 13, 3, 5), Runs(3, 20, 3, 5)], r"not within \[0, 15\)"),
        ([Runs(4, 11, 2, 5), Runs(0, 4), Runs(6, 9), Runs(11, 15)], "across a multiple of 5"),
        ([Runs(0, 13, 3, 5), Runs(3, 5, 1, 5), Runs(8, 15, 2, 5)], "distance without runs"),
        ([Runs(0, 4, 2, 0), Runs(4, 15)], "runs without a distance"),
        ([Runs(0, 5, 0, 5), Runs(0, 13, 3, 5), Runs(3, 15, 3, 5)], "not within"),
        ([Runs(0, 6, 3, 5), Runs(3, 15, 3, 5)], "not within"),
    ],
)
def test_coverage_must_be_exact(parts: list[Runs], reason: str | None) -> None:
    problem = tiling_problem(sorted(parts), 15)
    if reason is None:
        assert problem is None
    else:
        assert re.search(reason, problem or "")


@given(st.integers(2, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_any_tiling_is_accepted_and_a_changed_one_is_not(
    rows: int, cols: int, ranks: int, pieces: int, data: st.DataObject
) -> None:
    """Columns over ranks, each local part cut over pieces anywhere."""
    step = -(-cols // ranks)
    parts = []
    for rank in range(ranks):
        low, high = min(rank * step, cols), min((rank + 1) * step, cols)
        box = Box((0, low), (rows, high - low))
        numel = rows * (high - low)
        cuts = sorted(data.draw(st.integers(0, numel)) for _ in range(pieces - 1))
        for first, last in zip([0, *cuts], [*cuts, numel], strict=True):
            parts += [r for r, _ in box_runs((rows, cols), box, first=first, last=last)]
    assert tiling_problem(sorted(parts), rows * cols) is None
    at = data.draw(st.integers(0, len(parts) - 1))
    others = parts[:at] + parts[at + 1 :]
    assert "nobody stored" in str(tiling_problem(sorted(others), rows * cols))
    assert "stored twice" in str(tiling_problem(sorted([*parts, parts[at]]), rows * cols))
