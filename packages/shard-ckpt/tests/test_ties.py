"""Tensors that are one, and wrappers in names: in memory, by declaration, on disk."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from shard_ckpt import (
    Checkpointer,
    CheckpointError,
    Naming,
    convert,
    diff,
    export_hf,
    inspect,
    load,
    reindex,
    save,
    save_async,
    verify,
)
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads

TIED = Naming(ties={"head": "embed"})
TABLE = torch.arange(35.0).view(7, 5)
SOLO = SoloComm()


def stored(path: Path) -> dict[str, Any]:
    """Return what each tensor is tied to, and as ``bytes`` how much data there is."""
    info = inspect(path)
    data = sum(part.numel * 4 for r in info.tensors if r.tie is None for part in r.ranges)
    return {record.name: record.tie and record.tie[1] for record in info.tensors} | {"bytes": data}


def filled(path: Path, *names: str, **how: Any) -> list[bool]:
    template = {"model": {name: torch.zeros(7, 5) for name in names}}
    load(template, path, comm=SOLO, **how)
    return [torch.equal(tensor, TABLE) for tensor in template["model"].values()]


class TestDeclaredInSave:
    """One copy is stored, both names load."""

    @pytest.mark.parametrize("also", ["same memory", "a copy", "not there"])
    def test_one_copy_and_both_names(self, tmp_path: Path, also: str) -> None:
        def rank(comm: Comm) -> None:
            embed = shard_tensor(TABLE, comm=comm, name="embed")
            model: dict[str, Any] = {"embed": embed}
            if also != "not there":
                head = embed if also == "same memory" else shard_tensor(TABLE, comm=comm)
                model["head"] = head
            save({"model": model}, tmp_path / "a", comm=comm, rename=TIED)

        run_threads(rank, 3)
        assert stored(tmp_path / "a") == {"embed": None, "head": "embed", "bytes": 35 * 4}
        assert filled(tmp_path / "a", "embed", "head") == [True, True]
        assert filled(tmp_path / "a", "head") == [True]  # embed is not missed
        assert verify(tmp_path / "a") == ()
        index = (tmp_path / "a" / "index.json").read_bytes()
        (tmp_path / "a" / "index.json").unlink()
        reindex(tmp_path / "a")
        assert (tmp_path / "a" / "index.json").read_bytes() == index
        convert(tmp_path / "a", tmp_path / "b")
        assert diff(tmp_path / "a", tmp_path / "b") == ()
        assert stored(tmp_path / "b")["bytes"] == 35 * 4

    def test_an_undeclared_tie_is_seen(self, tmp_path: Path) -> None:
        save({"model": {"embed": TABLE, "head": TABLE}}, tmp_path / "a", comm=SOLO)
        assert stored(tmp_path / "a") == {"embed": None, "head": "embed", "bytes": 35 * 4}

    def test_what_is_not_alike_is_refused_on_all_ranks(self, tmp_path: Path) -> None:
        """The last element differs, which one rank holds."""
        other = TABLE.clone()
        other[6, 4] += 1

        def rank(comm: Comm) -> str:
            model: dict[str, Any] = {"embed": shard_tensor(TABLE, comm=comm)}
            model["head"] = shard_tensor(other, comm=comm)
            with pytest.raises(ValueError, match="declared to be embed, but they differ in their"):
                save({"model": model}, tmp_path / "a", comm=comm, rename=TIED)
            model["head"] = TABLE
            with pytest.raises(ValueError, match="they differ in ") as caught:
                save({"model": model}, tmp_path / "a", comm=comm, rename=TIED)
            return str(caught.value)

        assert "they differ in stop: 35 and 12" in run_threads(rank, 3)[0]
        assert not (tmp_path / "a").exists()

    def test_a_long_copy_is_compared_to_the_end(self, tmp_path: Path) -> None:
        embed = torch.zeros(3_000_000)
        head = embed.clone()
        save({"m": {"embed": embed, "head": head}}, tmp_path / "a", comm=SOLO, rename=TIED)
        head[-1] = -0.0  # equal, and another bit
        with pytest.raises(ValueError, match="differ in their values; tie them"):
            save({"m": {"embed": embed, "head": head}}, tmp_path / "b", comm=SOLO, rename=TIED)

    def test_mistakes_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="head is tied to embed, which the state does not"):
            save({"m": {"w": TABLE}}, tmp_path / "a", comm=SOLO, rename=TIED)
        with pytest.raises(ValueError, match="ties: m: head is there, and no tensor"):
            save({"m": {"embed": TABLE, "head": 3}}, tmp_path / "a", comm=SOLO, rename=TIED)


class TestLoad:
    """Templates and checkpoints that differ in what is tied."""

    def test_a_tied_template_takes_what_is_there(self, tmp_path: Path) -> None:
        save({"model": {"head": TABLE}}, tmp_path / "a", comm=SOLO)

        def rank(comm: Comm) -> bool:
            one = shard_tensor(torch.zeros(7, 5), comm=comm)
            template = {"model": {"embed": one, "head": one.detach(), "tail": one}}
            load(template, tmp_path / "a", comm=comm)
            return torch.equal(one.full_tensor(), TABLE)

        assert run_threads(rank, 3) == [True] * 3
        assert run_threads(rank, 36) == [True] * 36  # one rank has no elements of it

    def test_a_tied_template_needs_equal_bits(self, tmp_path: Path) -> None:
        other = TABLE.clone()
        save({"model": {"embed": TABLE, "head": other}}, tmp_path / "same", comm=SOLO)
        other[6, 4] += 1
        save({"model": {"embed": TABLE, "head": other}}, tmp_path / "other", comm=SOLO)

        def rank(comm: Comm) -> list[float]:
            one = shard_tensor(torch.zeros(7, 5), comm=comm)
            template = {"model": {"embed": one, "head": one}}
            with pytest.raises(
                ValueError, match="share memory here, but differ in the files; give"
            ):
                load(template, tmp_path / "other", comm=comm)
            untouched = one.full_tensor().abs().max().item()
            naming = {"embed": "head"}
            load(template, tmp_path / "other", comm=comm, rename=naming, strict=False)
            chosen = one.full_tensor()[6, 4].item()
            load(template, tmp_path / "same", comm=comm)
            return [untouched, chosen, one.full_tensor()[6, 4].item()]

        assert run_threads(rank, 3) == [[0.0, 35.0, 34.0]] * 3
        path = tmp_path / "same" / "model-r00000-of-00001.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1  # damage is called damage, not a difference
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="altered"):
            load(
                {"model": dict.fromkeys(("embed", "head"), torch.ones(7, 5))},
                path.parent,
                comm=SOLO,
            )

    def test_an_untied_template_takes_a_tied_checkpoint(self, tmp_path: Path) -> None:
        save({"model": {"embed": TABLE, "head": TABLE}}, tmp_path / "a", comm=SOLO)
        assert filled(tmp_path / "a", "embed", "head") == [True, True]
        assert filled(tmp_path / "a", "embed") == [True]

    def test_a_declaration_fills_both_from_one(self, tmp_path: Path) -> None:
        save({"model": {"embed": TABLE}}, tmp_path / "embed", comm=SOLO)
        save({"model": {"head": TABLE}}, tmp_path / "head", comm=SOLO)
        for name in ("embed", "head"):
            assert filled(tmp_path / name, "embed", "head", rename=TIED) == [True, True]
            assert filled(tmp_path / name, "embed", rename=TIED) == [True]
        with pytest.raises(ValueError, match="the checkpoint lacks model: head; "):
            filled(tmp_path / "embed", "embed", "head")

    def test_optimizer_state_goes_along(self, tmp_path: Path) -> None:
        """Under the name that the template's optimizer has, whatever names its model has."""
        state = {"state": {"embed": {"exp_avg": TABLE}}, "param_groups": [{"params": ["embed"]}]}
        save({"model": {"embed": TABLE}, "optim": state}, tmp_path / "a", comm=SOLO)
        for names in (["head"], ["embed", "head"]):
            slots = {"head": {"exp_avg": torch.zeros(7, 5)}}
            template = {
                "model": {name: torch.zeros(7, 5) for name in names},
                "optim": {"state": slots, "param_groups": [{"params": []}]},
            }
            out = load(template, tmp_path / "a", comm=SOLO, rename=TIED)
            assert torch.equal(slots["head"]["exp_avg"], TABLE)
            assert out["optim"]["param_groups"] == [{"params": ["head"]}]


WRAPPED = Naming(prefix="module.", strip=("_orig_mod", "_checkpoint_wrapped_module"))


def wrapped_state(value: float, *, wrapped: bool) -> dict[str, Any]:
    """A model of two parameters, by names as wrappers leave them or plain, with its optimizer."""
    names = (
        ("module._orig_mod.a.weight", "module.b._checkpoint_wrapped_module.bias")
        if wrapped
        else ("a.weight", "b.bias")
    )
    tensors = [torch.full((3,), value), torch.full((2,), value + 1)]
    return {
        "model": dict(zip(names, tensors, strict=True)),
        "optim": {
            "state": {
                name: {"exp_avg": tensor + 10, "count": 3}
                for name, tensor in zip(names, tensors, strict=True)
            },
            "param_groups": [{"lr": value, "params": list(names)}],
        },
    }


def first_values(state: dict[str, Any]) -> list[float]:
    slots = [slot["exp_avg"] for slot in state["optim"]["state"].values()]
    return [tensor[0].item() for tensor in (*state["model"].values(), *slots)]


@pytest.mark.parametrize("stripped_by", ["save", "load", "both"])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_wrappers_are_stripped_by_declaration(
    tmp_path: Path, stripped_by: str, saved: bool, loaded: bool
) -> None:
    first = wrapped_state(1, wrapped=saved)
    at_save = None if stripped_by == "load" else WRAPPED
    save(first, tmp_path / "a", comm=SOLO, rename=at_save)
    names = {record.name for record in inspect(tmp_path / "a").tensors}
    if stripped_by != "load" or not saved:
        assert names == {"a.weight", "b.bias", "a.weight#exp_avg", "b.bias#exp_avg"}
        export_hf(tmp_path / "a", tmp_path / "hf")
        assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"a.weight", "b.bias"}
        convert(tmp_path / "a", tmp_path / "again")
        assert diff(tmp_path / "a", tmp_path / "again") == ()
    if stripped_by == "save" and loaded:
        with pytest.raises(ValueError, match="the checkpoint lacks model: module"):
            load(wrapped_state(0, wrapped=True), tmp_path / "a", comm=SOLO)
        return
    template = wrapped_state(0, wrapped=loaded)
    at_load = None if stripped_by == "save" else WRAPPED
    out = load(template, tmp_path / "a", comm=SOLO, rename=at_load)
    assert first_values(out) == [1, 2, 11, 12]
    wanted = list(template["model"])
    assert out["optim"]["param_groups"] == [{"lr": 1, "params": wanted}]
    assert list(out["optim"]["state"]) == wanted
    assert [slots["count"] for slots in out["optim"]["state"].values()] == [3, 3]


def test_wrapped_modules_are_nested_too(tmp_path: Path) -> None:
    state = {
        "model": {
            "net": {"_orig_mod": {"w": torch.ones(2)}, "depth": 3},
            "_orig_mod": {"v": torch.ones(3)},
            "list": [torch.ones(1), {"_orig_mod": torch.ones(4)}],
        }
    }
    names = Naming(strip=("_orig_mod",))
    save(state, tmp_path / "a", comm=SOLO, rename=names)
    sizes = {record.name: record.numel for record in inspect(tmp_path / "a").tensors}
    assert sizes == {"list.0": 1, "list.1": 4, "net.w": 2, "v": 3}
    assert inspect(tmp_path / "a").values == {"model": {"net": {"depth": 3}}}
    template = {"model": {name: torch.zeros(numel) for name, numel in sizes.items()}}
    load(template, tmp_path / "a", comm=SOLO)
    assert all(tensor.min() == 1 for tensor in template["model"].values())
    nested: dict[str, Any] = {
        "model": {
            "net": {"_orig_mod": {"w": torch.zeros(2)}, "depth": 0},
            "_orig_mod": {"v": torch.zeros(3)},
            "list": [torch.zeros(1), {"_orig_mod": torch.zeros(4)}],
        }
    }
    out = load(nested, tmp_path / "a", comm=SOLO, rename=names)
    assert out["model"]["net"]["depth"] == 3
    assert out["model"]["net"]["_orig_mod"]["w"].tolist() == [1, 1]
    assert out["model"]["list"][1]["_orig_mod"].tolist() == [1] * 4


def test_names_that_become_one_are_refused(tmp_path: Path) -> None:
    twice = {"model": {"w": torch.zeros(2), "_orig_mod.w": torch.ones(2)}}
    strip = Naming(strip=("_orig_mod",))
    with pytest.raises(ValueError, match=r"model: w: .*both be stored under this name; rename one"):
        save(twice, tmp_path / "a", comm=SOLO, rename=strip)
    save(twice, tmp_path / "a", comm=SOLO)
    template = {"model": {"w": torch.full((2,), 5.0)}}
    load(template, tmp_path / "a", comm=SOLO, rename=strip, strict=False)
    assert template["model"]["w"].tolist() == [0, 0]  # the exact name comes first
    two = {"model": {"x._orig_mod.w": torch.zeros(2), "_orig_mod.x.w": torch.ones(2)}}
    save(two, tmp_path / "b", comm=SOLO)
    with pytest.raises(ValueError, match=r"model: x.w: the checkpoint has .* which become one"):
        load({"model": {"x.w": torch.zeros(2)}}, tmp_path / "b", comm=SOLO, rename=strip)


def test_a_compiled_and_checkpointed_module(tmp_path: Path) -> None:
    """As torch wraps them: names of the wrapped and the plain module differ."""

    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

    wrapped, plain = net(), net()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler imports what torch has deprecated
        compiled: Any = torch.compile(wrapped)
    names = Naming(strip=("_orig_mod", "_checkpoint_wrapped_module"))
    assert any("_orig_mod" in name for name in compiled.state_dict())
    steps = Checkpointer(tmp_path / "run", comm=SOLO, async_=True)
    steps.save(1, {"model": compiled.state_dict()}, rename=names)
    steps.restore({"model": plain.state_dict()})
    for mine, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    save_async({"model": plain.state_dict()}, tmp_path / "b", comm=SOLO).wait()
    with torch.no_grad():
        for param in wrapped.parameters():
            param.zero_()
    load({"model": compiled.state_dict()}, tmp_path / "b", comm=SOLO, rename=names)
    for mine, theirs in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert torch.equal(mine, theirs)
