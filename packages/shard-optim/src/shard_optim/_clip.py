"""Clipping by the norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from shard_flat import GatherComm, ShardTensor
from shard_optim._runs import find_runs, join, piece_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them together is at most ``max_norm``.

    Sharded parameters count once over all ranks, plain ones once as they are (they must be the
    same on every rank). Partial sums are float64 and the result is rounded to float32, so it does
    not depend on the number of ranks unless the exact norm lies within about 1e-15 of the middle
    between two float32 numbers.

    Args:
        parameters: sharded, plain or both; those without a gradient are passed over.
        max_norm: the bound, at least 0.
        norm_type: the p of the norm, above 0; ``inf`` for the largest element.
        error_if_nonfinite: raise where the norm is inf or NaN, before any gradient changes.

    Returns:
        The norm before clipping, a plain float32 scalar, the same on all ranks.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is out of range.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; raised on all
            ranks.

    **Collective**: one all_reduce of one number per comm that a sharded parameter uses; every
    rank of it must call, with the same parameters.
    """
    norm_type = float(norm_type)
    if not max_norm >= 0:
        raise ValueError(f"expected max_norm >= 0, got {max_norm}")
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0, got {norm_type}")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if not params:
        return torch.zeros(())
    by_comm: dict[GatherComm | None, list[torch.Tensor]] = {}
    for param in params:
        comm = param.comm if isinstance(param, ShardTensor) else None
        grads = by_comm.setdefault(comm, [])
        if param.grad is not None:
            grads.append(piece_of(param.grad))
    flat: list[torch.Tensor] = []
    total = torch.zeros((), dtype=torch.float64, device=params[0].device)
    for comm, grads in by_comm.items():
        runs = [join([grads[i] for i in run]) for run in find_runs([grads])]
        part = _power_sum(runs, norm_type, like=total)
        if comm is not None:
            comm.all_reduce(part, op="max" if math.isinf(norm_type) else "sum")
        total = _combine(total, part, norm_type)
        flat.extend(runs)
    norm = (total if math.isinf(norm_type) else total ** (1.0 / norm_type)).to(torch.float32)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of {len(params)} parameters is "
            f"{norm.item()}; no gradient was changed"
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in flat:
        by_device.setdefault(each.device, []).append(each)
    for device, tensors in by_device.items():
        torch._foreach_mul_(tensors, scale.to(device))
    return norm


def _power_sum(runs: list[torch.Tensor], norm_type: float, *, like: torch.Tensor) -> torch.Tensor:
    """Sum of ``|x| ** p`` over this rank's elements; for ``p = inf`` the largest ``|x|``."""
    part = torch.zeros_like(like)
    for run in runs:
        norm = torch.linalg.vector_norm(run, norm_type, dtype=torch.float64).to(like.device)
        part = _combine(part, norm if math.isinf(norm_type) else norm**norm_type, norm_type)
    return part


def _combine(a: torch.Tensor, b: torch.Tensor, norm_type: float) -> torch.Tensor:
    return torch.maximum(a, b) if math.isinf(norm_type) else a + b
