from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from shard_flat._boxes import Box, boxes_of


def test_worked_example() -> None:
    assert list(boxes_of((3, 5), 3, 11)) == [
        Box((0, 3), (1, 2), 3),
        Box((1, 0), (1, 5), 5),
        Box((2, 0), (1, 1), 10),
    ]


def test_whole_tensors_and_runs_within_a_row_are_one_box() -> None:
    assert list(boxes_of((2, 3, 4), 0, 24)) == [Box((0, 0, 0), (2, 3, 4), 0)]
    assert list(boxes_of((2, 3, 4), 13, 15)) == [Box((1, 0, 1), (1, 1, 2), 13)]
    assert list(boxes_of((7,), 2, 5)) == [Box((2,), (3,), 2)]
    assert list(boxes_of((), 0, 1)) == [Box((), (), 0)]
    assert Box((), (), 0).stop == 1


def test_nothing_is_no_box() -> None:
    assert list(boxes_of((3, 5), 4, 4)) == []
    assert list(boxes_of((0, 3), 0, 0)) == []
    assert list(boxes_of((), 0, 0)) == []


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    start, stop = sorted(draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    return shape, start, stop


@given(ranges())
def test_boxes_are_consecutive_runs_of_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    boxes = list(boxes_of(shape, start, stop))
    ends = [start, *(box.stop for box in boxes)]
    assert [box.start for box in boxes] == ends[:-1]
    assert ends[-1] == stop
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    for box in boxes:
        assert all(
            n > 0 and o + n <= d for o, n, d in zip(box.offsets, box.sizes, shape, strict=True)
        )
        assert sum(o * s for o, s in zip(box.offsets, strides, strict=True)) == box.start
        corner = [o + n - 1 for o, n in zip(box.offsets, box.sizes, strict=True)]
        assert sum(c * s for c, s in zip(corner, strides, strict=True)) == box.stop - 1
