"""Templates that call things otherwise than the checkpoint, or want only some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shard_ckpt._state import Leaf

Rename = Mapping[str, str] | Callable[[str], str]
"""From a template's names to the checkpoint's."""


def stored_name(name: str, rename: Rename | None) -> str:
    """Return what the checkpoint calls a tensor that the template calls ``name``.

    Optimizer state goes with its parameter: renaming ``w`` to ``v`` takes ``w#exp_avg`` to
    ``v#exp_avg``. Names that a mapping lacks stay. Local.

    Raises:
        TypeError: ``rename`` gave something that is no string.
    """
    if rename is None:
        return name
    owner, mark, slot = name.partition("#")
    new = rename.get(owner, owner) if isinstance(rename, Mapping) else rename(owner)
    if not isinstance(new, str):
        raise TypeError(f"rename: expected a str for {owner!r}, got {new!r}")
    return f"{new}{mark}{slot}"


def check_patterns(only: Sequence[str] | None, leaves: Iterable[Leaf]) -> None:
    """Check that every pattern picks something. Local.

    Raises:
        TypeError: a single string, which would be taken for a sequence of patterns.
        ValueError: a pattern fits no tensor of the template.
    """
    if only is None:
        return
    if isinstance(only, str):
        raise TypeError(f"only: expected a sequence of patterns, got the string {only!r}")
    labels = [leaf.label for leaf in leaves]
    for pattern in only:
        if not any(fnmatchcase(label, pattern) for label in labels):
            raise ValueError(
                f"only: no tensor of the template fits {pattern!r}; patterns are held against "
                f"'section: name', as in 'model: layers.0.*'"
            )


def is_picked(label: str, only: Sequence[str] | None) -> bool:
    """Whether a tensor is among those asked for. Local."""
    return only is None or any(fnmatchcase(label, pattern) for pattern in only)


def with_template_names(values: Any, leaves: Iterable[Leaf], rename: Rename | None) -> Any:
    """Give the state of optimizers, as stored, the template's parameter names. Local.

    Args:
        values: the structure that was stored.
        leaves: the template's tensors.
        rename: as for ``load``.
    """
    if rename is None:
        return values
    names: dict[str, str] = {}
    for leaf in leaves:
        owner = leaf.name.partition("#")[0]
        names.setdefault(stored_name(owner, rename), owner)
    return _renamed(values, names)


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    if type(node) in (list, tuple):
        return type(node)(_renamed(item, names) for item in node)
    if not isinstance(node, dict):
        return node
    state, groups = node.get("state"), node.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return {key: _renamed(item, names) for key, item in node.items()}
    return {
        **node,
        "state": {names.get(key, key): item for key, item in state.items()},
        "param_groups": [_renamed_group(group, names) for group in groups],
    }


def _renamed_group(group: Any, names: Mapping[str, str]) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return group
    return {**group, "params": [names.get(key, key) for key in group["params"]]}
