"""Casts are counted by what they write."""

from __future__ import annotations

import torch

from shard_testing import Casts


def test_elements_written_in_the_dtype_from_another() -> None:
    narrow, wide = torch.zeros(6, dtype=torch.bfloat16), torch.ones(6)
    with Casts(torch.bfloat16) as casts:
        narrow[:4].copy_(wide[:4])
        narrow[2:5].copy_(wide[2:5])
        narrow[:3].copy_(narrow[3:])  # no cast
        wide.copy_(narrow)  # into another dtype
    assert casts.numel == 4 + 3
    narrow.copy_(wide)
    assert casts.numel == 7
