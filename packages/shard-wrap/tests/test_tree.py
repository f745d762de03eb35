from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_wrap import read_tree


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.Linear(2, 2, bias=False) if norm is None else norm
        self.mlp = nn.Linear(2, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.norm(x))
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        first = Block()
        self.blocks = nn.ModuleList([first, Block(first.norm)])
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_worked_example() -> None:
    tree = read_tree(Tied())
    table = {name: (node.parent, node.params, node.numel) for name, node in tree.nodes.items()}
    assert table == {
        "": (None, ("embed.weight",), 10),
        "embed": ("", (), 0),
        "blocks": ("", (), 0),
        "blocks.0": ("blocks", (), 0),
        "blocks.0.norm": ("blocks", ("blocks.0.norm.weight",), 4),
        "blocks.0.mlp": ("blocks.0", ("blocks.0.mlp.weight",), 6),
        "blocks.1": ("blocks", (), 0),
        "blocks.1.mlp": ("blocks.1", ("blocks.1.mlp.weight",), 6),
        "head": ("", (), 0),
    }
    assert tree.bottom_up == (
        "embed",
        "blocks.0.norm",
        "blocks.0.mlp",
        "blocks.0",
        "blocks.1.mlp",
        "blocks.1",
        "blocks",
        "head",
        "",
    )


def test_orders_are_those_of_torch() -> None:
    model = Tied()
    tree = read_tree(model)
    assert list(tree.nodes) == [name for name, _ in model.named_modules()]
    assert list(tree.params) == [name for name, _ in model.named_parameters()]


def test_containers_without_forward_are_not_callable() -> None:
    tree = read_tree(Tied())
    assert [name for name, node in tree.nodes.items() if not node.callable] == ["blocks"]


def test_tie_inside_one_module_stays_there() -> None:
    block = Block()
    block.mlp.again = block.mlp.weight
    tree = read_tree(nn.Sequential(block))
    assert tree.nodes["0.mlp"].params == ("0.mlp.weight",)


def test_tie_between_a_module_and_its_child_belongs_to_the_outer() -> None:
    block = Block()
    block.again = block.mlp.weight
    tree = read_tree(nn.Sequential(block))
    assert tree.nodes["0"].params == ("0.again",)
    assert tree.nodes["0.mlp"].params == ()


def test_shared_deep_inside_shared() -> None:
    # leaf is in left and right, both in inner, and inner is in both outer modules: the
    # lowest module around all uses of leaf is inner, though four names lead to leaf.
    leaf = nn.Linear(1, 1)
    inner = nn.ModuleDict({"left": nn.Sequential(leaf), "right": nn.Sequential(leaf)})
    outer = nn.ModuleList([nn.Sequential(inner), nn.Sequential(inner)])
    tree = read_tree(outer)
    assert tree.nodes["0.0.left.0"].parent == "0.0"
    assert tree.nodes["0.0"].parent == ""


def test_many_names_for_one_module_stay_cheap() -> None:
    # 2**60 names lead to the innermost module; each object is read once.
    module: nn.Module = nn.Linear(1, 1)
    for _ in range(60):
        module = nn.ModuleList([nn.Sequential(module), nn.Sequential(module)])
    assert len(read_tree(module).nodes) == 1 + 3 * 60


def test_module_that_contains_itself() -> None:
    block = Block()
    block.mlp.add_module("back", block)
    with pytest.raises(ValueError, match=r"0\.mlp\.back: .* contains itself .*'0'"):
        read_tree(nn.Sequential(block))


def test_lazy_parameter() -> None:
    with pytest.raises(ValueError, match=r"0\.weight: .* not initialised yet"):
        read_tree(nn.Sequential(nn.LazyLinear(3)))


def test_meta_device() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1000, 1000, bias=False))
    assert read_tree(model).nodes["0"].numel == 1_000_000
