"""What torch's operators mean on pieces."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shard_flat._tensor import ShardTensor

aten = torch.ops.aten

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Element-wise in meaning, though torch does not tag them so.
_ELEMENTWISE = {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on pieces. Collective for reductions, else local."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        return handler(func, args, kwargs)
    name = func._schema.name
    if name.startswith(("aten::_foreach_", "aten::_fused_")):
        return _listwise(func, args, kwargs)
    random = torch.Tag.nondeterministic_seeded in func.tags  # drawn apart is not drawn whole
    if func in _ELEMENTWISE or (torch.Tag.pointwise in func.tags and not random):
        return _elementwise(func, args, kwargs)
    raise _no_meaning(func, args, kwargs)


def _no_meaning(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
    tensor = _first((*args, *kwargs.values()))
    where = tensor.spec.name if tensor is not None else "ShardTensor"
    shape = tensor.spec.shape if tensor is not None else ()
    return TypeError(
        f"{where}: {func} has no meaning on one rank's piece of a tensor of shape {shape}; call "
        f"full_tensor() (all ranks) and use the result, or use the parameter inside the forward "
        f"of the module that owns it"
    )


def _first(values: Sequence[Any]) -> ShardTensor | None:
    for value in values:
        if isinstance(value, ShardTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first(value)
            if found is not None:
                return found
    return None


def _same_range(func: Any, a: ShardTensor, b: ShardTensor) -> None:
    x, y = a.spec, b.spec
    if x is y or (x.start == y.start and x.stop == y.stop and x.shape == y.shape):
        return
    raise ValueError(
        f"{func}: {x.name} has shape {x.shape} and range [{x.start}, {x.stop}), {y.name} has shape "
        f"{y.shape} and range [{y.start}, {y.stop}) (rank {a.comm.rank} of {a.comm.size}); shard "
        f"both by one layout"
    )


def _piece(func: Any, value: Any, like: ShardTensor) -> Any:
    """The operand that goes with ``like``'s piece: a piece, a scalar, or anything but a tensor."""
    if isinstance(value, ShardTensor):
        _same_range(func, like, value)
        return value._local_tensor
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.ndim > like.ndim):
        raise TypeError(
            f"{like.spec.name}: {func} mixes a ShardTensor with a plain tensor of shape "
            f"{tuple(value.shape)}; shard it with shard_tensor(), or call full_tensor()"
        )
    if isinstance(value, torch.Tensor) and value.ndim > 1:
        return value.reshape(())
    return value


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = _first((*args, *kwargs.values()))
    assert like is not None
    kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
    out = func(
        *[_piece(func, a, like) for a in args],
        **{k: _piece(func, v, like) for k, v in kwargs.items()},
    )
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardTensor) and value._local_tensor is out:
            return value
    if isinstance(out, torch.Tensor):
        return like.like(out)
    return tuple(like.like(o) for o in out)


def _listwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``_foreach_`` and ``_fused_``: lists of pieces, one call of torch's own kernel."""
    heads: Sequence[Any] = next(a for a in args if isinstance(a, (list, tuple)))
    out = func(
        *[_unwrap(func, a, heads) for a in args],
        **{k: _unwrap(func, v, heads) for k, v in kwargs.items()},
    )
    if out is None or isinstance(out, torch.Tensor):
        return out
    return [
        head.like(o) if isinstance(head, ShardTensor) else o
        for head, o in zip(heads, out, strict=True)
    ]


def _unwrap(func: Any, value: Any, heads: Sequence[Any]) -> Any:
    if isinstance(value, ShardTensor):
        raise TypeError(f"{value.spec.name}: {func} takes a list of ShardTensors or a plain scalar")
    if not isinstance(value, (list, tuple)):
        return value
    if value is heads:
        return [v._local_tensor if isinstance(v, ShardTensor) else v for v in value]
    if len(value) != len(heads):
        return value
    return [
        _piece(func, v, head) if isinstance(head, ShardTensor) else v
        for v, head in zip(value, heads, strict=True)
    ]


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    tensor: ShardTensor = args[0]
    return tensor.like(tensor._local_tensor)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    tensor: ShardTensor = args[0]
    wanted = tuple(args[1])
    if wanted != tensor.spec.shape:
        raise _no_meaning(func, args, kwargs)
    return tensor.like(tensor._local_tensor)


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` from a piece of the same range, or from a plain tensor of the global shape."""
    target, source = args[0], args[1]
    if not isinstance(target, ShardTensor):
        raise TypeError(
            f"{source.spec.name}: copy_ into a plain tensor needs the whole tensor; copy from "
            f"full_tensor() (all ranks)"
        )
    target._local_tensor.copy_(_own_range(func, target, source), *args[2:], **kwargs)
    return target


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets, sources = args[0], args[1]
    pieces = [
        _own_range(func, t, s) if isinstance(t, ShardTensor) else s
        for t, s in zip(targets, sources, strict=True)
    ]
    locals_ = [t._local_tensor if isinstance(t, ShardTensor) else t for t in targets]
    func(locals_, pieces, *args[2:], **kwargs)


def _own_range(func: Any, target: ShardTensor, source: Any) -> torch.Tensor:
    if isinstance(source, ShardTensor):
        _same_range(func, target, source)
        return source._local_tensor
    plain: torch.Tensor = source
    if plain.shape == target.shape:
        return plain.reshape(-1)[target.spec.start : target.spec.stop]
    if plain.numel() == 1 and plain.ndim <= target.ndim:
        return plain.reshape(())
    raise ValueError(
        f"{target.spec.name}: expected a source of shape {tuple(target.shape)}, got "
        f"{tuple(plain.shape)} (rank {target.comm.rank} of {target.comm.size})"
    )


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: ShardTensor = args[0]
    dtype = kwargs.get("dtype") or torch.empty(0, dtype=tensor.dtype).sum().dtype
    return _total(tensor, dtype).to(dtype)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    tensor: ShardTensor = args[0]
    dtype = kwargs.get("dtype") or tensor.dtype
    if not dtype.is_floating_point:
        raise TypeError(f"{tensor.spec.name}: mean() needs a floating dtype, got {dtype}")
    return (_total(tensor, dtype) / tensor.numel()).to(dtype)


def _total(tensor: ShardTensor, dtype: torch.dtype) -> torch.Tensor:
    total = tensor._local_tensor.sum(dtype=torch.float64 if dtype.is_floating_point else dtype)
    tensor.comm.all_reduce(total, op="sum")
    return total


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dim is not None or keepdim:
        raise _no_meaning(func, args, kwargs)
    return _norms([args[0]], order, kwargs.get("dtype"))[0]


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return _norms([args[0]], args[1] if len(args) > 1 else 2, None)[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return _norms(args[0], order, dtype)


def _norms(
    tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Norms of whole tensors, plain ones taken as replicated; one collective for the list.

    Partial sums are float64, so that the float32 result does not depend on where the cuts fall
    unless the exact value lies within a few 1e-16 of the middle between two float32 numbers.
    """
    order = float(order)
    sharded = [t for t in tensors if isinstance(t, ShardTensor)]
    if not order > 0:
        raise ValueError(f"{sharded[0].spec.name}: expected a norm order above 0, got {order}")
    pieces = [t._local_tensor if isinstance(t, ShardTensor) else t for t in tensors]
    partial = torch.stack([_power_sum(piece, order) for piece in pieces])
    mask = torch.tensor([isinstance(t, ShardTensor) for t in tensors], device=partial.device)
    mine = partial[mask]
    sharded[0].comm.all_reduce(mine, op="max" if math.isinf(order) else "sum")
    partial[mask] = mine
    norms = partial if math.isinf(order) else partial ** (1.0 / order)
    return [n.to(dtype or t.dtype) for n, t in zip(norms.unbind(), tensors, strict=True)]


def _power_sum(piece: torch.Tensor, order: float) -> torch.Tensor:
    if piece.numel() == 0:
        return torch.zeros((), dtype=torch.float64, device=piece.device)
    norm: torch.Tensor = torch.linalg.vector_norm(piece, order, dtype=torch.float64)
    return norm if math.isinf(order) else norm**order


def _non_finite_check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """GradScaler's unscale: every rank learns whether any rank saw an inf or a NaN."""
    grads, found_inf, inverse_scale = args
    func(
        [g._local_tensor if isinstance(g, ShardTensor) else g for g in grads],
        found_inf,
        inverse_scale,
    )
    tensor = _first(grads)
    assert tensor is not None
    tensor.comm.all_reduce(found_inf, op="max")


_HANDLERS: dict[Any, _Handler] = {
    aten.detach.default: _detach,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.sum.default: _sum,
    aten.mean.default: _mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _non_finite_check,
}
