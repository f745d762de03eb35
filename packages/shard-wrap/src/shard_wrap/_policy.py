"""Policies: which modules of a tree become units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from shard_wrap._tree import ModuleTree

_LISTED = 20


def _listing(items: list[str]) -> str:
    more = f" and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return ", ".join(items[:_LISTED]) + more if items else "nothing"


class Policy(ABC):
    """Chooses modules; two policies combine with ``|``."""

    @abstractmethod
    def select(self, tree: ModuleTree) -> frozenset[str]:
        """Return the names of the modules that shall be units.

        Args:
            tree: The module tree. Only nodes with ``callable`` can be units; the root is
                one whether or not it is selected.

        Returns:
            Names of nodes of ``tree``.

        Raises:
            ValueError: The policy matches nothing.

        **Collective**: local; pure.
        """

    def __or__(self, other: Policy) -> Policy:
        """Return a policy that selects what either of the two selects."""
        if not isinstance(other, Policy):
            return NotImplemented
        return _Union(self, other)


@dataclass(frozen=True)
class _Union(Policy):
    left: Policy
    right: Policy

    def select(self, tree: ModuleTree) -> frozenset[str]:
        return self.left.select(tree) | self.right.select(tree)


@dataclass(frozen=True)
class _ByClass(Policy):
    classes: tuple[type[nn.Module], ...]

    def select(self, tree: ModuleTree) -> frozenset[str]:
        candidates = [node for node in tree.nodes.values() if node.callable]
        chosen: set[str] = set()
        for cls in self.classes:
            matched = {node.name for node in candidates if issubclass(node.cls, cls)}
            if not matched:
                present = sorted({node.cls.__name__ for node in candidates})
                raise ValueError(
                    f"by_class: expected modules of class {cls.__name__}, got none; "
                    f"the classes with a forward are: {_listing(present)}"
                )
            chosen |= matched
        return frozenset(chosen)


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


@dataclass(frozen=True)
class _ByName(Policy):
    patterns: tuple[str, ...]

    def select(self, tree: ModuleTree) -> frozenset[str]:
        candidates = [node.name for node in tree.nodes.values() if node.callable and node.name]
        chosen: set[str] = set()
        for pattern in self.patterns:
            matched = {name for name in candidates if _matches(name, pattern)}
            if not matched:
                raise ValueError(
                    f"by_name: expected modules named {pattern!r}, got none; "
                    f"the modules with a forward are: {_listing(candidates)}"
                )
            chosen |= matched
        return frozenset(chosen)


@dataclass(frozen=True)
class _BySize(Policy):
    min_numel: int

    def select(self, tree: ModuleTree) -> frozenset[str]:
        open_numel = {name: node.numel for name, node in tree.nodes.items()}
        chosen: set[str] = set()
        for node in (tree.nodes[name] for name in tree.bottom_up):
            can_be_unit = node.callable or node.parent is None
            if can_be_unit and open_numel[node.name] >= self.min_numel:
                chosen.add(node.name)
            elif node.parent is not None:
                open_numel[node.parent] += open_numel[node.name]
        if not chosen:
            raise ValueError(
                f"by_size: expected a module with at least {self.min_numel} elements, "
                f"got {open_numel['']} in the whole model; pass a smaller min_numel"
            )
        return frozenset(chosen)


def _check_class(cls: object) -> None:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"by_class: expected subclasses of nn.Module, got {cls!r}")


def by_class(*classes: type[nn.Module]) -> Policy:
    """Make every module of the given classes, or of a subclass, a unit.

    Args:
        classes: Module classes, at least one. Each must occur.

    Returns:
        The policy.

    Raises:
        TypeError: Something that is not a module class was passed.
        ValueError: No class was passed. Later, from ``plan_units``: a class does not occur.

    **Collective**: local.
    """
    if not classes:
        raise ValueError("by_class: expected at least one module class, got none")
    for cls in classes:
        _check_class(cls)
    return _ByClass(classes)


def by_name(*patterns: str) -> Policy:
    """Make every module whose name matches a pattern a unit.

    A pattern is matched against the fully qualified name part by part, as a path would be:
    ``layers.*`` is every child of ``layers`` and none of its grandchildren, and
    ``*.attention`` is that child of every child of the root. ``*``, ``?`` and ``[...]``
    stand for what they do in ``fnmatch``; case counts. A module object that stands in two
    places goes by its first name, the one in ``named_modules()``.

    Args:
        patterns: Patterns, at least one. Each must match a module that has a forward.

    Returns:
        The policy.

    Raises:
        TypeError: Something that is not a string was passed.
        ValueError: No pattern was passed. Later, from ``plan_units``: one matches nothing.

    **Collective**: local.
    """
    if not patterns:
        raise ValueError("by_name: expected at least one pattern, got none")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"by_name: expected patterns as strings, got {pattern!r}")
    return _ByName(patterns)


def by_size(min_numel: int) -> Policy:
    """Make units of the smallest subtrees that hold enough elements.

    The tree is read from the leaves up. A module counts the elements of its parameters and
    whatever the modules in it left over; once that reaches ``min_numel`` the module becomes
    a unit and leaves nothing to its parent. A parameter used in several places is counted
    once, at the lowest module around its users. So every unit but the root holds at least
    ``min_numel`` elements, and nothing smaller inside it does; what is left over at the top
    belongs to the root.

    Worked example, ``by_size(100)``::

        module        own   left by children   counts   unit
        embed          80                          80
        0.attention    40                          40
        0.mlp          70                          70
        0               0   40 + 70               110   yes, leaves 0
        1.attention    40                          40
        1.mlp         160                         160   yes, leaves 0
        1               0   40 +  0                40
        (root)          0   80 + 0 + 40           120   always

    Args:
        min_numel: The least number of elements in a unit, at least 1.

    Returns:
        The policy.

    Raises:
        ValueError: ``min_numel`` is below 1. Later, from ``plan_units``: the whole model
            has fewer elements.

    **Collective**: local.
    """
    if min_numel < 1:
        raise ValueError(f"by_size: expected min_numel of at least 1, got {min_numel}")
    return _BySize(min_numel)
