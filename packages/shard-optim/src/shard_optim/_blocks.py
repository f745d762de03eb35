"""Moments in 8 bits, each block of elements with a scale of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch

from shard_flat import ShardSpec, ShardTensor
from shard_optim._runs import piece_of
from shard_optim._slots import Slot

BLOCK = 256
"""Elements of a flattened parameter that share a scale, counted from its beginning."""

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class ScaleSlot(Slot):
    """One number for each block of a parameter; the rank that owns the block's first element."""

    joined: ClassVar[bool] = False

    def blank(self, param: torch.Tensor) -> torch.Tensor:
        """Return zeros for a parameter. Local."""
        if not isinstance(param, ShardTensor):
            return torch.zeros(self.shape_of(param), dtype=self.dtype, device=param.device)
        spec = param.spec.coarse(BLOCK, param.comm.rank)
        local = torch.zeros(spec.stop - spec.start, dtype=self.dtype, device=param.device)
        return ShardTensor(local, spec, comm=param.comm, mesh=param.device_mesh)

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape. Local."""
        return (-(-param.numel() // BLOCK),)

    def fits(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a tensor has the cut of the parameter's as it is now. Local."""
        return piece_of(value).shape == piece_of(self.blank(param)).shape

    def is_cut_like(self, value: ShardTensor, param: ShardTensor) -> bool:
        """Whether a piece is that of the slot on every rank. Local."""
        spec = param.spec.coarse(BLOCK, param.comm.rank)
        return spec.is_cut_like(value.spec, param.comm.size)


CODES = (
    Slot("exp_avg", torch.int8),
    Slot("exp_avg_sq", torch.uint8),
    ScaleSlot("exp_avg_scale", torch.float32),
    ScaleSlot("exp_avg_sq_scale", torch.float32),
)
"""State of a parameter whose moments are codes."""


def scale_of(rows: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value of each block ``[blocks, BLOCK]``, ``[blocks]``. Local."""
    return rows.abs().amax(1)


def encode_signed(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers of either sign, int8 in [-127, 127].

    Codes go by the square root, so that small numbers keep some precision: a block whose largest
    number is 1 holds 0.25 as 64 and gets 0.2539 back, and the smallest above 0 is 0.000062.

    Args:
        rows: float32 ``[blocks, BLOCK]``.
        scales: ``[blocks]``, the largest absolute values.

    **Collective**: local.
    """
    relative = rows / scales.clamp_min(_TINY).unsqueeze(1)
    return relative.abs().sqrt_().mul_(127).round_().mul_(rows.sign()).to(torch.int8)


def decode_signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes ``[blocks, BLOCK]`` in float32. Local."""
    wide = codes.to(torch.float32, copy=True)
    return wide.mul_(wide.abs()).div_(127 * 127).mul_(scales.unsqueeze(1))


def encode_square(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers of at least 0, uint8; none above 0 gets 0.

    Codes go by the fourth root: they span ten powers of ten, and a step with a second moment that
    was lost would have no bound.

    Args:
        rows: float32 ``[blocks, BLOCK]``.
        scales: ``[blocks]``, the largest values.

    **Collective**: local.
    """
    relative = rows / scales.clamp_min(_TINY).unsqueeze(1)
    codes = relative.sqrt_().sqrt_().mul_(255).round_()
    return torch.maximum(codes, rows.sign()).to(torch.uint8)


def decode_square(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of codes ``[blocks, BLOCK]`` in float32. Local."""
    wide = codes.to(torch.float32, copy=True)
    wide.mul_(wide).div_(255 * 255)
    return wide.mul_(wide).mul_(scales.unsqueeze(1))


def cut_blocks(spec: ShardSpec, size: int) -> tuple[int, ...]:
    """Return the blocks of a parameter that lie on more than one rank, in order. Local.

    With blocks of 256, a parameter of 1,000 elements cut at 512 and 700 has one: block 2.
    """
    return _cut_blocks(spec.origin, spec.shard_numel, spec.numel, size)


@lru_cache(maxsize=1 << 16)
def _cut_blocks(origin: int, shard_numel: int, numel: int, size: int) -> tuple[int, ...]:
    first = origin // shard_numel + 1
    last = min((origin + numel - 1) // shard_numel, size - 1)
    cuts = [rank * shard_numel - origin for rank in range(first, last + 1)]
    return tuple(sorted({cut // BLOCK for cut in cuts if cut % BLOCK}))
