"""Tensors inside the arguments and outputs of a forward."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
    Set,
    ValuesView,
)
from types import MappingProxyType
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
        if not isinstance(value, MutableMapping):
            return MappingProxyType(changed)
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
    """Append every tensor reachable from ``value`` to ``into``.

    Containers, dataclasses and the attributes of other objects are looked through.

    Returns:
        False where something was met that may hide tensors, such as a function or a generator.
    """
    return _find(value, into, set())


def _find(value: Any, into: list[torch.Tensor], seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        into.append(value)
        return True
    if isinstance(value, _PLAIN):
        return True
    if id(value) in seen:
        return True
    seen.add(id(value))
    if isinstance(value, (Sequence, Set, ValuesView, deque)):
        return _find_all(value, into, seen) and _find_attributes(value, into, seen)
    if isinstance(value, Mapping):
        return _find_all(value.values(), into, seen) and _find_attributes(value, into, seen)
    hides = callable(value) or isinstance(value, Iterator)
    return not hides and _find_attributes(value, into, seen)


def _find_attributes(value: Any, into: list[torch.Tensor], seen: set[int]) -> bool:
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    slots = [getattr(value, name) for name in names if hasattr(value, name)]
    return _find_all([*getattr(value, "__dict__", {}).values(), *slots], into, seen)


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        yield f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _find_all(values: Iterable[Any], into: list[torch.Tensor], seen: set[int]) -> bool:
    known = True
    for value in values:
        known = _find(value, into, seen) and known
    return known
