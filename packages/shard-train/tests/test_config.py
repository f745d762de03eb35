from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shard_train import Config, UsageError
from shard_train._config import check_config, flag, resolve


def changed(**tables: dict[str, Any]) -> Config:
    base = Config()
    return replace(
        base, **{name: replace(getattr(base, name), **keys) for name, keys in tables.items()}
    )


def test_defaults_pass() -> None:
    check_config(resolve(Config()))


def test_resolve_fills_in_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(changed(model={"width": 96}, data={"path": "notes"}, run={"steps": 70}))
    assert config.model.hidden == 256
    assert config.optim.decay_steps == 70
    assert config.data.path == str(tmp_path / "notes")
    assert config.run.out == str(tmp_path / "runs" / "default")


def test_resolve_rounds_the_hidden_width_up() -> None:
    assert resolve(changed(model={"width": 256})).model.hidden == 688  # 682.67


def test_resolve_keeps_what_is_given_and_is_idempotent() -> None:
    given = changed(model={"hidden": 100}, optim={"decay_steps": 7}, data={"path": "~/x"})
    config = resolve(given)
    assert (config.model.hidden, config.optim.decay_steps) == (100, 7)
    assert config.data.path == os.path.expanduser("~/x")
    assert resolve(config) == config


def test_the_word_stdlib_is_no_path() -> None:
    assert resolve(Config()).data.path == "stdlib"
    assert resolve(changed(data={"path": "./stdlib"})).data.path == os.path.abspath("stdlib")


def test_identity_leaves_the_run_table_out() -> None:
    config = Config()
    assert config.identity == changed(run={"ranks": 4, "steps": 9, "out": "x"}).identity
    assert config.identity != changed(optim={"lr": 1.0}).identity
    assert {key.split(".")[0] for key in config.identity} == {"model", "data", "optim"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"run": {"steps": 0}}, "--steps: expected a number above 0, got 0"),
        ({"run": {"ranks": -1}}, "--ranks: expected a number above 0, got -1"),
        ({"run": {"save_every": 0}}, "--save-every: expected a number above 0, got 0"),
        ({"run": {"eval_every": 0}}, "--eval-every: expected a number above 0, got 0"),
        ({"run": {"log_every": 0}}, "--log-every: expected a number above 0, got 0"),
        ({"run": {"keep": 0}}, "--keep: expected a number above 0, got 0"),
        ({"run": {"sample": -1}}, "--sample: expected a number of 0 or more, got -1"),
        ({"data": {"batch": 0}}, "--batch: expected a number above 0, got 0"),
        ({"data": {"seq": 0}}, "--seq: expected a number above 0, got 0"),
        ({"data": {"held_out": 0}}, "--held-out: expected a number above 0, got 0"),
        ({"data": {"seed": -1}}, "--seed: expected a number of 0 or more, got -1"),
        ({"data": {"seed": 2**63}}, r"--seed: expected a number below 2\*\*63"),
        ({"model": {"width": -8}}, "--width: expected a number above 0, got -8"),
        ({"model": {"layers": 0}}, "--layers: expected a number above 0, got 0"),
        ({"model": {"heads": 0}}, "--heads: expected a number above 0, got 0"),
        ({"model": {"hidden": -1}}, "--hidden: expected a number above 0, got -1"),
        ({"model": {"precision": "fp8"}}, "--precision: expected fp32 or bf16, got 'fp8'"),
        ({"optim": {"lr": 0.0}}, r"--lr: expected a number above 0, got 0\.0"),
        ({"optim": {"lr": float("nan")}}, "--lr: expected a number above 0, got nan"),
        ({"optim": {"clip": float("inf")}}, "--clip: expected a number above 0, got inf"),
        ({"optim": {"warmup": -1}}, "--warmup: expected a number of 0 or more, got -1"),
        ({"optim": {"weight_decay": -0.1}}, "--weight-decay: expected a number of 0 or more"),
        (
            {"model": {"width": 250}},
            "--width 250: expected a multiple of --heads 4; the nearest are 248 and 252",
        ),
        ({"model": {"width": 3}}, "--width 3: .* --heads 4; the nearest are 4$"),
        ({"model": {"width": 12}}, "--width 12 over --heads 4: expected an even number .* got 3"),
        (
            {"data": {"batch": 16}, "run": {"ranks": 3}},
            "--batch 16: expected a multiple of the number of ranks, 3, .* are 15 and 18",
        ),
    ],
)
def test_what_cannot_be(tables: dict[str, dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_config(resolve(changed(**tables)))


def test_flags_of_keys() -> None:
    assert [flag("path"), flag("seq"), flag("save_every")] == ["--data", "--seq", "--save-every"]
