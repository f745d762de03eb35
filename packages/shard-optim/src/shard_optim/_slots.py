"""The state that belongs to each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._runs import find_runs, flat_piece, piece_of

SLOTS = ("exp_avg", "exp_avg_sq")

State = MutableMapping[torch.Tensor, dict[str, Any]]


def allocate_slots(params: Sequence[torch.Tensor], state: State) -> None:
    """Make what is missing of the parameters' state: zeros, and step counters at 0.

    Where parameters lie side by side and none of them has moments, their moments do so too.

    Args:
        params: parameters.
        state: the optimizer's.

    **Collective**: local. **Memory**: two moments of each parameter's piece.
    """
    for rows in find_runs([[flat_piece(p) for p in params]]):
        members = [params[row] for row in rows]
        if len(members) > 1 and not any(slot in state[m] for m in members for slot in SLOTS):
            _allocate_together(members, state)
    for param in params:
        own = state[param]
        if "step" not in own:
            own["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for slot in SLOTS:
            if slot not in own:
                own[slot] = torch.zeros_like(param.detach(), memory_format=torch.preserve_format)
            elif piece_of(own[slot]).stride() != piece_of(param).stride():
                # The kernel goes by memory alone.
                blank = torch.empty_like(param.detach(), memory_format=torch.preserve_format)
                own[slot] = blank.copy_(own[slot])


def check_slots(
    param: torch.Tensor, own: Mapping[str, Any], name_of: Callable[[torch.Tensor], str]
) -> None:
    """Check that moments that are there fit their parameter; the kernel would not.

    Args:
        param: the parameter.
        own: its state.
        name_of: gives its name, for errors.

    Raises:
        ValueError: a moment's shape, dtype or range is not the parameter's.

    **Collective**: local.
    """
    piece = piece_of(param)
    for slot in SLOTS:
        value = own.get(slot)
        if value is None:
            continue
        there = piece_of(value)
        if there.shape != piece.shape or there.dtype != piece.dtype:
            raise ValueError(
                f"{name_of(param)}: expected {slot} of shape {tuple(piece.shape)} and "
                f"{piece.dtype}, got {tuple(there.shape)} and {there.dtype}; the parameter changed "
                f"under its state, make a new optimizer"
            )


def _allocate_together(members: Sequence[torch.Tensor], state: State) -> None:
    pieces = [piece_of(m) for m in members]
    numel = sum(p.numel() for p in pieces)
    for slot in SLOTS:
        flat = torch.zeros(numel, dtype=pieces[0].dtype, device=pieces[0].device)
        for member, part in zip(members, flat.split([p.numel() for p in pieces]), strict=True):
            if isinstance(member, ShardTensor):
                state[member][slot] = member.like(part)
            elif member.is_contiguous():
                state[member][slot] = part.view(member.shape)
