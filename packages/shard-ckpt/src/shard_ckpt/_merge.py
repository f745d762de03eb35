"""What load returns: the template's tensors, the file's values, one structure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shard_ckpt._extras import MISSING, without_tensors
from shard_ckpt._values import PerRank


def merge(template: Any, stored: Any) -> Any:
    """Put stored values into a template's structure. Local.

    Tensors are the template's. Every other value is the stored one where there is one. Mappings
    come back as dicts with the keys of both, the template's first, and sequences with tensors as
    the template's kind, what only the stored one has at the end.

    Args:
        template: what was passed to ``load``.
        stored: what the checkpoint holds there, tensors as ``TensorRef``; MISSING for nothing.
    """
    if isinstance(template, torch.Tensor):
        return template
    if isinstance(template, Mapping):
        theirs = stored if isinstance(stored, Mapping) else {}
        result = {key: merge(item, theirs.get(key, MISSING)) for key, item in template.items()}
        for key, item in theirs.items():
            kept = without_tensors(item)
            if key not in result and kept is not MISSING:
                result[key] = kept
        return result
    if type(template) in (list, tuple) and _holds_tensor(template):
        items = _items(stored, len(template))
        more = [
            kept
            for item in items[len(template) :]
            if (kept := without_tensors(item)) is not MISSING
        ]
        return type(template)([*map(merge, template, items), *more])
    kept = without_tensors(stored)
    if kept is not MISSING:
        return kept
    return template.value if isinstance(template, PerRank) else template


def missing_values(template: Any, stored: Any, path: str = "state") -> list[str]:
    """Return where the template has a value and the checkpoint has nothing. Local."""
    if isinstance(template, torch.Tensor):
        return []
    if isinstance(template, Mapping):
        theirs = stored if isinstance(stored, Mapping) else {}
        return [
            where
            for key, item in template.items()
            for where in missing_values(item, theirs.get(key, MISSING), f"{path}[{key!r}]")
        ]
    if type(template) in (list, tuple) and _holds_tensor(template):
        items = _items(stored, len(template))
        return [
            where
            for at, item in enumerate(template)
            for where in missing_values(item, items[at], f"{path}[{at}]")
        ]
    return [path] if stored is MISSING else []


def _items(stored: Any, count: int) -> list[Any]:
    """Return a stored sequence's items, MISSING for what it has less than ``count``."""
    items = list(stored) if type(stored) in (list, tuple) else []
    return items + [MISSING] * (count - len(items))


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, torch.Tensor):
        return True
    if isinstance(node, Mapping):
        return any(_holds_tensor(item) for item in node.values())
    return type(node) in (list, tuple) and any(_holds_tensor(item) for item in node)
