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
from types import MappingProxyType, ModuleType
from typing import Any

import torch

# Beyond this many containers and objects an output is taken to hide tensors.
_MOST_OBJECTS = 10_000
# Containers that a module keeps are looked into if they are as short as a list of losses.
_LONGEST_ATTRIBUTE = 64
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_PLAIN = (
    ModuleType,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)


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
        return _sequence_like(value, items)
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
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        fields = {name: getattr(value, name) for name in names}
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
    known = True
    seen: set[int] = set()
    pending = [value]
    while pending and len(seen) < _MOST_OBJECTS:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            into.append(each)
        elif not isinstance(each, _PLAIN) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, (Sequence, Set, ValuesView, deque)):
                pending.extend(each)
            elif isinstance(each, Mapping):
                pending.extend(each.values())
            elif callable(each) or isinstance(each, Iterator):
                known = False
                continue
            pending.extend(_attributes(each))
    return known and not pending


def find_attributes(module: torch.nn.Module, into: list[torch.Tensor]) -> None:
    """Append the tensors that a module keeps as plain attributes, alone or in short containers.

    Local.
    """
    for name, value in module.__dict__.items():
        if isinstance(value, torch.Tensor):
            into.append(value)
        elif (
            isinstance(value, (list, tuple, dict, deque))
            and name not in _OF_MODULES
            and len(value) <= _LONGEST_ATTRIBUTE
        ):
            items = value.values() if isinstance(value, dict) else value
            into.extend(item for item in items if isinstance(item, torch.Tensor))


def _attributes(value: Any) -> list[Any]:
    names = [name for cls in type(value).__mro__ for name in _slots(cls)]
    slots = [getattr(value, name) for name in names if hasattr(value, name)]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    for name in [slots] if isinstance(slots, str) else slots:
        is_private = name.startswith("__") and not name.endswith("__")
        yield f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _sequence_like(value: Any, items: list[Any]) -> Any:
    """The same kind of list or tuple around other items, whatever its constructor takes."""
    if type(value) in (list, tuple):
        return type(value)(items)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    made = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        made.__dict__.update(value.__dict__)
    return made
