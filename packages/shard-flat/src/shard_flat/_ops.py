"""What torch's operators mean on pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from shard_flat import _reductions as reductions
from shard_flat._operands import (
    first_sharded,
    mark_written,
    no_meaning,
    operand,
    own_range,
    written,
)
from shard_flat._tensor import ShardTensor

aten = torch.ops.aten

_Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

# Element-wise in meaning, though torch does not tag them so.
_ELEMENTWISE = {
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
}

# Named or tagged as if they were element-wise, though they reduce or multiply matrices.
_NOT_ELEMENTWISE = {"equal", "_foreach_max", "_foreach_mm", "_foreach_powsum"}

_FUSED = {"_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_"}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operator on pieces. Collective for reductions, else local."""
    return _handler_of(func)(func, args, kwargs)


@cache
def _handler_of(func: Any) -> _Handler:
    if func in _HANDLERS:
        return _HANDLERS[func]
    name = func._schema.name.removeprefix("aten::")
    if name in _NOT_ELEMENTWISE:
        return _refuse
    if name in _FUSED or name.startswith("_foreach_"):
        return _listwise
    random = torch.Tag.nondeterministic_seeded in func.tags  # drawn apart is not drawn whole
    if func in _ELEMENTWISE or (torch.Tag.pointwise in func.tags and not random):
        return _elementwise
    return _refuse


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise no_meaning(func, args, kwargs)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = first_sharded((*args, *kwargs.values()))
    assert like is not None
    targets = written(func, args, kwargs)
    if not all(isinstance(target, ShardTensor) for target in targets):
        raise RuntimeError(
            f"{like.spec.name}: {func} writes a sharded result into a plain tensor (rank "
            f"{like.comm.rank} of {like.comm.size}); use full_tensor() (all ranks) instead"
        )
    out = func(
        *[operand(func, a, like) for a in args],
        **{k: operand(func, v, like) for k, v in kwargs.items() if k != "memory_format"},
    )
    if targets:
        mark_written(targets)
        return targets[0] if len(targets) == 1 else tuple(targets)
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
    for values in written(func, args, kwargs):
        mark_written(values)
    if out is None or isinstance(out, torch.Tensor):
        return out
    return [
        head.like(o) if isinstance(head, ShardTensor) else o
        for head, o in zip(heads, out, strict=True)
    ]


def _unwrap(func: Any, value: Any, heads: Sequence[Any]) -> Any:
    if isinstance(value, ShardTensor):
        raise RuntimeError(
            f"{value.spec.name}: {func} takes a list of ShardTensors or a plain scalar"
        )
    if not isinstance(value, (list, tuple)):
        return value
    if value is heads:
        return [v._local_tensor if isinstance(v, ShardTensor) else v for v in value]
    if len(value) != len(heads):
        stray = first_sharded(value)
        if stray is not None:
            raise ValueError(
                f"{stray.spec.name}: {func} got lists of {len(heads)} and {len(value)} tensors"
            )
        return value
    return [_paired(func, v, head) for v, head in zip(value, heads, strict=True)]


def _paired(func: Any, value: Any, head: Any) -> Any:
    """What goes with one entry of the first list."""
    if isinstance(head, ShardTensor):
        return operand(func, value, head)
    if isinstance(value, ShardTensor):
        raise RuntimeError(
            f"{value.spec.name}: {func} mixes a ShardTensor with a plain tensor (rank "
            f"{value.comm.rank} of {value.comm.size}); use full_tensor() (all ranks) instead"
        )
    return value


def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    tensor: ShardTensor = args[0]
    # A tensor with a version counter has no detached twin without one.
    with torch.inference_mode(tensor.is_inference()):
        return tensor.like(tensor._local_tensor)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    tensor: ShardTensor = args[0]
    if tuple(args[1]) != tensor.spec.global_shape:
        raise no_meaning(func, args, kwargs)
    return tensor.like(tensor._local_tensor)


def _new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    """``new_empty_strided``, by which autograd copies a gradient that others hold too."""
    tensor: ShardTensor = args[0]
    if tuple(args[1]) != tensor.spec.global_shape:
        raise no_meaning(func, args, kwargs)
    return tensor.like(torch.empty_like(tensor._local_tensor, **kwargs))


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[mask] = number``, where the mask is cut as ``x`` is."""
    target, indices, number = args[:3]
    mask = indices[0] if len(indices) == 1 else None
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not (
        isinstance(target, ShardTensor)
        and isinstance(mask, ShardTensor)
        and mask.dtype == torch.bool
        and not isinstance(number, ShardTensor)
        and number.numel() == 1
        and not accumulate
    ):
        raise no_meaning(func, args, kwargs)
    target._local_tensor.masked_fill_(operand(func, mask, target), number.reshape(()))
    mark_written([target])
    return target


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``copy_`` from a piece of the same range, or from a plain tensor of the global shape."""
    target, source = args[0], args[1]
    _check_target(func, target, source)
    target._local_tensor.copy_(own_range(func, target, source), *args[2:], **kwargs)
    mark_written([target])
    return target


def _foreach_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    targets, sources = args[0], args[1]
    pieces = []
    for target, source in zip(targets, sources, strict=True):
        if isinstance(target, ShardTensor):
            pieces.append(own_range(func, target, source))
        else:
            _check_target(func, target, source)
            pieces.append(source)
    locals_ = [t._local_tensor if isinstance(t, ShardTensor) else t for t in targets]
    func(locals_, pieces, *args[2:], **kwargs)
    mark_written(targets)


def _check_target(func: Any, target: Any, source: Any) -> None:
    if isinstance(source, ShardTensor) and not isinstance(target, ShardTensor):
        raise RuntimeError(
            f"{source.spec.name}: {func} into a plain tensor needs the whole tensor; copy from "
            f"full_tensor() (all ranks)"
        )


def _draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardTensor:
    """Draw the whole tensor and keep the own range.

    Ranks whose generators agree get the numbers that one process would get. One full tensor is
    held while the call runs.
    """
    target: ShardTensor = args[0]
    whole = torch.empty(target.spec.global_shape, dtype=target.dtype, device=target.device)
    func(whole, *args[1:], **kwargs)
    target._local_tensor.copy_(target.spec.part_of(whole))
    mark_written([target])
    return target


_HANDLERS: dict[Any, _Handler] = {
    aten.normal_.default: _draw,
    aten.uniform_.default: _draw,
    aten.detach.default: _detach,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.new_empty_strided.default: _new_empty,
    aten.index_put_.default: _index_put,
    aten.copy_.default: _copy,
    aten._foreach_copy_.default: _foreach_copy,
    aten.sum.default: reductions.sum_all,
    aten.mean.default: reductions.mean_all,
    aten.any.default: reductions.any_all,
    aten.all.default: reductions.any_all,
    aten.max.default: reductions.extreme,
    aten.min.default: reductions.extreme,
    aten.amax.default: reductions.extreme,
    aten.amin.default: reductions.extreme,
    aten.linalg_vector_norm.default: reductions.vector_norm,
    aten.norm.Scalar: reductions.norm,
    aten._foreach_norm.Scalar: reductions.foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: reductions.non_finite_check,
}
