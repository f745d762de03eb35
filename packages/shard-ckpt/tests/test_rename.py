from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer, Naming, load, save
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads


def stored(path: Path, **names: str) -> Path:
    """A model with weights 1 and 2 and its optimizer; ``names`` says what they are called."""
    one, two = names["one"], names["two"]
    state = {
        "model": {one: torch.full((4,), 1.0), two: torch.full((4,), 2.0)},
        "optim": {
            "state": {
                one: {"exp_avg": torch.full((4,), 10.0), "step": torch.tensor(3.0), "count": 5},
                two: {"exp_avg": torch.full((4,), 20.0), "step": torch.tensor(3.0), "count": 6},
            },
            "param_groups": [{"lr": 0.5, "params": [one, two]}],
        },
    }
    save(state, path, comm=SoloComm())
    return path


def template(one: str, two: str) -> dict[str, Any]:
    def slots() -> dict[str, Any]:
        return {"exp_avg": torch.zeros(4), "step": torch.tensor(0.0), "count": 0}

    return {
        "model": {one: torch.zeros(4), two: torch.zeros(4)},
        "optim": {
            "state": {one: slots(), two: slots()},
            "param_groups": [{"lr": 0.0, "params": [one, two]}],
        },
    }


def is_full(out: dict[str, Any], one: str, two: str) -> bool:
    slots = out["optim"]["state"]
    found = [out["model"][one], out["model"][two], slots[one]["exp_avg"], slots[two]["exp_avg"]]
    return [tensor.tolist() for tensor in found] == [[v] * 4 for v in (1, 2, 10, 20)]


RENAMES = [
    {"net.a": "_orig_mod.net.a", "net.b": "_orig_mod.net.b"},
    lambda name: f"_orig_mod.{name}",
]


@pytest.mark.parametrize("rename", RENAMES)
def test_parameters_take_their_optimizer_state_along(tmp_path: Path, rename: Any) -> None:
    path = stored(tmp_path / "a", one="_orig_mod.net.a", two="_orig_mod.net.b")
    state = template("net.a", "net.b")
    out = load(state, path, comm=SoloComm(), rename=rename)
    assert is_full(out, "net.a", "net.b")
    assert out["optim"]["param_groups"] == [{"lr": 0.5, "params": ["net.a", "net.b"]}]
    assert list(out["optim"]["state"]) == ["net.a", "net.b"]
    assert [slots["count"] for slots in out["optim"]["state"].values()] == [5, 6]


def test_names_that_the_mapping_lacks_stay(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="old", two="same")
    out = load(template("new", "same"), path, comm=SoloComm(), rename={"new": "old"})
    assert is_full(out, "new", "same")


def test_names_may_change_places(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="x", two="y")
    out = load(template("y", "x"), path, comm=SoloComm(), rename={"x": "y", "y": "x"})
    assert is_full(out, "y", "x")
    assert out["optim"]["param_groups"][0]["params"] == ["y", "x"]


def test_one_stored_tensor_may_fill_two(tmp_path: Path) -> None:
    save({"m": {"w": torch.arange(3.0)}}, tmp_path / "a", comm=SoloComm())
    state = {"m": {"w": torch.zeros(3), "ema": torch.zeros(3)}}
    load(state, tmp_path / "a", comm=SoloComm(), rename={"ema": "w"})
    assert state["m"]["w"].tolist() == state["m"]["ema"].tolist() == [0, 1, 2]


def test_errors_name_what_was_looked_for(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="x", two="y")
    with pytest.raises(ValueError, match="pass strict=False") as caught:
        load(template("a", "y"), path, comm=SoloComm(), rename={"a": "z"})
    assert str(caught.value) == (
        "the checkpoint lacks model: z (for a), optim: z#exp_avg (for a#exp_avg), "
        "optim: z#step (for a#step); the template lacks model: x, optim: x#exp_avg, "
        "optim: x#step; pass strict=False to load only what both have"
    )
    with pytest.raises(TypeError, match="rename: expected a str for 'a', got None"):
        load(template("a", "y"), path, comm=SoloComm(), rename=lambda name: None)  # type: ignore[arg-type]


def test_only_what_fits_a_pattern_is_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path / "a", one="layers.0.w", two="head")
    state = template("layers.0.w", "other")  # "other" is nowhere in the checkpoint
    with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
        out = load(state, path, comm=SoloComm(), only=["model: layers.*", "optim: layers.?.w#exp*"])
    assert caplog.text == ""
    assert out["model"]["layers.0.w"].tolist() == [1] * 4
    assert out["model"]["other"].tolist() == [0] * 4
    slots = out["optim"]["state"]["layers.0.w"]
    assert slots["exp_avg"].tolist() == [10] * 4
    assert float(slots["step"]) == 0
    assert out["optim"]["param_groups"][0]["lr"] == 0.5


def test_within_the_patterns_names_must_match(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="layers.0.w", two="head")
    with pytest.raises(ValueError, match=r"lacks model: other; the template lacks model: head;"):
        load(template("layers.0.w", "other"), path, comm=SoloComm(), only=["model: *"])
    out = load(
        template("layers.0.w", "other"), path, comm=SoloComm(), only=["model: *"], strict=False
    )
    assert out["model"]["layers.0.w"].tolist() == [1] * 4


def test_patterns_are_in_the_templates_names(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="old.x", two="old.y")
    rename = {"new.x": "old.x", "new.y": "old.y"}
    out = load(template("new.x", "new.y"), path, comm=SoloComm(), rename=rename, only=["*: new.x"])
    assert out["model"]["new.x"].tolist() == [1] * 4
    assert out["model"]["new.y"].tolist() == [0] * 4


def test_patterns_that_pick_nothing_are_mistakes(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="x", two="y")
    with pytest.raises(ValueError, match=r"only: no tensor of the template fits 'model\.x'"):
        load(template("x", "y"), path, comm=SoloComm(), only=["model: *", "model.x"])
    with pytest.raises(TypeError, match="only: expected a sequence of patterns, got the string"):
        load(template("x", "y"), path, comm=SoloComm(), only="model: *")


def test_shards_through_a_checkpointer(tmp_path: Path) -> None:
    def rank(comm: Comm) -> list[list[float]]:
        checkpointer = Checkpointer(tmp_path, comm=comm)
        full = torch.arange(5.0)
        checkpointer.save(1, {"m": {"module.w": shard_tensor(full, comm=comm), "b": full + 1}})
        sharded, plain = shard_tensor(torch.zeros(5), comm=comm), torch.zeros(5)
        template = {"m": {"w": sharded, "b": plain}}
        checkpointer.restore(template, rename=lambda name: f"module.{name}", only=["m: w"])
        return [sharded.full_tensor().tolist(), plain.tolist()]

    assert run_threads(rank, 2) == [[[0, 1, 2, 3, 4], [0] * 5]] * 2


def test_a_template_of_some_sections_hears_how_to_read_these_alone(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="x", two="y")
    model = {"x": torch.zeros(4), "y": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"strict=False .*, or only=\[\"model: \*\"\] to leave"):
        load({"model": model}, path, comm=SoloComm())
    load({"model": model}, path, comm=SoloComm(), only=["model: *"])
    assert model["y"].tolist() == [2] * 4
    with pytest.raises(ValueError, match="the template lacks model: y") as caught:
        load({"model": {"x": torch.zeros(4)}}, path, comm=SoloComm())
    assert "only=" not in str(caught.value)  # the section itself does not fit


@pytest.mark.parametrize("inside", [True, False])
def test_names_that_differ_by_a_wrapper_say_which(tmp_path: Path, inside: bool) -> None:
    wrapped, bare = "layers.0._checkpoint_wrapped_module.w", "layers.0.w"
    one, other = (wrapped, bare) if inside else (bare, wrapped)
    path = stored(tmp_path / "a", one=one, two="head")
    advice = r"differ by wrappers: pass rename=Naming\(strip=\('_checkpoint_wrapped_module',\)\);"
    with pytest.raises(ValueError, match=advice):
        load(template(other, "head"), path, comm=SoloComm())
    naming = Naming(strip=("_checkpoint_wrapped_module",))
    out = load(template(other, "head"), path, comm=SoloComm(), rename=naming)
    assert out["optim"]["state"][other]["exp_avg"].tolist() == [10] * 4
    with pytest.raises(ValueError, match="the checkpoint lacks") as caught:
        load(template("layers.1.w", "_orig_mod.x"), path, comm=SoloComm())
    assert "wrappers" not in str(caught.value)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    path = stored(tmp_path / "a", one="x", two="y")
    fresh = template("x", "y")
    fresh["optim"]["state"] = {}
    with pytest.raises(ValueError, match=r"^the template lacks optim: x#exp_avg, optim") as caught:
        load(fresh, path, comm=SoloComm())
    assert "take the template from state_dict(allocate=True); pass strict=False" in str(
        caught.value
    )
    with pytest.raises(ValueError, match="; pass strict=False") as caught:
        load({"model": {}, "optim": fresh["optim"]}, path, comm=SoloComm())
    assert "allocate" not in str(caught.value)
    numbered = template("x", "y")
    numbered["optim"]["state"] = {str(i): s for i, s in enumerate(fresh["optim"]["state"])}
    numbered["optim"]["state"]["0"] = {"exp_avg": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"^the checkpoint lacks optim: 0#exp_avg; ") as caught:
        load(numbered, path, comm=SoloComm())
    assert "use torch's get_optimizer_state_dict()" in str(caught.value)


def test_names_that_the_template_lacks_are_mistakes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = stored(tmp_path / "a", one="old", two="y")
    text = "rename: no tensor of the template is called"
    for name in ("nwe", "model: new", "new#exp_avg"):
        for rename in ({"new": "old", name: "y"}, Naming(rename={"new": "old", name: "y"})):
            with pytest.raises(ValueError, match=f"^{text} '{name}'; keys are the template's"):
                load(template("new", "y"), path, comm=SoloComm(), rename=rename)
    wrapped = template("module.new", "y")
    naming = Naming(prefix="module.", rename={"new": "old"})
    assert is_full(load(wrapped, path, comm=SoloComm(), rename=naming), "module.new", "y")
    rename = {"new": "old", "nwe": "y"}
    with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
        out = load(template("new", "y"), path, comm=SoloComm(), rename=rename, strict=False)
    assert is_full(out, "new", "y")
    assert caplog.messages == [f"{text} 'nwe'"]
