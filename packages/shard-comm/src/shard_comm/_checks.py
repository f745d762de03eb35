"""What is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def serves(mine: torch.device, device: torch.device) -> bool:
    """Whether a comm for ``mine`` takes tensors on ``device``. Local."""
    return mine.type == device.type and mine.index in (None, device.index)


def check_tensors(op: str, where: str, **given: object) -> None:
    """Raise TypeError unless every argument of a call is a tensor. Local.

    Args:
        op: the call.
        where: the end of messages.
        given: the arguments, by name.
    """
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{op}: expected {name} to be a tensor, got {type(value).__name__} {where}; ranks' "
                f"parts lie one after another in one tensor, not in a list"
            )


def check_pair(
    op: str,
    big: torch.Tensor,
    small: torch.Tensor,
    *,
    numel: int,
    device: torch.device,
    where: str,
    mixed: bool = False,
) -> None:
    """Raise ValueError unless two tensors of a call go together. Local.

    Args:
        op: the call.
        big: of ``numel`` elements.
        small: the other one.
        numel: what ``big`` must have.
        device: where both must be.
        where: the end of messages.
        mixed: they may differ in dtype.
    """
    if big.numel() != numel:
        large, other = ("inp", "out") if op == "reduce_scatter" else ("out", "inp")
        turned = f"; the result comes first, {op}(out, inp)" if small.numel() > big.numel() else ""
        raise ValueError(
            f"{op}: expected {numel} elements in {large} for {small.numel()} in {other}, "
            f"got {big.numel()} {where}{turned}"
        )
    if big.dtype != small.dtype and not mixed:
        raise ValueError(f"{op}: expected one dtype, got {big.dtype} and {small.dtype} {where}")
    for tensor in (big, small):
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: expected a contiguous tensor, got strides {tensor.stride()} {where}; "
                f"call contiguous()"
            )
        if not serves(device, tensor.device):
            raise ValueError(
                f"{op}: expected a tensor on {device}, got one on {tensor.device} {where}"
            )


def check_own(
    own: Sequence[torch.Tensor],
    out: torch.Tensor,
    inp: torch.Tensor,
    *,
    device: torch.device,
    where: str,
) -> None:
    """Raise unless ``own`` are flat tensors like ``inp`` that make up ``out``. Local.

    Raises:
        TypeError: one is no tensor.
        ValueError: they do not.
    """
    for part in own:
        check_tensors("reduce_scatter", where, own=part)
    numel = sum(part.numel() for part in own)
    if numel != out.numel():
        raise ValueError(
            f"reduce_scatter: expected own to have {out.numel()} elements in all, got {numel} "
            f"{where}"
        )
    for part in own:
        if part.ndim != 1 or not part.is_contiguous() or part.dtype != inp.dtype:
            raise ValueError(
                f"reduce_scatter: expected own to be contiguous tensors [n] of {inp.dtype}, "
                f"got {part.dtype} of shape {list(part.shape)}, strides {part.stride()} {where}"
            )
        if not serves(device, part.device):
            raise ValueError(
                f"reduce_scatter: expected own on {device}, got a tensor on {part.device} {where}"
            )


def check_apart(op: str, out: torch.Tensor, inp: torch.Tensor, *, where: str) -> None:
    """Raise ValueError where writing ``out`` changes ``inp``. Local."""
    if out.is_meta or out.numel() == 0:
        return
    first, second = sorted([out, inp], key=lambda t: t.data_ptr())
    if first.data_ptr() + first.nbytes > second.data_ptr():
        raise ValueError(
            f"{op}: out and inp overlap in memory {where}; pass a tensor of its own for one of them"
        )
