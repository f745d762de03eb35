"""Tensors inside the arguments and outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to every tensor in lists, tuples, mappings and dataclasses.

    Containers are rebuilt only where a tensor inside changed; everything else is returned as it
    is. Local.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(fn, v) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, Mapping):
        changed = {k: map_tensors(fn, v) for k, v in value.items()}
        if all(changed[k] is v for k, v in value.items()):
            return value
        if type(value) is dict:
            return changed
        copied: Any = copy.copy(value)
        for k, v in changed.items():
            copied[k] = v
        return copied
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        new = {name: map_tensors(fn, v) for name, v in fields.items()}
        if all(new[name] is v for name, v in fields.items()):
            return value
        record: Any = copy.copy(value)
        for name, v in new.items():
            object.__setattr__(record, name, v)
        return record
    return value


def find_tensors(value: Any, into: list[torch.Tensor]) -> bool:
    """Append every tensor in ``value`` to ``into``.

    Returns:
        False where an object was met that may hide tensors: its class is not known here.
    """
    if isinstance(value, torch.Tensor):
        into.append(value)
        return True
    if isinstance(value, _PLAIN):
        return True
    if isinstance(value, (list, tuple, set, frozenset)):
        return _find_in(value, into)
    if isinstance(value, Mapping):
        return _find_in(value.values(), into)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _find_in([getattr(value, f.name) for f in dataclasses.fields(value)], into)
    return False


def _find_in(values: Iterable[Any], into: list[torch.Tensor]) -> bool:
    known = True
    for value in values:
        known = find_tensors(value, into) and known
    return known
