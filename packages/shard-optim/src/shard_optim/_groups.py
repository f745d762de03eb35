"""Parameter groups: what they are called and what may be in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_flat import ShardTensor
from shard_optim._runs import is_dense, piece_of

Group = Mapping[str, Any]


def labels_of(group: Group, number: int) -> list[str]:
    """Return a name for each parameter of a group: given, that of the shard, or its position."""
    given = group.get("param_names")
    return [
        given[i]
        if given is not None
        else param.spec.name
        if isinstance(param, ShardTensor)
        else f"{number}.{i}"
        for i, param in enumerate(group["params"])
    ]


def names_of(groups: Sequence[Group]) -> dict[torch.Tensor, str]:
    """Return every parameter's name. Local.

    Raises:
        ValueError: two parameters have one name.
    """
    names: dict[torch.Tensor, str] = {}
    taken: set[str] = set()
    for number, group in enumerate(groups):
        for param, name in zip(group["params"], labels_of(group, number), strict=True):
            if name in taken:
                raise ValueError(
                    f"{name}: two parameters have this name; pass (name, parameter) pairs"
                )
            taken.add(name)
            names[param] = name
    return names


def name_in(groups: Sequence[Group], param: torch.Tensor) -> str:
    """Return what errors call a parameter. Local."""
    for number, group in enumerate(groups):
        for known, name in zip(group["params"], labels_of(group, number), strict=True):
            if known is param:
                return name
    return "a parameter of no group"


def listed(params: Any) -> list[Any]:
    """Return what an optimizer is given: parameters, pairs with names, or groups.

    Raises:
        TypeError: it is a module, a dictionary, one parameter, or nothing to iterate over.
        ValueError: it is empty.

    **Collective**: local.
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(
            f"params: expected an iterable of parameters, got one {type(params).__name__}; put it "
            f"into a list"
        )
    found = _elements(params, "params: ")
    if not found:
        raise ValueError(
            "expected at least one parameter, got none; a generator gives its parameters only once"
        )
    return found


def entries_of(group: Mapping[str, Any], number: int) -> list[Any]:
    """Return what is listed under ``"params"``: parameters, or pairs with names.

    Raises:
        TypeError: it is a module, a dictionary, or nothing to iterate over.

    **Collective**: local.
    """
    entries = group["params"]
    if isinstance(entries, torch.Tensor):
        return [entries]
    return _elements(entries, f"group {number}: params: ")


def unpack(entries: Sequence[Any], groups: Sequence[Group]) -> tuple[list[Any], list[str]]:
    """Split what is to become a group into parameters and their names.

    Args:
        entries: parameters or ``(name, parameter)`` pairs.
        groups: those that the optimizer has.

    Raises:
        ValueError: a name is given twice.

    **Collective**: local.
    """
    params = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
    names = labels_of({"params": params}, len(groups))
    taken = {name for group in groups for name in group.get("param_names", ())}
    for i, entry in enumerate(entries):
        if isinstance(entry, tuple):
            names[i] = entry[0]
            if names[i] in taken:
                raise ValueError(f"{names[i]}: two parameters have this name; list one of them")
            taken.add(names[i])
    return params, names


def check_params(params: Sequence[Any], names: Sequence[str], groups: Sequence[Group]) -> None:
    """Check parameters that are to become a group.

    Args:
        params: the parameters.
        names: what errors call them.
        groups: those that the optimizer has.

    Raises:
        TypeError: one is no tensor, or one of torch's own DTensors.
        ValueError: one cannot be optimized, or is there already, as it is or as another tensor
            in the same memory.

    **Collective**: local.
    """
    for param, name in zip(params, names, strict=True):
        _check_param(param, name)
    known: dict[int, str] = {}
    spans: list[tuple[int, int, str, torch.Tensor]] = []
    everyone = [
        entry
        for number, group in enumerate(groups)
        for entry in zip(group["params"], labels_of(group, number), strict=True)
    ]
    for param, name in [*everyone, *zip(params, names, strict=True)]:
        if id(param) in known:
            raise ValueError(
                f"{name}: the parameter is already there as {known[id(param)]}; list it once"
            )
        known[id(param)] = name
        piece = piece_of(param)
        if piece.numel() and piece.device.type != "meta":
            spans.append((piece.data_ptr(), piece.data_ptr() + piece.nbytes, name, param))
    spans.sort(key=lambda span: span[:2])
    for (_, stop, name, param), (start, _, other, twin) in pairwise(spans):
        if start < stop and param.device == twin.device:
            raise ValueError(
                f"{other}: shares memory with {name}, which would be updated twice; list one of "
                f"them, the sharded one where one is sharded and one is not"
            )


def check_memory(params: Iterable[torch.Tensor], name_of: Callable[[torch.Tensor], str]) -> None:
    """Check that parameters have memory.

    Args:
        params: the parameters.
        name_of: gives a parameter's name, for errors.

    Raises:
        ValueError: one has none; it is the gathered form of a sharded parameter.

    **Collective**: local.
    """
    for param in params:
        piece = piece_of(param)
        if piece.numel() and piece.untyped_storage().nbytes() == 0:
            raise ValueError(
                f"{name_of(param)}: its memory was released, as that of a gathered parameter is "
                f"after its forward; build the optimizer from module.parameters() outside of a "
                f"forward"
            )


def _elements(params: Any, where: str) -> list[Any]:
    expected = f"{where}expected an iterable of parameters or of (name, parameter) pairs"
    kind = type(params).__name__
    if isinstance(params, nn.Module):
        raise TypeError(
            f"{expected}, got the module {kind}; pass its named_parameters() or parameters()"
        )
    if isinstance(params, Mapping):
        raise TypeError(f"{expected}, got a {kind}; pass its items(), or a group in a list")
    if not isinstance(params, Iterable):
        raise TypeError(f"{expected}, got {params!r}")
    return list(params)


def _check_param(param: Any, name: str) -> None:
    if not isinstance(param, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(param).__name__}")
    if isinstance(param, DTensor) and not isinstance(param, ShardTensor):
        raise TypeError(
            f"{name}: expected a plain tensor or a ShardTensor, got torch's {type(param).__name__} "
            f"with placements {param.placements}; use torch.optim for it"
        )
    if not (param.is_leaf or param.retains_grad):
        raise ValueError(
            f"{name}: expected a leaf, got the result of {param.grad_fn}; pass the parameter itself"
        )
    piece = piece_of(param)
    if not piece.is_floating_point() or piece.layout is not torch.strided:
        raise ValueError(
            f"{name}: expected a dense tensor of a floating dtype, got {piece.layout} of "
            f"{piece.dtype}"
        )
    if not is_dense(piece):
        raise ValueError(
            f"{name}: expected elements side by side in memory, got shape {tuple(piece.shape)} "
            f"with strides {piece.stride()}; make the parameter from contiguous()"
        )
    check_memory([param], lambda _: name)
