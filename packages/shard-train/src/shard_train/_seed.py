"""Random numbers that depend on what they are for, not on who draws them."""

from __future__ import annotations

import hashlib

import torch


def generator_for(*key: int | str) -> torch.Generator:
    """Return a generator for one purpose.

    Args:
        key: What the numbers are for, such as ``(seed, "batch", step)``.

    Returns:
        A generator on the CPU. Equal keys give equal numbers, on every rank; different keys
        give independent ones.

    **Collective**: local.
    """
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
