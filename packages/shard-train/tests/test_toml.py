from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shard_train import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    UsageError,
    read_config,
)
from shard_train._toml import from_toml, to_toml

numbers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False)
strings = st.text(st.characters(codec="utf-8"))
configs = st.builds(
    Config,
    st.builds(ModelConfig, width=numbers, tied=st.booleans(), precision=st.sampled_from(["bf16"])),
    st.builds(DataConfig, path=strings, seed=numbers),
    st.builds(OptimConfig, lr=floats, clip=floats, warmup=numbers),
    st.builds(RunConfig, out=strings, keep=numbers),
)


@given(configs)
def test_round_trip(config: Config) -> None:
    assert from_toml(to_toml(config)) == config


def test_what_is_left_out_has_its_default() -> None:
    assert from_toml("[optim]\nlr = 1\n") == replace(Config(), optim=OptimConfig(lr=1.0))
    assert from_toml("") == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model\n", "expected TOML, but expected"),
        ("[modle]\n", "modle: unknown table; known here are data, model, optim, run"),
        ("lr = 1\n", "lr: unknown table"),
        ("model = 3\n", "model: expected a table, got 3"),
        ("[optim]\nlearning_rate = 1\n", r"optim\.learning_rate: unknown key; .* clip, .* lr, "),
        ("[model]\nwidth = 2.5\n", r"model\.width: expected a whole number, got 2\.5"),
        ("[model]\nwidth = true\n", r"model\.width: expected a whole number, got True"),
        ("[model]\ntied = 1\n", r"model\.tied: expected true or false, got 1"),
        ("[optim]\nlr = 'fast'\n", r"optim\.lr: expected a number, got 'fast'"),
        ("[data]\npath = 3\n", r"data\.path: expected a string, got 3"),
        ("[model]\nprecision = 'fp8'\n", r"model\.precision: expected fp32 or bf16, got 'fp8'"),
        ("[model]\nprecision = []\n", r"model\.precision: expected fp32 or bf16, got \[\]"),
    ],
)
def test_what_does_not_belong(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_toml(text)


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot read .*: No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"bytes\.toml: .* no UTF-8"):
        read_config(tmp_path / "bytes.toml")


def test_errors_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[run]\nstep = 3\n")
    with pytest.raises(UsageError, match=r"c\.toml: run\.step: unknown key"):
        read_config(tmp_path / "c.toml")
