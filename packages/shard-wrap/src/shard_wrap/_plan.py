"""From a module and a policy to units."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shard_wrap._policy import Policy
from shard_wrap._tree import ModuleTree, read_tree


@dataclass(frozen=True)
class UnitPlan:
    """The modules whose parameters are gathered together.

    Attributes:
        name: Name of the module whose forward the gathering surrounds; "" for the root.
        modules: Names of all modules of the unit, its own first, then those inside it that
            no lower unit has, in the order of ``named_modules()``.
        params: First names of the unit's parameters, in the order of
            ``named_parameters()``. A tied parameter appears once, in one unit, and may be
            used by modules of other units below this one.
    """

    name: str
    modules: tuple[str, ...]
    params: tuple[str, ...]


def plan_units(module: nn.Module, policy: Policy) -> list[UnitPlan]:
    """Cut a module tree into units.

    The root is always a unit, and it comes last. A tied parameter belongs to the lowest
    unit that covers all its users, and so do the parameters of a module object that stands
    in several places. A chosen module that ends up without parameters of its own (all of
    them belong to units below it or above it) is no unit.

    Worked example, ``by_class(Block)`` on a decoder with a tied head::

        embed.weight == head.weight, blocks.0.{norm,mlp}.weight, blocks.1.{norm,mlp}.weight

        name        modules                                     params
        blocks.0    blocks.0, blocks.0.norm, blocks.0.mlp       blocks.0.norm.weight, ...
        blocks.1    blocks.1, blocks.1.norm, blocks.1.mlp       blocks.1.norm.weight, ...
        ""          "", embed, blocks, head                     embed.weight

    Args:
        module: The root. It is read and not changed; parameters may be on any device.
        policy: Which modules to choose, such as ``by_class(Block)``.

    Returns:
        Units from the bottom up: each after the units inside it, the root last.

    Raises:
        ValueError: The policy matches nothing; the message lists what there is to match.
        TypeError: ``policy`` is not a policy.

    **Collective**: local; pure, so that all ranks with the same model get the same plan.
    """
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy: expected a Policy such as by_class(Block), got {type(policy).__name__}"
        )
    tree = read_tree(module)
    params = _by_unit(tree, policy.select(tree))
    keep = frozenset(name for name, owned in params.items() if owned)
    modules: dict[str, list[str]] = {name: [] for name in keep | {""}}
    for name in tree.nodes:
        modules[tree.enclosing(name, keep)].append(name)
    return [
        UnitPlan(name, tuple(modules[name]), tuple(params.get(name, ())))
        for name in tree.bottom_up
        if name in modules
    ]


def _by_unit(tree: ModuleTree, chosen: frozenset[str]) -> dict[str, list[str]]:
    owner = {
        param: tree.enclosing(node.name, chosen)
        for node in tree.nodes.values()
        for param in node.params
    }
    owned: dict[str, list[str]] = {}
    for param in tree.params:
        owned.setdefault(owner[param], []).append(param)
    return owned
