"""What stands beside a piece in an operation: other pieces, scalars, whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shard_flat._tensor import ShardTensor

_INSTEAD = (
    "call full_tensor() (all ranks) and use the result, or use the parameter in a forward of the "
    "module that owns it; register_fsdp_forward_method() makes another method one, unshard() "
    "alone does not"
)
_NOT_INDEXED = (
    "to read elements index full_tensor() (all ranks); to write them give the whole tensor to "
    "copy_() under torch.no_grad(), or values for all parameters to shard_fsdp.materialize()"
)
_INDEXING = {"index", "index_put_", "select", "slice"}
_NO_DDP = (
    "; if DistributedDataParallel wraps a module given to fully_shard(), leave it out: gradients "
    "are averaged over ranks without it"
)


def no_meaning(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RuntimeError:
    """Return the error for an operation that one piece alone cannot answer. Local.

    No TypeError here or below: torch's operators such as ``+`` and ``@`` take that one for "try
    the other operand" and drop its message.
    """
    tensor = first_sharded((*args, *kwargs.values()))
    where = tensor.spec.name if tensor is not None else "ShardTensor"
    shape = tensor.spec.global_shape if tensor is not None else ()
    name = func._schema.name.removeprefix("aten::")
    instead = _NOT_INDEXED if name in _INDEXING else _INSTEAD
    if name == "view":  # DistributedDataParallel begins by laying all parameters end to end
        instead += _NO_DDP
    return RuntimeError(
        f"{where}: {func} has no meaning on one rank's piece of a tensor of shape {shape}; "
        f"{instead}"
    )


def first_sharded(values: Iterable[Any]) -> ShardTensor | None:
    """Return the first ShardTensor among arguments, lists included. Local."""
    for value in values:
        if isinstance(value, ShardTensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_sharded(value)
            if found is not None:
                return found
    return None


def check_same_range(func: Any, a: ShardTensor, b: ShardTensor) -> None:
    """Raise on all ranks, or on none, where two tensors are not cut alike. Local."""
    x, y = a.spec, b.spec
    if x is y or x.is_cut_like(y, a.comm.size):
        return
    raise ValueError(
        f"{func}: {x.name} has shape {x.shape} and range [{x.start}, {x.stop}), {y.name} has shape "
        f"{y.shape} and range [{y.start}, {y.stop}) (rank {a.comm.rank} of {a.comm.size}); shard "
        f"both by one layout"
    )


def operand(func: Any, value: Any, like: ShardTensor) -> Any:
    """Return what goes with ``like``'s piece: a piece, a scalar, or anything but a tensor. Local.

    A scalar keeps its part in type promotion, where tensors of dimension 0 count for less: a
    piece has one dimension whatever the tensor has.
    """
    if isinstance(value, ShardTensor):
        check_same_range(func, like, value)
        return value._local_tensor
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, DTensor):
        adopt_cut(value, like)
        if isinstance(value, ShardTensor):
            return value._local_tensor
    else:
        if value.numel() == 1 and value.ndim <= like.ndim:
            if value.ndim == 0 and like.ndim > 0:
                return value
            return value.reshape(1).to(like.device)
        if value.shape == like.shape and _repeats_one_element(value):
            return value.as_strided((1,), (0,))
    raise RuntimeError(
        f"{like.spec.name}: {func} mixes a ShardTensor with a {type(value).__name__} of shape "
        f"{tuple(value.shape)} (rank {like.comm.rank} of {like.comm.size}); shard it with "
        f"shard_tensor(), or call full_tensor()"
    )


def own_range(func: Any, target: ShardTensor, source: Any) -> torch.Tensor:
    """Return the part of ``source`` that belongs in ``target``'s piece. Local."""
    if isinstance(source, DTensor):
        adopt_cut(source, target)
    if isinstance(source, ShardTensor):
        check_same_range(func, target, source)
        return source._local_tensor
    where = f"(rank {target.comm.rank} of {target.comm.size})"
    if isinstance(source, DTensor):
        outer = target.spec.outer
        if _is_cut_like(source, target) and source._local_tensor.shape == target.shape:
            return target.spec.part_of(source._local_tensor)  # from_local() was given the whole
        if outer is not None and source.shape == target.shape:
            rest = tuple(source.placements)[-len(outer.placements) :]
            if rest == outer.placements and source._local_tensor.shape == target.spec.shape:
                # the DTensor that is cut, or what distribute_tensor() leaves of one
                return source._local_tensor.reshape(-1)[target.spec.start : target.spec.stop]
        raise RuntimeError(
            f"{target.spec.name}: {func} from a DTensor placed as {source.placements} {where}; "
            f"copy from its full_tensor() (all ranks)"
        )
    plain: torch.Tensor = source
    if plain.shape == target.shape:
        return target.spec.part_of(plain)
    if plain.numel() == 1 and plain.ndim <= target.ndim:
        return plain.reshape(())
    raise ValueError(
        f"{target.spec.name}: expected a source of shape {tuple(target.shape)}, got "
        f"{tuple(plain.shape)} {where}"
    )


def adopt_cut(tensor: DTensor, like: ShardTensor) -> None:
    """Turn a DTensor that torch's ``distribute_tensor`` cut by our placement into a ShardTensor.

    It happens in place: an optimizer keeps the very state that torch's
    ``set_optimizer_state_dict`` gave it, and torch takes its placement for a sum that is still to
    be added up.

    Args:
        tensor: placed like ``like``; others are left alone.
        like: where name, ranges and comm come from.

    **Collective**: local.
    """
    if type(tensor) is not DTensor or not _is_cut_like(tensor, like):
        return
    piece, spec = tensor._local_tensor.reshape(-1), like.spec
    if spec.outer is not None and tensor._local_tensor.shape == spec.shape:
        piece = piece[spec.start : spec.stop].clone()  # torch leaves this cut to us
    if piece.shape == like.piece.shape:
        tensor._local_tensor = piece
        tensor.__class__ = ShardTensor
        tensor.spec, tensor.comm = like.spec, like.comm  # type: ignore[attr-defined]


def _is_cut_like(tensor: DTensor, like: ShardTensor) -> bool:
    return tuple(tensor.placements) == tuple(like.placements) and tensor.shape == like.shape


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operator writes to, in the order of its schema. Local."""
    positions, names = _written_arguments(func)
    found = [args[i] for i in positions if i < len(args)]
    return found + [kwargs[name] for name in names if name in kwargs]


def mark_written(values: Iterable[Any]) -> None:
    """Count an in-place change on the pieces themselves.

    An operator counts it on the ShardTensor alone, and those who hold the memory behind the
    pieces watch that memory's version.
    """
    pieces = [v._local_tensor for v in values if isinstance(v, ShardTensor)]
    if pieces:
        torch.autograd.graph.increment_version(pieces)


@cache
def _written_arguments(func: Any) -> tuple[Sequence[int], Sequence[str]]:
    positions: list[int] = []
    names: list[str] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only:
                names.append(argument.name)
            else:
                positions.append(i)
    return positions, names


def _repeats_one_element(plain: torch.Tensor) -> bool:
    """Whether it is one number expanded, as the gradient of a sum is."""
    if plain.layout is not torch.strided or plain.numel() == 0:
        return False
    return all(
        step == 0 for step, length in zip(plain.stride(), plain.shape, strict=True) if length > 1
    )
