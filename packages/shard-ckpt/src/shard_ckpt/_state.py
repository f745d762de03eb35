"""From nested state to named tensors and back to structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shard_ckpt._collector import collector_paused
from shard_ckpt._leaf import Leaf, leaf_of
from shard_ckpt._naming import Rename, stored_name
from shard_ckpt._values import PerRank, PerRankRef, TensorRef

_MAX_SECTION_BYTES = 160


@dataclass
class FlatState:
    """A state taken apart.

    Attributes:
        leaves: its tensors, sorted by section and name.
        values: its structure, with a ``TensorRef`` for each tensor and a ``PerRankRef`` for each
            per-rank value.
        per_rank: where each per-rank value stands, and the value.
    """

    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: list[tuple[str, Any]] = field(default_factory=list)


@collector_paused()
def flatten(state: Mapping[str, Any], *, rename: Rename | None = None) -> FlatState:
    """Take a state apart. Local.

    Components of a path are joined by ``.``, except that a mapping with the keys ``state`` and
    ``param_groups`` is the state of an optimizer, whose tensors are called ``parameter#slot``::

        {"model": {"embed": {"weight": t}}}                     model: embed.weight
        {"optim": {"state": {"embed.weight": {"exp_avg": t}},
                   "param_groups": []}}                         optim: embed.weight#exp_avg

    Args:
        state: sections.
        rename: other names for tensors; those that get one stand at the top of their section in
            the structure, and an optimizer's parameters under their new names.

    Raises:
        TypeError: the state, a key or a tensor is of a kind that cannot be stored.
        ValueError: two tensors would have one name, or a name cannot be used.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected a mapping of sections, got {type(state).__name__}")
    walker = _Walker(rename)
    for key, value in state.items():
        if type(key) is not str:
            raise TypeError(f"state: expected sections of type str, got {key!r}")
        walker.enter(key, value)
    walker.flat.leaves.sort(key=lambda leaf: leaf.id)
    return walker.flat


class _Walker:
    """Carries the section and what was found through the recursion."""

    def __init__(self, rename: Rename | None) -> None:
        self.flat = FlatState()
        self.section = ""
        self._rename = rename
        self._paths: dict[tuple[str, str], str] = {}
        self._moved: dict[str, TensorRef] = {}
        self._pinned = 0

    def enter(self, section: str, value: Any) -> None:
        """Take a section apart."""
        self.section = section
        self._moved = {}
        values = self.walk(value, name=None, prefix="", path=f"[{section!r}]")
        for name, ref in self._moved.items():
            if name in values:
                raise ValueError(f"{section}: {name} is a tensor's new name, and a value is there")
            values[name] = ref
        self.flat.values[section] = values

    def walk(self, node: Any, *, name: str | None, prefix: str, path: str) -> Any:
        """Return ``node`` with stand-ins; ``prefix`` is what its children's names begin with."""
        if isinstance(node, torch.Tensor):
            return self._tensor(node, name, path)
        if isinstance(node, PerRank):
            self.flat.per_rank.append((path, node.value))
            return PerRankRef(len(self.flat.per_rank) - 1)
        if isinstance(node, Mapping):
            if "state" in node and "param_groups" in node and isinstance(node["state"], Mapping):
                return self._optimizer(node, prefix, path)
            return self._children(node, prefix, path)
        if type(node) in (list, tuple):
            self._pinned += 1
            children = self._children(dict(enumerate(node)), prefix, path)
            self._pinned -= 1
            return type(node)(children.values())
        if isinstance(node, (torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(
                f"state{path}: expected tensors or values, got the {type(node).__name__} itself; "
                f"pass its state_dict()"
            )
        return node

    def _children(self, node: Mapping[Any, Any], prefix: str, path: str) -> dict[Any, Any]:
        result = {}
        for key, value in node.items():
            name = f"{prefix}{key}"
            moved = len(self._moved)
            found = self.walk(value, name=name, prefix=f"{name}.", path=f"{path}[{key!r}]")
            if isinstance(found, TensorRef) and found.name != name and not self._pinned:
                self._moved[found.name] = found
            elif len(self._moved) == moved or found:  # else nothing is left of it
                result[key] = found
        return result

    def _optimizer(self, node: Mapping[Any, Any], prefix: str, path: str) -> dict[Any, Any]:
        result = {}
        for key, value in node.items():
            here = f"{path}[{key!r}]"
            if key != "state":
                name = f"{prefix}{key}"
                found = self.walk(value, name=name, prefix=f"{name}.", path=here)
                result[key] = self._groups(found, prefix) if key == "param_groups" else found
                continue
            self._pinned += 1  # slots stay with their parameter
            result[key] = {
                self._owner(owner, prefix): self.walk(
                    slots,
                    name=f"{prefix}{owner}#",
                    prefix=f"{prefix}{owner}#",
                    path=f"{here}[{owner!r}]",
                )
                for owner, slots in value.items()
            }
            self._pinned -= 1
        return result

    def _owner(self, owner: Any, prefix: str) -> Any:
        """Return the new name of a parameter in an optimizer below ``prefix``."""
        if self._rename is None or type(owner) is not str:
            return owner
        return stored_name(f"{prefix}{owner}", self._rename).removeprefix(prefix)

    def _groups(self, groups: Any, prefix: str) -> Any:
        """Return an optimizer's groups with the new names of parameters."""
        if self._rename is None or not isinstance(groups, list):
            return groups
        return [
            {**group, "params": [self._owner(name, prefix) for name in group["params"]]}
            if isinstance(group, dict) and isinstance(group.get("params"), list)
            else group
            for group in groups
        ]

    def _tensor(self, tensor: torch.Tensor, name: str | None, path: str) -> TensorRef:
        if name is None:
            raise ValueError(
                f"state{path}: a tensor needs a section around it, such as "
                f'{{"model": {{{self.section!r}: tensor}}}}'
            )
        _check_section(self.section)
        name = stored_name(name, self._rename)
        leaf = leaf_of(tensor, self.section, name)
        taken = self._paths.setdefault(leaf.id, path)
        if taken != path:
            raise ValueError(
                f"{leaf.label}: state{taken} and state{path} would both be stored under this name; "
                f"rename one"
            )
        self.flat.leaves.append(leaf)
        return TensorRef(self.section, name)


def _check_section(section: str) -> None:
    bad = not section or section.startswith(".") or "/" in section or not section.isprintable()
    if bad or len(section.encode("utf-8", "replace")) > _MAX_SECTION_BYTES:
        raise ValueError(
            f"state[{section!r}]: a section with tensors names files, so it must be printable, at "
            f"most {_MAX_SECTION_BYTES} bytes, without '/' and not begin with '.'"
        )
