from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shard_wrap import Policy, UnitPlan, by_class, by_name, by_size, plan_units


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(2, 2, bias=False)
        self.mlp = nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.norm(x))
        return y


class Decoder(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def params_of(model: nn.Module, policy: Policy) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.params for unit in plan_units(model, policy)}


def test_worked_example() -> None:
    assert plan_units(Decoder(), by_class(Block)) == [
        UnitPlan(
            "blocks.0",
            ("blocks.0", "blocks.0.norm", "blocks.0.mlp"),
            ("blocks.0.norm.weight", "blocks.0.mlp.weight"),
        ),
        UnitPlan(
            "blocks.1",
            ("blocks.1", "blocks.1.norm", "blocks.1.mlp"),
            ("blocks.1.norm.weight", "blocks.1.mlp.weight"),
        ),
        UnitPlan("", ("", "embed", "blocks", "head"), ("embed.weight",)),
    ]


def test_nested_units_come_before_the_unit_around_them() -> None:
    plan = plan_units(Decoder(), by_class(Block) | by_name("blocks.1.mlp"))
    assert [(unit.name, unit.params) for unit in plan] == [
        ("blocks.0", ("blocks.0.norm.weight", "blocks.0.mlp.weight")),
        ("blocks.1.mlp", ("blocks.1.mlp.weight",)),
        ("blocks.1", ("blocks.1.norm.weight",)),
        ("", ("embed.weight",)),
    ]


def test_tied_as_two_units_is_owned_by_the_root_once() -> None:
    assert params_of(Decoder(0), by_name("embed", "head")) == {"": ("embed.weight",)}


def test_tied_inside_one_unit_stays_in_it() -> None:
    model = nn.Sequential(Decoder(0), nn.Linear(2, 2, bias=False))
    assert params_of(model, by_class(Decoder)) == {
        "0": ("0.embed.weight",),
        "": ("1.weight",),
    }


def test_unit_without_parameters_of_its_own_is_dropped() -> None:
    plan = plan_units(Decoder(1), by_class(Block) | by_name("blocks.*.*"))
    assert [unit.name for unit in plan] == ["blocks.0.norm", "blocks.0.mlp", ""]
    assert plan[-1].modules == ("", "embed", "blocks", "blocks.0", "head")


def test_root_without_parameters_stays() -> None:
    model = nn.Sequential(Block())
    assert params_of(model, by_class(Block))[""] == ()
    assert plan_units(nn.Sequential(), by_class(nn.Sequential)) == [UnitPlan("", ("",), ())]


def test_policy_that_chooses_the_root() -> None:
    assert [unit.name for unit in plan_units(Decoder(1), by_class(Decoder))] == [""]


def test_shared_module_that_is_a_unit() -> None:
    block = Block()
    assert params_of(nn.Sequential(block, nn.Tanh(), block), by_class(Block)) == {
        "0": ("0.norm.weight", "0.mlp.weight"),
        "": (),
    }


def test_shared_module_in_two_units_belongs_to_the_unit_around_both() -> None:
    first, second = Block(), Block()
    second.norm = first.norm
    plan = plan_units(nn.Sequential(first, second), by_class(Block))
    assert [(unit.name, unit.modules, unit.params) for unit in plan] == [
        ("0", ("0", "0.mlp"), ("0.mlp.weight",)),
        ("1", ("1", "1.mlp"), ("1.mlp.weight",)),
        ("", ("", "0.norm"), ("0.norm.weight",)),
    ]


def test_container_named_by_a_pattern() -> None:
    with pytest.raises(ValueError, match=r"named 'blocks', got none; .*embed, blocks\.0, "):
        plan_units(Decoder(), by_name("blocks"))


def test_something_that_is_no_policy() -> None:
    with pytest.raises(TypeError, match=r"Policy such as by_class\(Block\), got type"):
        plan_units(Decoder(), Block)  # type: ignore[arg-type]


def test_planning_changes_nothing() -> None:
    model = Decoder()
    before = {name: (id(param), param._version) for name, param in model.named_parameters()}
    plan_units(model, by_size(3))
    assert {n: (id(p), p._version) for n, p in model.named_parameters()} == before


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Trees with tied parameters, shared modules and containers without forward."""
    pool: list[nn.Module] = []
    leaves: list[nn.Linear] = []
    for _ in range(draw(st.integers(1, 12))):
        if len(pool) < 2 or draw(st.booleans()):
            leaf = nn.Linear(draw(st.integers(1, 9)), 1, bias=draw(st.booleans()))
            if leaves and draw(st.integers(0, 3)) == 0:
                leaf.weight = draw(st.sampled_from(leaves)).weight
            leaves.append(leaf)
            pool.append(leaf)
        else:
            children = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
            as_list = draw(st.booleans())
            pool.append(nn.ModuleList(children) if as_list else nn.Sequential(*children))
    return nn.Sequential(*pool[-3:])


@st.composite
def policies(draw: st.DrawFn, model: nn.Module) -> Policy:
    total = sum(param.numel() for param in model.parameters())
    names = [
        name for name, part in model.named_modules() if name and not isinstance(part, nn.ModuleList)
    ]
    choices = [by_size(draw(st.integers(1, total))), by_class(nn.Sequential)]
    if names:
        chosen = draw(st.lists(st.sampled_from(names), min_size=1))
        choices += [by_name(*chosen), by_name(*chosen) | by_class(nn.Linear, nn.Sequential)]
    return draw(st.sampled_from(choices))


def names_of_users(model: nn.Module, param: nn.Parameter) -> list[str]:
    return [
        name
        for name, part in model.named_modules(remove_duplicate=False)
        if any(param is own for own in part.parameters(recurse=False))
    ]


def units_around(model: nn.Module, name: str, units: set[nn.Module]) -> list[nn.Module]:
    parts = name.split(".") if name else []
    chain = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts) + 1)]
    return [part for part in chain if part in units]


@settings(deadline=None)
@given(st.data())
def test_laws(data: st.DataObject) -> None:
    model = data.draw(models())
    plan = plan_units(model, data.draw(policies(model)))

    owned = [name for unit in plan for name in unit.params]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    placed = [name for unit in plan for name in unit.modules]
    assert sorted(placed) == sorted(name for name, _ in model.named_modules())

    assert plan[-1].name == ""
    assert all(unit.params for unit in plan[:-1])
    assert all(unit.modules[0] == unit.name for unit in plan)
    modules = {unit.name: model.get_submodule(unit.name) for unit in plan}
    for later, unit in enumerate(plan):
        inside = set(modules[unit.name].modules())
        assert not any(modules[other.name] in inside for other in plan[later + 1 :])

    # By brute force over every name: of the units that are around every user of a
    # parameter, the lowest one has it.
    for unit in plan:
        for name in unit.params:
            users = names_of_users(model, model.get_parameter(name))
            chains = [units_around(model, user, set(modules.values())) for user in users]
            common = [part for part in chains[0] if all(part in chain for chain in chains)]
            assert common[-1] is modules[unit.name]


@settings(deadline=None)
@given(st.data())
def test_size_law(data: st.DataObject) -> None:
    model = data.draw(models())
    total = sum(param.numel() for param in model.parameters())
    least = data.draw(st.integers(1, total))
    for unit in plan_units(model, by_size(least))[:-1]:
        params = [model.get_parameter(name) for name in unit.params]
        assert sum(param.numel() for param in params) >= least
        # Nothing smaller inside reaches the size with what the unit holds.
        for name in unit.modules[1:]:
            part = model.get_submodule(name)
            if not isinstance(part, nn.ModuleList):
                held = sum(param.numel() for param in params if covers(model, part, param))
                assert held < least


def covers(model: nn.Module, part: nn.Module, param: nn.Parameter) -> bool:
    return all(units_around(model, user, {part}) for user in names_of_users(model, param))
