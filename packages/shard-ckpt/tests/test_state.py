from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shard_ckpt import PerRank, load, save
from shard_ckpt._leaf import Leaf
from shard_ckpt._runs import Runs
from shard_ckpt._state import flatten
from shard_ckpt._values import PerRankRef, TensorRef
from shard_comm import SoloComm, ThreadComm
from shard_flat import ShardTensor, shard_tensor

T = torch.zeros(2)


def ids(state: dict[str, Any]) -> list[tuple[str, str]]:
    return [leaf.id for leaf in flatten(state).leaves]


def only(state: dict[str, Any]) -> Leaf:
    (leaf,) = flatten(state).leaves
    return leaf


def test_example_in_the_documentation() -> None:
    state = {
        "model": {"embed": {"weight": T}},
        "optim": {"state": {"embed.weight": {"exp_avg": T}}, "param_groups": []},
    }
    assert ids(state) == [("model", "embed.weight"), ("optim", "embed.weight#exp_avg")]


def test_names_of_nested_state() -> None:
    state = {
        "b": [T, {"x": T}],
        "a": {"z": (T,), 3: T},
        "optim": {
            "muon": {"state": {0: {"buf": T, "deep": {"er": T}}}, "param_groups": [{"lr": T}]},
        },
    }
    assert ids(state) == [
        ("a", "3"),
        ("a", "z.0"),
        ("b", "0"),
        ("b", "1.x"),
        ("optim", "muon.0#buf"),
        ("optim", "muon.0#deep.er"),
        ("optim", "muon.param_groups.0.lr"),
    ]


def test_structure_keeps_everything_but_tensors() -> None:
    state = {
        "model": {"w": T, "none": None},
        "optim": {"state": {0: {"step": T}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "rng": [PerRank(b"a"), 1],
        "step": 3,
        "empty": {},
    }
    flat = flatten(state)
    assert flat.values == {
        "model": {"w": TensorRef("model", "w"), "none": None},
        "optim": {
            "state": {0: {"step": TensorRef("optim", "0#step")}},
            "param_groups": [{"betas": (0.9, 0.99)}],
        },
        "rng": [PerRankRef(0), 1],
        "step": 3,
        "empty": {},
    }
    assert flat.per_rank == [("['rng'][0]", b"a")]


def test_a_module_and_its_optimizer_are_a_state() -> None:
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    assert ids({"model": model.state_dict(), "optim": optim.state_dict()}) == [
        ("model", "bias"),
        ("model", "weight"),
        *[("optim", f"{i}#{slot}") for i in (0, 1) for slot in ("exp_avg", "exp_avg_sq", "step")],
    ]


def test_a_shard_tensor_is_its_range() -> None:
    comm = ThreadComm.group(4)[1]
    tensor = shard_tensor(torch.arange(24.0).view(4, 6), comm=comm, name="w")
    leaf = only({"model": {"w": nn.Parameter(tensor)}})
    assert isinstance(leaf.source, ShardTensor)
    assert (leaf.shape, leaf.start, leaf.stop, leaf.shards) == ((4, 6), 8, 16, 4)
    assert leaf.tensor.tolist() == list(range(8, 16))
    assert leaf.tensor.data_ptr() == tensor.local.data_ptr()
    assert not leaf.tensor.requires_grad


@pytest.mark.parametrize(
    "state",
    [
        {"m": {"a": {"b": T}, "a.b": T}},
        {"m": {0: T, "0": T}},
        {"m": {"state": {0: {"x": T}, "0": {"x": T}}, "param_groups": []}},
    ],
)
def test_one_name_for_two_tensors_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"state\['m'\].* and state\['m'\].* rename one"):
        flatten(state)


def test_a_collision_names_both_places() -> None:
    with pytest.raises(ValueError, match="rename one") as caught:
        flatten({"m": {"a": {"b": T}, "a.b": T}})
    assert str(caught.value) == (
        "m: a.b: state['m']['a']['b'] and state['m']['a.b'] would both be stored under this name; "
        "rename one"
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"w": T}, r'state\[\'w\'\]: a tensor needs a section .*\{"model": \{\'w\': tensor\}\}'),
        ({"a/b": {"w": T}}, "without '/'"),
        ({".a": {"w": T}}, "not begin with '.'"),
        ({"": {"w": T}}, "names files"),
        ({"a\n": {"w": T}}, "printable"),
        ({"a" * 161: {"w": T}}, "at most 160 bytes"),
        ({"m": {"": T}}, "cannot be called ''"),
        ({"m": {"__metadata__": T}}, "cannot be called '__metadata__'"),
        ({"m": {"\ud800": T}}, "no UTF-8 form"),
    ],
)
def test_unusable_names_are_refused(state: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        flatten(state)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(2, device="meta"), "meta tensor"),
        (torch.eye(2).to_sparse(), "expected a dense tensor, got layout torch.sparse_coo"),
        (torch.zeros(2, dtype=torch.complex128), "no dtype for torch.complex128"),
    ],
)
def test_unusable_tensors_are_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(TypeError, match=f"model: w: .*{reason}"):
        flatten({"model": {"w": tensor}})


def test_a_dtensor_is_its_block() -> None:
    mesh = DeviceMesh("cpu", torch.arange(3), _init_backend=False, _rank=1)
    local = torch.arange(8.0).view(4, 2)
    tensor = DTensor.from_local(
        local, mesh, (Shard(1),), run_check=False, shape=torch.Size((4, 5)), stride=(5, 1)
    )
    leaf = only({"model": {"w": tensor}})
    assert (leaf.shape, leaf.start, leaf.stop, leaf.shards) == ((4, 5), 0, 8, 3)
    assert leaf.tensor.data_ptr() == local.data_ptr()
    assert list(leaf.runs(1, 8)) == [(Runs(3, 4), 1), (Runs(7, 19, 3, 5), 2)]


def test_a_state_is_a_mapping_with_text_keys() -> None:
    with pytest.raises(TypeError, match="expected a mapping of sections, got list"):
        flatten([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="sections of type str, got 3"):
        flatten({3: 1})  # type: ignore[dict-item]


def test_aliases_are_the_same_elements_of_the_same_memory() -> None:
    base = torch.arange(12.0)
    tied = {
        "a": base,
        "b": base.view(3, 4),
        "c": base[:6],
        "d": base.clone(),
        "e": base.view(3, 4).t(),
        "f": base.view(3, 4).t(),
        "g": base.view(torch.int32),
        "h": torch.zeros(0),
        "i": torch.zeros(0),
    }
    keys = {leaf.name: leaf.alias_key for leaf in flatten({"m": tied}).leaves}
    assert keys["a"] == keys["b"]
    assert keys["e"] == keys["f"]
    assert len({keys[name] for name in "acdeg"}) == 5
    assert keys["h"] is keys["i"] is None


def test_pieces_alias_only_as_the_same_range() -> None:
    comm = SoloComm()
    first = shard_tensor(torch.arange(6.0), comm=comm)
    again = first.like(first.local)
    plain = first.local
    leaves = flatten({"m": {"a": first, "b": again, "c": plain}}).leaves
    a, b, c = (leaf.alias_key for leaf in leaves)
    assert a == b != c


@pytest.mark.parametrize(("use", "name"), [(save, "b"), (load, "a")])
def test_a_module_is_no_state(tmp_path: Path, use: Any, name: str) -> None:
    module = torch.nn.Linear(2, 3)
    save({"model": module.state_dict()}, tmp_path / "a", comm=SoloComm())
    optimizer = torch.optim.SGD(module.parameters())
    for state, text in [
        ({"model": module}, r"^state\['model'\]: .* got the Linear itself; pass its state_dict"),
        ({"a": {"optim": [optimizer]}}, r"^state\['a'\]\['optim'\]\[0\]: .* got the SGD itself"),
    ]:
        with pytest.raises(TypeError, match=text):
            use(state, tmp_path / name, comm=SoloComm())
