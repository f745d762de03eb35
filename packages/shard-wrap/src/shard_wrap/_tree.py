"""A module tree as names and counts, with sharing resolved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from torch import nn
from torch.nn.parameter import is_lazy


@dataclass(frozen=True)
class ModuleNode:
    """One module of a tree.

    Attributes:
        name: The module's first fully qualified name; the root's is "".
        cls: The module's class; for a module that ``torch.compile`` made, that of the one inside.
        parent: Name of the lowest module around every use of this one; None for the root.
            For a module that has one place this is its parent; for a module object that
            stands in several places it is the lowest module that encloses all of them.
        callable: Whether it has a forward of its own. ``nn.ModuleList`` does not, so
            nothing can be gathered around a call of it; nor does a module that was compiled
            from outside, whose calls go to the wrapper.
        params: First names of the parameters that belong here: those whose every user is
            this module or inside it, and for which no lower module can say so.
        numel: Elements in ``params``.
    """

    name: str
    cls: type[nn.Module]
    parent: str | None
    callable: bool
    params: tuple[str, ...]
    numel: int


@dataclass(frozen=True)
class ModuleTree:
    """All modules of a tree, each object once.

    Attributes:
        nodes: The modules by name, in the order of ``named_modules()``.
        bottom_up: The names with children before parents and the root last; siblings
            keep their order.
        params: First names of all parameters, in the order of ``named_parameters()``.
    """

    nodes: dict[str, ModuleNode]
    bottom_up: tuple[str, ...]
    params: tuple[str, ...]

    def enclosing(self, name: str, chosen: frozenset[str]) -> str:
        """Return the lowest chosen module around a module, itself included; else the root.

        Args:
            name: Name of a module of this tree.
            chosen: Names to stop at.

        Returns:
            A name in ``chosen``, or "".

        **Collective**: local.
        """
        at: str | None = name
        while at is not None and at not in chosen:
            at = self.nodes[at].parent
        return at or ""


class _Walk:
    """Depth-first walk over module objects: first names, parents and both orders."""

    def __init__(self, root: nn.Module) -> None:
        self.names: dict[nn.Module, str] = {}
        self.users: dict[nn.Module, list[nn.Module]] = {root: []}
        self.finished: dict[nn.Module, None] = {}  # in post-order
        self._visit(root, "")

    def _visit(self, module: nn.Module, name: str) -> None:
        self.names[module] = name
        # named_children() leaves out a second name for the same child; both have one parent.
        for child_name, child in module.named_children():
            full_name = f"{name}.{child_name}" if name else child_name
            if child in self.names and child not in self.finished:
                raise ValueError(
                    f"{full_name}: expected a tree of modules, got a module that contains "
                    f"itself (it is also {self.names[child]!r}); remove the back reference "
                    "or keep it outside of the module's attributes"
                )
            self.users.setdefault(child, []).append(module)
            if child not in self.names:
                self._visit(child, full_name)
        self.finished[module] = None


class _Cover:
    """For each module, the lowest module around all its uses."""

    def __init__(self, walk: _Walk) -> None:
        self.parent: dict[nn.Module, nn.Module] = {}
        self._depth: dict[nn.Module, int] = {}
        # Reversed post-order lists every user of a module before the module, so that the
        # covers of the users are known; the cover of a module is their lowest common one.
        for module in reversed(walk.finished):
            users = walk.users[module]
            if users:
                self.parent[module] = reduce(self.common, users)
            self._depth[module] = self._depth[self.parent[module]] + 1 if users else 0

    def common(self, left: nn.Module, right: nn.Module) -> nn.Module:
        while left is not right:
            if self._depth[left] < self._depth[right]:
                left, right = right, left
            left = self.parent[left]
        return left


def _numel(name: str, param: nn.Parameter) -> int:
    if is_lazy(param):
        raise ValueError(
            f"{name}: expected a parameter with a shape, got one that is not initialised "
            "yet; run one forward before planning"
        )
    return param.numel()


@dataclass
class _Param:
    name: str
    numel: int
    home: nn.Module  # the lowest module around all users met so far


def _read_params(names: dict[nn.Module, str], cover: _Cover) -> list[_Param]:
    found: dict[nn.Parameter, _Param] = {}
    for module, module_name in names.items():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param in found:
                found[param].home = cover.common(found[param].home, module)
            else:
                name = f"{module_name}.{leaf}" if module_name else leaf
                found[param] = _Param(name, _numel(name, param), module)
    return list(found.values())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _compiled(module: nn.Module) -> nn.Module | None:
    """The module inside one that ``torch.compile(module)`` returned, else None."""
    return module._modules.get("_orig_mod") if "forward" in module.__dict__ else None


def read_tree(module: nn.Module) -> ModuleTree:
    """Read a module's tree, resolving shared modules and tied parameters.

    Worked example. ``embed.weight`` is also ``head.weight``, and the object
    ``blocks.0.norm`` is also ``blocks.1.norm``::

        name            parent    params
        ""              None      embed.weight            the lowest module around both users
        embed           ""
        blocks          ""
        blocks.0        blocks
        blocks.0.norm   blocks    blocks.0.norm.weight    its parent is around both uses
        blocks.1        blocks
        head            ""

    Args:
        module: The root. Its parameters may be on any device, also ``meta``.

    Returns:
        The tree; it holds names, classes and counts, and no module or tensor.

    Raises:
        ValueError: A module contains itself, or a lazy parameter has no shape yet.

    **Collective**: local; pure.
    """
    walk = _Walk(module)
    cover = _Cover(walk)
    params = _read_params(walk.names, cover)
    owned: dict[nn.Module, list[_Param]] = {part: [] for part in walk.names}
    for param in params:
        owned[param.home].append(param)
    nodes = {}
    compiled = {inside for part in walk.names if (inside := _compiled(part)) is not None}
    for part, name in walk.names.items():
        around = cover.parent.get(part)
        nodes[name] = ModuleNode(
            name=name,
            cls=type(_compiled(part) or part),
            parent=None if around is None else walk.names[around],
            callable=_has_forward(part) and part not in compiled,
            params=tuple(param.name for param in owned[part]),
            numel=sum(param.numel for param in owned[part]),
        )
    bottom_up = tuple(walk.names[part] for part in walk.finished)
    return ModuleTree(nodes, bottom_up, tuple(param.name for param in params))
