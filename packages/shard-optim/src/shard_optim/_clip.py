"""The norm of all gradients together, and clipping by it or by value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from shard_flat import GatherComm, ShardTensor, power_sum
from shard_optim._runs import find_runs, join, piece_of


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale gradients so that the norm of all of them together is at most ``max_norm``.

    Sharded parameters count once over all ranks, plain ones once as they are (they must be the
    same on every rank). Partial sums are float64 and the result is rounded to float32, so it does
    not depend on the number of ranks unless the exact norm lies within about 1e-15 of the middle
    between two float32 numbers.

    Args:
        parameters: sharded, plain or both; those without a gradient are passed over, and one
            that is listed twice counts once.
        max_norm: the bound, at least 0.
        norm_type: the p of the norm, above 0; ``inf`` for the largest element.
        error_if_nonfinite: raise where the norm is inf or NaN, before any gradient changes.
        foreach: taken so that calls of torch's function work unchanged; it has no effect.

    Returns:
        The norm before clipping, a plain float32 scalar, the same on all ranks.

    Raises:
        TypeError: a gradient is one of torch's own DTensors.
        ValueError: ``max_norm`` or ``norm_type`` is out of range; a gradient is sparse, or is
            sharded where its parameter is plain or the other way round.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; raised on all
            ranks.

    **Collective**: one all_reduce of one number per comm that a sharded parameter uses, two where
    parameters are pieces of another mesh's DTensors; every rank must call, with the same
    parameters.

    **Memory**: 1 MiB on a CPU, 128 MiB elsewhere, for the call.
    """
    if not max_norm >= 0:
        raise ValueError(f"expected max_norm >= 0, got {max_norm}")
    params = _distinct(parameters)
    runs = _runs_by_place(params)
    norm = _checked_norm(params, runs, float(norm_type), error_if_nonfinite)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for (_, device), tensors in runs.items():
        if tensors:
            torch._foreach_mul_(tensors, scale.to(device))
    return norm


@torch.no_grad()
def get_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Return the norm of all gradients together, as ``clip_grad_norm_`` does, and change none.

    Args:
        parameters: sharded, plain or both; those without a gradient are passed over, and one
            that is listed twice counts once.
        norm_type: the p of the norm, above 0; ``inf`` for the largest element.
        error_if_nonfinite: raise where the norm is inf or NaN.

    Returns:
        A plain float32 scalar, the same on all ranks.

    Raises:
        TypeError: a gradient is one of torch's own DTensors.
        ValueError: ``norm_type`` is out of range; a gradient is sparse, or is sharded where its
            parameter is plain or the other way round.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; raised on all
            ranks.

    **Collective**: one all_reduce of one number per comm that a sharded parameter uses; every
    rank of it must call, with the same parameters.

    **Memory**: 1 MiB on a CPU, 128 MiB elsewhere, for the call.
    """
    params = _distinct(parameters)
    return _checked_norm(params, _runs_by_place(params), float(norm_type), error_if_nonfinite)


@torch.no_grad()
def clip_grad_value_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Bring every element of every gradient into ``[-clip_value, clip_value]``; NaN stays.

    Args:
        parameters: sharded, plain or both; those without a gradient are passed over.
        clip_value: the bound, at least 0.
        foreach: taken so that calls of torch's function work unchanged; it has no effect.

    Raises:
        TypeError: a gradient is one of torch's own DTensors.
        ValueError: ``clip_value`` is negative or NaN; a gradient is sparse, or is sharded where
            its parameter is plain or the other way round.

    **Collective**: local.
    """
    if not clip_value >= 0:
        raise ValueError(f"expected clip_value >= 0, got {clip_value}")
    for tensors in _runs_by_place(_distinct(parameters)).values():
        if tensors:
            torch._foreach_clamp_min_(tensors, -clip_value)
            torch._foreach_clamp_max_(tensors, clip_value)


def _distinct(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    return list({id(param): param for param in listed}.values())


_Place = tuple[tuple[GatherComm, ...], torch.device]


def _runs_by_place(params: Sequence[torch.Tensor]) -> dict[_Place, list[torch.Tensor]]:
    """Gradients joined into runs, by comms and device, which are there though none has arrived."""
    grads: dict[_Place, list[torch.Tensor]] = {}
    for index, param in enumerate(params):
        comms = param.comms if isinstance(param, ShardTensor) else ()
        found = grads.setdefault((comms, piece_of(param).device), [])
        grad = param.grad
        if grad is not None:
            found.append(_piece_of_grad(param, grad, index))
    return {
        place: [join([found[i] for i in run]) for run in find_runs([found])]
        for place, found in grads.items()
    }


def _piece_of_grad(param: torch.Tensor, grad: torch.Tensor, index: int) -> torch.Tensor:
    if isinstance(param, ShardTensor) and isinstance(grad, ShardTensor):
        return grad.local
    name = param.spec.name if isinstance(param, ShardTensor) else f"parameter {index}"
    if isinstance(param, ShardTensor) or isinstance(grad, ShardTensor):
        kinds = ["sharded" if isinstance(t, ShardTensor) else "plain" for t in (param, grad)]
        raise ValueError(f"{name}: the parameter is {kinds[0]} and its gradient {kinds[1]}")
    if isinstance(grad, DTensor):
        raise TypeError(
            f"{name}: expected a plain gradient or a ShardTensor, got torch's "
            f"{type(grad).__name__}; use torch.nn.utils.clip_grad_norm_ for it"
        )
    if grad.layout is not torch.strided:
        raise ValueError(f"{name}: expected a dense gradient, got {grad.layout}")
    return grad


def _checked_norm(
    params: Sequence[torch.Tensor],
    runs: dict[_Place, list[torch.Tensor]],
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    if not norm_type > 0:
        raise ValueError(f"expected norm_type > 0, got {norm_type}")
    if not params:
        return torch.zeros(())
    norm = _total_norm(runs, norm_type).to(params[0].device)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the norm of order {norm_type:g} of the gradients of {len(params)} parameters is "
            f"{norm.item()}; no gradient was changed"
        )
    return norm


def _total_norm(runs: dict[_Place, list[torch.Tensor]], norm_type: float) -> torch.Tensor:
    """The norm over all ranks, a float32 scalar."""
    largest = math.isinf(norm_type)
    by_comms: dict[tuple[GatherComm, ...], torch.Tensor] = {}
    for (comms, device), tensors in runs.items():
        part = torch.zeros((), dtype=torch.float64, device=device)
        if tensors:
            part = power_sum(tensors, norm_type)
        if comms in by_comms:
            part = _combine(by_comms[comms], part.to(by_comms[comms].device), largest)
        by_comms[comms] = part
    for comms, part in by_comms.items():
        for comm in comms:
            comm.all_reduce(part, op="max" if largest else "sum")
    total, *rest = by_comms.values()
    for part in rest:
        total = _combine(total, part.to(total.device), largest)
    return (total if largest else total ** (1.0 / norm_type)).to(torch.float32)


def _combine(a: torch.Tensor, b: torch.Tensor, largest: bool) -> torch.Tensor:
    return torch.maximum(a, b) if largest else a + b
