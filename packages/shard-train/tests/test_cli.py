from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shard_train import Config, read_config
from shard_train import _start as start_module
from shard_train._cli import main
from shard_train._config import resolve
from shard_train._toml import to_toml


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"some text to learn from, again and again. " * 100)
    return path


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Record what would be run instead of running it."""
    started: list[Config] = []

    def record(config: Config, **comm: object) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(start_module, "launch_ranks", record)
    monkeypatch.setattr(start_module, "train", record)
    return started


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert "usage: shard" in capsys.readouterr().out


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    flags = (
        "--config --width --layers --heads --hidden --tied --precision --data --seq --batch "
        "--held-out --seed --lr --warmup --decay-steps --weight-decay --clip --steps --ranks "
        "--out --save-every --eval-every --log-every --keep --sample"
    )
    assert [flag for flag in flags.split() if f"{flag} " not in shown.replace(",", " ")] == []
    for default in ("256", "stdlib", "runs/default"):
        assert f"(default: {default})" in " ".join(shown.split())


def test_help_needs_no_torch() -> None:
    program = (
        "import sys; from shard_train._cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("False\n")


def test_flags_reach_the_configuration(text: Path, tmp_path: Path, no_ranks: list[Config]) -> None:
    out = tmp_path / "run"
    flags = f"train --data {text} --out {out} --width 64 --lr 1e-2 --tied --precision bf16"
    assert main([*flags.split(), "--save-every=7"]) == 0
    (config,) = no_ranks
    assert (config.model.width, config.model.tied, config.model.precision) == (64, True, "bf16")
    assert (config.optim.lr, config.run.save_every) == (0.01, 7)
    assert read_config(out / "config.toml") == config


def test_flags_go_before_the_file(text: Path, tmp_path: Path, no_ranks: list[Config]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[model]\nwidth = 64\ntied = true\n[data]\npath = '{text}'\n")
    out = str(tmp_path / "run")
    assert main(["train", "--out", out, "--config", str(path), "--no-tied", "--layers", "3"]) == 0
    (config,) = no_ranks
    assert (config.model.width, config.model.layers, config.model.tied) == (64, 3, False)
    assert config.data.path == str(text)


def test_configuration_beside_the_run_reads_back(
    text: Path, tmp_path: Path, no_ranks: list[Config]
) -> None:
    flags = ["train", "--data", str(text), "--out", str(tmp_path / "run"), "--lr", "0.1"]
    assert main(flags) == 0
    assert main(["train", "--config", str(tmp_path / "run" / "config.toml")]) == 0
    assert no_ranks[0] == no_ranks[1]


def corrupt(path: Path) -> str:
    path.write_text("[model]\nwidth = \n")
    return f"--config {path}"


def unknown_key(path: Path) -> str:
    path.write_text("[run]\nrank = 3\n")
    return f"--config {path}"


def empty_file(path: Path) -> str:
    path.touch()
    return f"--data {path}"


def file_as_folder(path: Path) -> str:
    path.touch()
    return f"--out {path}/run"


def foreign_folder(path: Path) -> str:
    path.mkdir()
    (path / "notes.md").touch()
    return f"--out {path}"


def other_run(path: Path) -> str:
    path.mkdir()
    (path / "config.toml").write_text(to_toml(resolve(Config())))
    return f"--out {path} --layers 9"


def damaged_run(path: Path) -> str:
    path.mkdir()
    (path / "config.toml").write_text("[model")
    return f"--out {path}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data /nowhere/at/all", "no such file or folder"),
        (empty_file, "expected text, got none"),
        ("--seq 5000", "--seq 5000: expected more than 5000 bytes"),
        ("--width 250", "--width 250: expected a multiple of --heads 4"),
        ("--width 12", "an even number of elements per head"),
        (other_run, "belongs to another configuration"),
        (damaged_run, "config.toml: expected TOML"),
        (foreign_folder, "it holds notes.md and no config.toml"),
        (file_as_folder, "cannot write there: Not a directory"),
        ("--ranks 3", "--batch 16: expected a multiple of the number of ranks, 3"),
        ("--ranks 32", "expected a multiple of the number of ranks, 32"),
        (unknown_key, "run.rank: unknown key"),
        (corrupt, "expected TOML, but"),
        ("--config /nowhere/c.toml", "/nowhere/c.toml: cannot read the configuration"),
        ("--steps 0", "--steps: expected a number above 0"),
        ("--steps -3", "--steps: expected a number above 0"),
        ("--lr -0.1", "--lr: expected a number above 0"),
        ("--lr nan", "--lr: expected a number above 0"),
    ],
)
def test_mistakes_get_one_line_before_any_rank_starts(
    flags: str | Callable[[Path], str],
    message: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    no_ranks: list[Config],
) -> None:
    given = flags if isinstance(flags, str) else flags(tmp_path / "made")
    usual = f"--data {text} --out {tmp_path / 'run'}"
    status = main(["train", *usual.split(), *given.split()])
    shown = capsys.readouterr()
    assert status == 2
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("shard: error: ")
    assert message in line
    assert no_ranks == []
    assert not (tmp_path / "run").exists()


def test_wrong_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in ((["--widht", "64"], "--widht"), (["--steps", "many"], "--steps")):
        with pytest.raises(SystemExit) as ended:
            main(["train", *arguments])
        assert ended.value.code == 2
        assert named in capsys.readouterr().err
    for arguments in ([], ["trian"], ["train", "--config"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_both_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trian"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "train,ckpt" in capsys.readouterr().err.replace(" ", "")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "{train,ckpt}" in capsys.readouterr().out


def test_under_torchrun_one_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start_module, "record", lambda function: function)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        assert main(["train", "--width", "250"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_checkpoint_commands_are_those_of_shard_ckpt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ckpt", "inspect", str(tmp_path / "none")]) == 2
    line = f"shard ckpt: error: {tmp_path / 'none'}: no such checkpoint\n"
    assert capsys.readouterr().err == line
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", "--help"])
    assert ended.value.code == 0
    assert "usage: shard ckpt" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "shard ckpt --help" in capsys.readouterr().out
