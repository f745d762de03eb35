"""The command ``shard``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro
from rich.console import Console

from shard_train._config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from shard_train._errors import UsageError
from shard_train._run import run
from shard_train._toml import read_config

_DESCRIPTION = "Fully sharded training for PyTorch."


@dataclass(frozen=True)
class TrainCommand:
    """Train a byte-level decoder on text, sharded over ranks.

    Without flags it learns from the Python standard library's own source, on two ranks, for
    a minute or two. Started again on the same run folder it goes on from the last checkpoint.

    Attributes:
        model: The decoder.
        data: The text.
        optim: The optimizer.
        run: The run.
        config: A TOML file with settings, such as the config.toml of a run folder; flags go
            before it.
    """

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    config: str | None = None


@dataclass(frozen=True)
class CheckpointCommand:
    """List, check, compare and convert checkpoints.

    For its own commands see ``shard ckpt --help``.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments after the command's name; those of the process if None.

    Returns:
        The exit status: 0, 2 for a mistake in what was asked, 1 for a rank that failed, 128
        and the signal's number for a run that a signal ended. Of ``shard ckpt``: 1 where it
        found problems or differences.

    Raises:
        SystemExit: Help was asked for, or a flag is wrong.

    **Collective**: under torchrun, all ranks.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["ckpt"]:
        return _checkpoints(arguments[1:])
    try:
        command = _parse(arguments)
        return run(Config(command.model, command.data, command.optim, command.run))
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0":  # under torchrun one rank speaks for all
            line = f"shard: error: {error}"
            Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _checkpoints(arguments: list[str]) -> int:
    from shard_ckpt import main as run_command  # imports torch, which help can do without

    return run_command(arguments, prog="shard ckpt")


def _parse(arguments: list[str]) -> TrainCommand:
    base = _from_file(arguments)
    default = TrainCommand(base.model, base.data, base.optim, base.run)
    train = Annotated[TrainCommand, tyro.conf.subcommand("train", default=default)]
    # What follows `shard ckpt` is parsed by shard-ckpt; here the command has a name to be listed.
    commands: Any = train | Annotated[CheckpointCommand, tyro.conf.subcommand("ckpt")]
    parsed = tyro.cli(
        commands,
        prog="shard",
        description=_DESCRIPTION,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    assert isinstance(parsed, TrainCommand)
    return parsed


def _from_file(arguments: list[str]) -> Config:
    # The file gives the defaults of all other flags, so it is read before they are.
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    try:
        found, _ = first.parse_known_args(arguments)
    except argparse.ArgumentError:
        return Config()  # `--config` without a value: the full parser says so
    return read_config(found.config) if found.config is not None else Config()
