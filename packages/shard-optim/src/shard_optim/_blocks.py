"""Moments in 8 bits, each block of elements with a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shard_flat import ShardTensor
from shard_optim._runs import piece_of
from shard_optim._slots import Slot

BLOCK = 256
"""Elements of a flattened parameter that share a scale, counted from its beginning."""

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ScaleSlot(Slot):
    """One number for each block of a parameter; the rank that owns the block's first element."""

    joined: ClassVar[bool] = False
    moves: ClassVar[bool] = False

    def numel_of(self, param: torch.Tensor) -> int:
        """Return how many blocks of a parameter begin on this rank. Local."""
        if not isinstance(param, ShardTensor):
            return self.shape_of(param)[0]
        spec = param.spec.coarse(BLOCK, param.comm.rank)
        return spec.stop - spec.start

    def shaped(self, flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Show ``[n]`` as state of a parameter. Local."""
        if not isinstance(param, ShardTensor):
            return flat
        spec = param.spec.coarse(BLOCK, param.comm.rank)
        return ShardTensor(flat, spec, comm=param.comm, mesh=param.device_mesh)

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape. Local."""
        return (-(-param.numel() // BLOCK),)

    def fits(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a tensor has the cut of the parameter's as it is now. Local."""
        return piece_of(value).shape == (self.numel_of(param),)

    def is_cut_like(self, value: ShardTensor, param: torch.Tensor) -> bool:
        """Whether a piece is that of the slot on every rank. Local."""
        if not isinstance(param, ShardTensor):
            return False
        spec = param.spec.coarse(BLOCK, param.comm.rank)
        return spec.is_cut_like(value.spec, param.comm.size)


CODES = (
    Slot("exp_avg", torch.int8),
    Slot("exp_avg_sq", torch.uint8),
    ScaleSlot("exp_avg_scale", torch.float32),
    ScaleSlot("exp_avg_sq_scale", torch.float32),
)
"""State of a parameter whose moments are codes."""


def encode_signed(
    rows: torch.Tensor, sizes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the codes of numbers of either sign, in [-127, 127].

    Codes go by the square root, so that small numbers keep some precision: a block whose largest
    number is 1 holds 0.25 as 64 and gets 0.2539 back, and the smallest above 0 is 0.000062.

    Args:
        rows: ``[blocks, BLOCK]``.
        sizes: their absolute values; used up.
        scales: ``[blocks]``, the largest of them.
        out: int8, as ``rows``.

    **Collective**: local.
    """
    factors = 127 / scales.clamp_min(_TINY).sqrt_()
    roots = sizes.clamp_min_(_TINY).rsqrt_().mul_(rows)  # faster than a root and a sign
    out.copy_(roots.mul_(factors.unsqueeze(1)).round_())


def decode_signed(
    codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, spare: torch.Tensor
) -> torch.Tensor:
    """Return the numbers of codes ``[blocks, BLOCK]``, in ``out``; ``spare`` is memory. Local."""
    torch.abs(out.copy_(codes), out=spare)
    return out.mul_(spare).mul_(scales.div(127**2).unsqueeze(1))


def encode_square(
    rows: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    *,
    spare: torch.Tensor,
    short: torch.Tensor,
) -> None:
    """Write the codes of numbers of at least 0; none above 0 gets 0.

    Codes go by the fourth root: they span ten powers of ten, and a step with a second moment that
    was lost would have no bound.

    Args:
        rows: ``[blocks, BLOCK]``; used up.
        scales: ``[blocks]``, the largest values.
        out: uint8, as ``rows``.
        spare: memory like ``rows``.
        short: memory like it, int16.

    **Collective**: local.
    """
    factors = 255 / scales.clamp_min(_TINY).sqrt_().sqrt_()
    rows.rsqrt_().rsqrt_().mul_(factors.unsqueeze(1))  # faster than two roots
    torch.maximum(rows, torch.sign(rows, out=spare), out=rows).round_()
    out.copy_(short.copy_(rows))  # to eight bits at once takes a slower way


def decode_square(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes ``[blocks, BLOCK]``, in ``out``. Local."""
    out.copy_(codes)
    out.mul_(out)
    return out.mul_(out).mul_(scales.div(255.0**4).unsqueeze(1))
