"""Random bits that depend on a name, a step and an element, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import torch

_STRIDE = 0x9E3779B1  # odd, so that the elements of a parameter begin at different numbers
_MIX = (0x85EBCA6B, 0xC2B2AE35)
_LOW = (1 << 16) - 1


def seed_of(name: str, step: int) -> int:
    """Return where the bits of a parameter begin in a step, below ``2**32``. Local."""
    return crc32(f"{name}\0{step}".encode())


def noise(segments: Sequence[tuple[int, int, int]], device: torch.device) -> torch.Tensor:
    """Return random bits for consecutive elements of one parameter or several.

    Args:
        segments: for each parameter its seed and the first and last but one element.
        device: where to make them.

    Returns:
        int32 ``[total]``, each of 32 random bits.

    **Collective**: local. **Memory**: twice the result, for the call.

    **Source**: the finalizer of MurmurHash3 (A. Appleby), over a counter.
    """
    longest = max(stop - start for _, start, stop in segments)
    counter = torch.arange(longest, dtype=torch.int32, device=device).mul_(_signed(_STRIDE))
    parts = [
        counter[: stop - start] + _signed(start * _STRIDE + seed) for seed, start, stop in segments
    ]
    return mix(parts[0] if len(parts) == 1 else torch.cat(parts))


def mix(bits: torch.Tensor) -> torch.Tensor:
    """Mix each int32 number in place, so that any bit changes about half of all bits. Local.

    Worked example: 0 stays 0 and 1 becomes 0x514E28B7.
    """
    bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW)).mul_(_signed(_MIX[0]))
    bits.bitwise_xor_((bits >> 13).bitwise_and_((1 << 19) - 1)).mul_(_signed(_MIX[1]))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(_LOW))


def round_stochastically(
    target: torch.Tensor, wide: torch.Tensor, bits: torch.Tensor, *, high: bool = False
) -> None:
    """Round to one of the two neighbours, the nearer one being likelier in proportion.

    A number a quarter of the way up from one bfloat16 to the next goes up in a quarter of all
    cases, so that sums of small steps are right on average. Infinities and NaN stay.

    Args:
        target: bfloat16 ``[n]``, written.
        wide: float32 ``[n]``, contiguous.
        bits: int32 ``[n]``; 16 of each are used.
        high: use the upper ones.

    **Collective**: local.
    """
    drawn = (bits >> 16 if high else bits) & _LOW
    up = wide.view(torch.int32).add(drawn).bitwise_and_(~_LOW).view(torch.float32)
    target.copy_(torch.where(wide.isfinite(), up, wide))


def _signed(value: int) -> int:
    value &= (1 << 32) - 1
    return value - (1 << 32) if value >> 31 else value
