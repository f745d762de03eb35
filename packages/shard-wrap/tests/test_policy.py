from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_wrap import Policy, by_class, by_name, by_size, read_tree


def sized(numel: int) -> nn.Module:
    return nn.Linear(numel, 1, bias=False, device="meta")


class Block(nn.Module):
    def __init__(self, attention: int, mlp: int) -> None:
        super().__init__()
        self.attention = sized(attention)
        self.mlp = sized(mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class WideBlock(Block):
    pass


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = sized(80)
        self.layers = nn.ModuleList([Block(40, 70), WideBlock(40, 160)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def selected(policy: Policy, model: nn.Module | None = None) -> set[str]:
    return set(policy.select(read_tree(Model() if model is None else model)))


def test_class_takes_subclasses() -> None:
    assert selected(by_class(Block)) == {"layers.0", "layers.1"}
    assert selected(by_class(WideBlock)) == {"layers.1"}
    assert selected(by_class(WideBlock, nn.Linear)) == {
        "embed",
        "layers.0.attention",
        "layers.0.mlp",
        "layers.1",
        "layers.1.attention",
        "layers.1.mlp",
    }


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layers.*", {"layers.0", "layers.1"}),
        ("layers.*.mlp", {"layers.0.mlp", "layers.1.mlp"}),
        ("layers.[1-9].m*", {"layers.1.mlp"}),
        ("layers.?.attention", {"layers.0.attention", "layers.1.attention"}),
        ("*", {"embed"}),  # not its grandchildren, and not `layers`, which has no forward
        ("*.*.*", {f"layers.{i}.{part}" for i in (0, 1) for part in ("attention", "mlp")}),
    ],
)
def test_name_pattern(pattern: str, expected: set[str]) -> None:
    assert selected(by_name(pattern)) == expected


def test_a_compiled_module_stands_for_the_one_inside() -> None:
    model = Model()
    compiled: Any = torch.compile(model.layers[0], backend="eager")
    model.layers[0] = compiled
    assert selected(by_class(Block), model) == {"layers.0", "layers.1"}


def test_size_worked_example() -> None:
    model = nn.ModuleDict({"embed": sized(80), "0": Block(40, 70), "1": Block(40, 160)})
    assert selected(by_size(100), model) == {"0", "1.mlp", ""}


def test_size_at_the_exact_count() -> None:
    assert selected(by_size(110)) == {"layers.0", "layers.1.mlp", ""}
    assert selected(by_size(111)) == {"layers.1.mlp", ""}
    assert selected(by_size(390)) == {""}


def test_size_counts_a_tied_parameter_once() -> None:
    model = nn.Sequential(nn.Sequential(sized(60)), nn.Sequential(sized(60)))
    assert selected(by_size(60), model) == {"0.0", "1.0"}
    model[1][0].weight = model[0][0].weight  # type: ignore[index]
    assert selected(by_size(60), model) == {""}


def test_union_selects_both() -> None:
    assert selected(by_class(WideBlock) | by_name("embed")) == {"layers.1", "embed"}


def test_union_with_something_else() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        by_class(Block) | "layers.*"  # type: ignore[operator]


def test_class_that_does_not_occur() -> None:
    with pytest.raises(
        ValueError, match=r"class GRU, got none; .* are: Block, Linear, Model, WideBlock"
    ):
        selected(by_class(Block, nn.GRU))


def test_class_without_forward() -> None:
    with pytest.raises(ValueError, match="class ModuleList, got none"):
        selected(by_class(nn.ModuleList))


def test_pattern_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"named 'blocks\.\*', got none; .*: embed, layers\.0"):
        selected(by_name("embed", "blocks.*"))


def test_long_listings_are_cut() -> None:
    model = nn.Sequential(*(sized(1) for _ in range(25)))
    with pytest.raises(ValueError, match=r": 0, 1, .*, 18, 19 and 5 more$"):
        selected(by_name("layers.*"), model)


def test_size_larger_than_the_model() -> None:
    with pytest.raises(ValueError, match="at least 391 elements, got 390 in the whole model"):
        selected(by_size(391))


def test_one_half_of_a_union_matches_nothing() -> None:
    with pytest.raises(ValueError, match="class GRU, got none"):
        selected(by_name("embed") | by_class(nn.GRU))


def test_arguments() -> None:
    with pytest.raises(ValueError, match="at least one module class"):
        by_class()
    with pytest.raises(TypeError, match=r"subclasses of nn\.Module, got 'Block'"):
        by_class("Block")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"subclasses of nn\.Module, got <class 'int'>"):
        by_class(int)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one pattern"):
        by_name()
    with pytest.raises(TypeError, match="patterns as strings, got 3"):
        by_name(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_numel of at least 1, got 0"):
        by_size(0)
