"""Sums, norms and extremes of whole tensors, from what each rank's piece adds to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shard_flat._norm import power_sum
from shard_flat._operands import mark_written, no_meaning
from shard_flat._protocol import GatherComm
from shard_flat._tensor import ShardTensor


def sum_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``sum()`` over all elements. Collective."""
    tensor: ShardTensor = args[0]
    dtype = kwargs.get("dtype") or torch.empty(0, dtype=tensor.dtype).sum().dtype
    return _total(tensor, dtype).to(dtype)


def mean_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``mean()`` over all elements. Collective."""
    tensor: ShardTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"{tensor.spec.name}: mean() needs a floating dtype, got {dtype}")
    return (_total(tensor, dtype) / tensor.numel()).to(dtype)


def _total(tensor: ShardTensor, dtype: torch.dtype) -> torch.Tensor:
    total = tensor._local_tensor.sum(dtype=torch.float64 if dtype.is_floating_point else dtype)
    for comm in tensor.comms:
        comm.all_reduce(total, op="sum")
    return total


def any_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``any()`` or ``all()`` over all elements. Collective."""
    tensor: ShardTensor = args[0]
    found: torch.Tensor = func(tensor._local_tensor)  # without elements: no, and yes
    total = found.to(torch.int64)
    for comm in tensor.comms:
        comm.all_reduce(total, op="max" if func is torch.ops.aten.any.default else "min")
    return total.to(found.dtype)


def extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``max()``, ``min()``, ``amax()`` or ``amin()`` over all elements; NaN wins. Collective."""
    tensor: ShardTensor = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if dim or dim == 0 or keepdim:
        raise no_meaning(func, args, kwargs)
    if not tensor.numel():
        raise RuntimeError(f"{tensor.spec.name}: {func} of a tensor without elements")
    piece, op = tensor._local_tensor, "max" if "max" in func._schema.name else "min"
    # Without elements torch has no extreme, and a dtype that has none is to fail on all ranks.
    best: torch.Tensor = func(piece if piece.numel() else piece.new_zeros(1))
    dtype, is_floating = best.dtype, best.dtype.is_floating_point
    best = best.to(torch.float64 if is_floating else torch.int64)
    if not piece.numel():
        ends = torch.iinfo(torch.int64)
        lowest, highest = (-math.inf, math.inf) if is_floating else (ends.min, ends.max)
        best.fill_(lowest if op == "max" else highest)
    for comm in tensor.comms:
        comm.all_reduce(best, op=op)
    return best.to(dtype)


def vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``torch.linalg.vector_norm`` over all elements. Collective."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dim is not None or keepdim:
        raise no_meaning(func, args, kwargs)
    return _norms([args[0]], order, kwargs.get("dtype"))[0]


def norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """``Tensor.norm`` over all elements. Collective."""
    return _norms([args[0]], args[1] if len(args) > 1 else 2, None)[0]


def foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """One norm per tensor of a list. Collective, once per comm in the list."""
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return _norms(args[0], order, dtype)


def _norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Norms of whole tensors, plain ones taken as replicated.

    Partial sums are float64, so that the float32 result does not depend on where the cuts fall
    unless the exact value lies within a few 1e-16 of the middle between two float32 numbers.
    """
    order = float(order)
    by_comm = _rows_by_comm(tensors)
    for tensor in tensors:
        name = tensor.spec.name if isinstance(tensor, ShardTensor) else "a plain tensor"
        if not order > 0:
            raise ValueError(f"{name}: expected a norm order above 0, got {order}")
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}: a norm needs a floating dtype, got {tensor.dtype}")
    pieces = [t._local_tensor if isinstance(t, ShardTensor) else t for t in tensors]
    partial = torch.stack([power_sum([piece], order) for piece in pieces])
    for comm, rows in by_comm.items():
        index = torch.tensor(rows, device=partial.device)
        mine = partial[index]
        comm.all_reduce(mine, op="max" if math.isinf(order) else "sum")
        partial[index] = mine
    norms = partial if math.isinf(order) else partial ** (1.0 / order)
    return [n.to(dtype or t.dtype) for n, t in zip(norms.unbind(), tensors, strict=True)]


def non_finite_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's unscale: every rank learns whether any rank saw an inf or a NaN. Collective."""
    grads, found_inf, inverse_scale = args
    func(
        [g._local_tensor if isinstance(g, ShardTensor) else g for g in grads],
        found_inf,
        inverse_scale,
    )
    mark_written(grads)
    for comm in _rows_by_comm(grads):
        comm.all_reduce(found_inf, op="max")


def _rows_by_comm(tensors: Sequence[torch.Tensor]) -> dict[GatherComm, list[int]]:
    """Which tensors of a list are sharded over which ranks, in the order of the list.

    A piece of a DTensor's local part is sharded over both its own ranks and the DTensor's.
    """
    rows: dict[GatherComm, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, ShardTensor):
            for comm in tensor.comms:
                rows.setdefault(comm, []).append(i)
    return rows
