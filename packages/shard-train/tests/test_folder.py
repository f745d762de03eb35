from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shard_train import Config, RunConfig, UsageError, read_config
from shard_train._config import resolve
from shard_train._folder import claim_folder
from shard_train._text import Text

TEXT = Text(bytearray(b"train"), bytearray(b"held"), 1, 1, "abc")


def config_at(path: Path, **run: int) -> Config:
    return resolve(Config(run=RunConfig(out=str(path), **run)))


def test_new_folder_holds_the_configuration(tmp_path: Path) -> None:
    config = config_at(tmp_path / "a" / "b")
    claim_folder(config, TEXT).release()
    assert read_config(tmp_path / "a" / "b" / "config.toml") == config
    facts = json.loads((tmp_path / "a" / "b" / "text.json").read_text())
    assert facts == {"digest": "abc", "train_bytes": 5, "held_out_bytes": 4}


def test_run_table_may_change(tmp_path: Path) -> None:
    claim_folder(config_at(tmp_path), TEXT).release()
    config = config_at(tmp_path, ranks=1, save_every=3, keep=9)
    claim_folder(config, TEXT).release()
    assert read_config(tmp_path / "config.toml") == config


def test_more_steps_with_the_schedule_kept(tmp_path: Path) -> None:
    first = config_at(tmp_path, steps=100)
    claim_folder(first, TEXT).release()
    claim_folder(replace(first, run=replace(first.run, steps=200)), TEXT).release()
    with pytest.raises(UsageError, match=r"optim\.decay_steps \(100 there, 200 now\)"):
        claim_folder(config_at(tmp_path, steps=200), TEXT)


def test_folder_of_another_configuration(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    claim_folder(config, TEXT).release()
    other = replace(
        config, model=replace(config.model, layers=9), data=replace(config.data, seed=7)
    )
    with pytest.raises(
        UsageError,
        match=r"another configuration: model\.layers \(4 there, 9 now\), "
        r"data\.seed \(0 there, 7 now\); .* --config .*config\.toml$",
    ):
        claim_folder(other, TEXT)
    assert read_config(tmp_path / "config.toml") == config


def test_text_that_has_changed(tmp_path: Path) -> None:
    claim_folder(config_at(tmp_path), TEXT).release()
    with pytest.raises(UsageError, match="the text of --data stdlib has changed"):
        claim_folder(config_at(tmp_path), replace(TEXT, digest="abd"))


@pytest.mark.parametrize("damaged", ["{", "{}", "[]", None])
def test_text_record_that_is_damaged(tmp_path: Path, damaged: str | None) -> None:
    claim_folder(config_at(tmp_path), TEXT).release()
    (tmp_path / "text.json").unlink()
    if damaged is not None:
        (tmp_path / "text.json").write_text(damaged)
    with pytest.raises(UsageError, match=r"text\.json: cannot be read"):
        claim_folder(config_at(tmp_path), TEXT)


def test_configuration_that_is_damaged(tmp_path: Path) -> None:
    claim_folder(config_at(tmp_path), TEXT).release()
    (tmp_path / "config.toml").write_text("[model\n")
    with pytest.raises(UsageError, match=r"config\.toml: expected TOML"):
        claim_folder(config_at(tmp_path), TEXT)


def test_folder_with_something_else_in_it(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"it holds thesis\.tex and no config\.toml"):
        claim_folder(config_at(tmp_path), TEXT)
    assert not (tmp_path / "config.toml").exists()


def test_folder_that_was_left_before_its_configuration_was_written(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / "text.json").write_text("{")
    claim_folder(config_at(tmp_path), TEXT).release()
    assert json.loads((tmp_path / "text.json").read_text())["digest"] == "abc"


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--out .*/file/run: cannot write there: Not a dir"):
        claim_folder(config_at(tmp_path / "file" / "run"), TEXT)
    with pytest.raises(UsageError, match=r"--out .*/file: cannot write there: File exists"):
        claim_folder(config_at(tmp_path / "file"), TEXT)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()  # root may write anywhere, but not into a folder
    with pytest.raises(UsageError, match="cannot write there: Is a directory"):
        claim_folder(config_at(tmp_path), TEXT)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    first = claim_folder(config_at(tmp_path), TEXT)
    with pytest.raises(UsageError, match="a run is going on in this folder"):
        claim_folder(config_at(tmp_path), TEXT)
    first.release()
    claim_folder(config_at(tmp_path), TEXT).release()
