from __future__ import annotations

import os
import zlib

import pytest
import torch

from shard_ckpt._fold import FAR, NEAR, WINDOW_BYTES, Folding


def through(folding: Folding, data: bytes) -> int:
    folding.restart()
    window = len(folding.view)
    for at in range(0, len(data), window):
        part = data[at : at + window]
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


@pytest.mark.parametrize("window", [4096, 256 << 10, WINDOW_BYTES, 1 << 20])
@pytest.mark.parametrize(
    "nbytes", [0, 1, 4, 4095, 4096, WINDOW_BYTES, WINDOW_BYTES + 1, 3 * WINDOW_BYTES, (5 << 20) - 3]
)
def test_it_is_crc32(window: int, nbytes: int) -> None:
    data = os.urandom(nbytes)
    folding = Folding(window)
    assert through(folding, data) == zlib.crc32(data)
    assert through(folding, data[::-1]) == zlib.crc32(data[::-1])  # nothing is left of the first


def test_the_window_is_aligned_for_every_dtype() -> None:
    tensor = Folding().tensor
    assert tensor.numel() == WINDOW_BYTES
    assert tensor.view(torch.complex128).numel() * 16 == WINDOW_BYTES


def test_nothing_may_follow_a_part() -> None:
    folding = Folding()
    folding.absorb(7)
    with pytest.raises(AssertionError, match="after the last"):
        folding.absorb(7)
