"""Templates that call things otherwise than the checkpoint, or want only some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from shard_ckpt._leaf import Leaf
from shard_ckpt._log import logger
from shard_ckpt._naming import Naming, Rename


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


def check_renames(rename: Rename | None, leaves: Iterable[Leaf], *, strict: bool) -> None:
    """Check that every name in a table of names is one of the template's. Local.

    Raises:
        ValueError: one is not, and ``strict``; without, it is logged.
    """
    table = rename.rename if isinstance(rename, Naming) else rename
    if not isinstance(table, Mapping):
        return
    owners = {leaf.name.partition("#")[0] for leaf in leaves}
    known = {rename.bare(name) for name in owners} if isinstance(rename, Naming) else owners
    for name in table:
        if name in known:
            continue
        text = f"rename: no tensor of the template is called {name!r}"
        if strict:
            raise ValueError(
                f"{text}; keys are the template's names without section, of optimizer state the "
                f"parameter's, and values the checkpoint's"
            )
        logger.warning("%s", text)


def is_picked(label: str, only: Sequence[str] | None) -> bool:
    """Whether a tensor is among those asked for. Local."""
    return only is None or any(fnmatchcase(label, pattern) for pattern in only)


def with_template_names(values: Any, pairs: Iterable[tuple[str, str]]) -> Any:
    """Give the state of optimizers, as stored, the template's parameter names. Local.

    Where several names of the template have one tensor, the name is that of the optimizer's state.

    Args:
        values: the structure that was stored.
        pairs: of the template's tensors, their name there and the stored one.
    """
    found = set()
    for pair in pairs:
        owner, stored = (name.partition("#")[0] for name in pair)
        found.add(("#" not in pair[0], owner != stored, owner, stored))
    names: dict[str, str] = {}
    for _, _, owner, stored in sorted(found):
        names.setdefault(stored, owner)
    if all(owner == stored for stored, owner in names.items()):
        return values
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
