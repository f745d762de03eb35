from __future__ import annotations

import os
import zlib

import pytest

from shard_ckpt import FileRecord
from shard_ckpt._grains import (
    GRAIN_BYTES,
    GrainSums,
    cut_runs,
    grain_count,
    grains_in,
    merged,
    span_bytes,
    sums_of,
)

SIZES = [0, 1, GRAIN_BYTES - 1, GRAIN_BYTES, GRAIN_BYTES + 1, 3 * GRAIN_BYTES, 4 * GRAIN_BYTES - 9]


@pytest.mark.parametrize("nbytes", SIZES)
def test_each_grain_has_its_checksum(nbytes: int) -> None:
    data = os.urandom(nbytes)
    spans = [span_bytes(grain, grain + 1, nbytes) for grain in range(grain_count(nbytes))]
    assert b"".join(data[low:high] for low, high in spans) == data
    crcs = [zlib.crc32(data[low:high]) for low, high in spans]
    assert sums_of(data) == b"".join(crc.to_bytes(4, "big") for crc in crcs)
    sums = GrainSums()
    for low in range(0, nbytes, 70_001):
        sums.feed(memoryview(data)[low : low + 70_001])
    assert sums.finish() == sums_of(data)


@pytest.mark.parametrize("nbytes", SIZES)
def test_checksums_of_grains_make_that_of_a_run(nbytes: int) -> None:
    data = os.urandom(nbytes)
    record = FileRecord("f", nbytes, sums_of(data))
    for first in range(grain_count(nbytes)):
        for stop in range(first, grain_count(nbytes) + 1):
            low, high = span_bytes(first, stop, nbytes)
            assert record.crc(first, stop) == zlib.crc32(data[low:high])


def test_bytes_touch_grains() -> None:
    assert grains_in(0, 1) == (0, 1)
    assert grains_in(GRAIN_BYTES - 1, GRAIN_BYTES + 1) == (0, 2)
    assert grains_in(GRAIN_BYTES, 2 * GRAIN_BYTES) == (1, 2)


def test_runs_are_joined_and_cut() -> None:
    assert merged([(5, 9), (0, 1), (1, 2), (6, 7)]) == [(0, 2), (5, 9)]
    assert cut_runs([(0, 2), (5, 9)], low=1, high=3) == [(1, 2), (5, 6)]
    assert cut_runs([(0, 2), (5, 9)], low=0, high=6) == [(0, 2), (5, 9)]
    assert cut_runs([(0, 2), (5, 9)], low=2, high=2) == []
