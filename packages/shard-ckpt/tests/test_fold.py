from __future__ import annotations

import os
import zlib

import pytest
import torch

from shard_ckpt._fold import FAR, NEAR, WINDOW_BYTES, Folding


def through(folding: Folding, data: bytes) -> int:
    folding.restart()
    for at in range(0, len(data), len(folding.view)):
        part = data[at : at + len(folding.view)]
        folding.view[: len(part)] = part
        assert folding.tensor[: len(part)].numpy().tobytes() == part
        folding.absorb(len(part))
    return folding.value()


def test_a_byte_at_three_places_counts_as_none() -> None:
    message = bytearray(FAR + 1)
    for at in (0, NEAR, FAR):
        message[at] = 0xB1
    assert zlib.crc32(message) == zlib.crc32(bytes(FAR + 1))
    message[FAR] ^= 1
    assert zlib.crc32(message) != zlib.crc32(bytes(FAR + 1))


@pytest.mark.parametrize("window", [FAR + -FAR % 64, WINDOW_BYTES, 512 << 10])
@pytest.mark.parametrize(
    "nbytes",
    [
        0,
        1,
        4,
        4095,
        FAR,
        WINDOW_BYTES,
        WINDOW_BYTES + 1,
        WINDOW_BYTES + FAR,
        (5 << 20) - 3,
        6 << 20,
    ],
)
def test_it_is_crc32(window: int, nbytes: int) -> None:
    data = os.urandom(nbytes)
    folding = Folding(window)
    assert through(folding, data) == zlib.crc32(data)
    assert through(folding, data[::-1]) == zlib.crc32(data[::-1])  # nothing is left of the first


def test_a_faster_implementation_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fast(data: memoryview, value: int) -> int:
        seen.append(len(data))
        return zlib.crc32(data, value)

    for module in ("_fold", "_crc"):
        monkeypatch.setattr(f"shard_ckpt.{module}.implementation", lambda: fast)
    data = os.urandom(2 * WINDOW_BYTES + 7)
    assert through(Folding(), data) == zlib.crc32(data)
    assert seen == [WINDOW_BYTES, WINDOW_BYTES, 7]


def test_the_window_is_aligned_for_every_dtype() -> None:
    folding = Folding()
    for _ in range(2):
        assert folding.tensor.view(torch.complex128).numel() * 16 == WINDOW_BYTES
        folding.absorb(WINDOW_BYTES)


def test_nothing_may_follow_a_part() -> None:
    folding = Folding()
    folding.absorb(7)
    with pytest.raises(AssertionError, match="after the last"):
        folding.absorb(7)
