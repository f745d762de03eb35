"""Cutting a module tree into the units that a sharded runtime gathers one at a time."""

from shard_wrap._plan import UnitPlan, plan_units
from shard_wrap._policy import Policy, by_class, by_name, by_size
from shard_wrap._tree import ModuleNode, ModuleTree, read_tree

__all__ = [
    "ModuleNode",
    "ModuleTree",
    "Policy",
    "UnitPlan",
    "by_class",
    "by_name",
    "by_size",
    "plan_units",
    "read_tree",
]
