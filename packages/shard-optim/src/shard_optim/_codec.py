"""Moments of AdamW made into the codes of AdamW8bit, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._blocks import (
    BLOCK,
    decode_signed,
    decode_square,
    encode_signed,
    encode_square,
)
from shard_optim._cuts import cut_blocks
from shard_optim._rows import Rows
from shard_optim._runs import flat_piece
from shard_optim._state import Saved
from shard_optim._window import widened

_MOMENTS = ("exp_avg", "exp_avg_sq")


@torch.no_grad()
def encode_moments(param: torch.Tensor, own: dict[str, Any], source: Saved) -> None:
    """Fill the codes and scales of a parameter from its moments.

    Args:
        param: the parameter.
        own: AdamW8bit's state of it; filled.
        source: AdamW's, full tensors or pieces.

    **Collective**: one all_reduce over the parameter's ranks where ``source`` is pieces and a
    boundary cuts a block. **Memory**: a few windows, for the call.
    """
    rows = _rows_of(param)
    flats = [_elements(source[name], param) for name in _MOMENTS]

    def top(block: int) -> list[torch.Tensor]:
        """The largest number of a block that is known here, of both moments."""
        columns, start = flats, rows.start
        if not isinstance(source["exp_avg"], ShardTensor):
            columns, start = [source[name].reshape(-1) for name in _MOMENTS], 0
        low, high = (max(at * BLOCK - start, 0) for at in (block, block + 1))
        return [_largest(flat[low:high]) for flat in columns]

    shared = _shared_scales(param, source, top)
    for which, encode in enumerate((_signed, _square)):
        codes, scales = (_elements(own[_MOMENTS[which] + end], param) for end in ("", "_scale"))
        begun = -(-rows.start // BLOCK)
        for first, last in rows.windows(param.device):
            wide = widened(rows.take(flats[which], first, last).to(param.device))
            found = wide.abs().amax(1)
            for block, both in shared.items():
                if first <= block < last:
                    found[block - first] = both[which]
            rows.put(codes, encode(wide, found), first)
            low = max(first, begun)
            scales[low - begun : last - begun].copy_(found[low - first :])


@torch.no_grad()
def decode_moments(param: torch.Tensor, own: dict[str, Any], source: Saved) -> None:
    """Fill the moments of a parameter from its codes and scales.

    Args:
        param: the parameter.
        own: AdamW's state of it; filled.
        source: AdamW8bit's, full tensors or pieces.

    **Collective**: one all_reduce over the parameter's ranks where ``source`` is pieces and a
    boundary cuts a block. **Memory**: a few windows, for the call.
    """
    rows = _rows_of(param)
    columns = [source[f"{name}_scale"] for name in _MOMENTS]
    whole = not isinstance(columns[0], ShardTensor)
    begun = 0 if whole else -(-rows.start // BLOCK)
    scales = [flat_piece(column).view(-1) for column in columns]

    def known(block: int) -> list[torch.Tensor]:
        """The scales of a block that begins here, else none."""
        here = 0 <= block - begun < scales[0].numel()
        return [each[block - begun] if here else each.new_zeros(()) for each in scales]

    shared = _shared_scales(param, source, known)
    for which in range(2):
        codes = _elements(source[_MOMENTS[which]], param)
        moments = _elements(own[_MOMENTS[which]], param)
        for first, last in rows.windows(param.device):
            found = torch.zeros(last - first, device=param.device)
            low = max(first, begun)
            found[low - first :].copy_(scales[which][low - begun : last - begun])
            for block in range(first, low):  # begins on another rank
                found[block - first] = shared[block][which]
            taken = rows.take(codes, first, last).to(param.device)
            wide = torch.empty_like(taken, dtype=torch.float32)
            if which:
                decode_square(taken, found, wide)
            else:
                decode_signed(taken, found, wide, torch.empty_like(wide))
            rows.put(moments, wide, first)


def _signed(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows, dtype=torch.int8)
    encode_signed(rows, rows.abs(), scales, out)
    return out


def _square(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows, dtype=torch.uint8)
    short = torch.empty_like(rows, dtype=torch.int16)
    encode_square(rows, scales, out, spare=torch.empty_like(rows), short=short)
    return out


def _rows_of(param: torch.Tensor) -> Rows:
    """Blocks as the rows of a matrix."""
    start, stop = 0, param.numel()
    if isinstance(param, ShardTensor):
        start, stop = param.spec.start, param.spec.stop
    return Rows((-(-param.numel() // BLOCK), BLOCK), start, stop)


def _elements(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's elements ``[n]`` of a state tensor, in the order of the parameter's memory."""
    if isinstance(param, ShardTensor) and not isinstance(value, ShardTensor):
        return value.reshape(-1)[param.spec.start : param.spec.stop]
    if value.shape == param.shape and value.stride() != param.stride():
        like = param.detach()
        value = torch.empty_like(
            like, dtype=value.dtype, device=value.device, memory_format=torch.preserve_format
        ).copy_(value)
    return flat_piece(value).view(-1)


def _largest(flat: torch.Tensor) -> torch.Tensor:
    return flat.abs().amax() if flat.numel() else flat.new_zeros(())


def _shared_scales(
    param: torch.Tensor, source: Saved, known: Callable[[int], list[torch.Tensor]]
) -> dict[int, torch.Tensor]:
    """Scales ``[2]`` of blocks that lie on several ranks: the largest that any of them knows."""
    if not isinstance(param, ShardTensor):
        return {}
    blocks = cut_blocks(param.spec, param.comm.size)
    if not blocks:
        return {}
    table = torch.stack([torch.stack(known(block)) for block in blocks])
    table = table.to(param.device, torch.float32)
    if isinstance(source["exp_avg"], ShardTensor):
        param.comm.all_reduce(table, op="max")
    return dict(zip(blocks, table, strict=True))
