"""From a configuration to a finished run: alone, as the starter of ranks, or as one of them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from shard_ckpt import Checkpointer
from shard_comm import SoloComm, comm_for
from shard_train._borrow import silenced
from shard_train._config import Config, check_config, resolve
from shard_train._folder import RunFolder, claim_folder
from shard_train._launch import RankFailure, launch_ranks
from shard_train._screen import shown_path
from shard_train._stop import LAUNCHED, was_stopped
from shard_train._text import read_text
from shard_train._train import train


def start(config: Config) -> int:
    """Run a configuration to its end.

    Under torchrun this process is one of the ranks. Otherwise it is the only rank, or it
    checks everything and then starts the ranks.

    Args:
        config: As given by flags and files.

    Returns:
        The exit status: 0, 1 where a rank failed, 128 and the signal's number where a signal
        ended the run.

    Raises:
        UsageError: What was asked for cannot be done.

    **Collective**: under torchrun, all ranks.
    """
    config = resolve(config)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # Recorded: an error reaches the process that started the ranks.
        status = record(_as_rank)(config)
        assert status is not None
        return status
    check_config(config)
    if config.run.ranks == 1:
        status = train(config, comm=SoloComm())
    else:
        claim_folder(config, read_text(config.data)).release()
        try:
            status = launch_ranks(config)
        except RankFailure as failure:
            _say(f"{failure}. {_last_step(config)}")
            return 1
    _say_if_stopped(status, config)
    return status


def _as_rank(config: Config) -> int:
    config = replace(config, run=replace(config.run, ranks=int(os.environ["WORLD_SIZE"])))
    check_config(config)
    dist.init_process_group("gloo")
    # On an error the group is left as it is: the process is about to end, and that is what
    # tells the other ranks.
    status = train(config, comm=comm_for())
    if LAUNCHED not in os.environ and dist.get_rank() == 0:
        _say_if_stopped(status, config)
    dist.destroy_process_group()
    return status


def _say_if_stopped(status: int, config: Config) -> None:
    if was_stopped(status):
        _say(f"Stopped by {signal.Signals(status - 128).name}. {_last_step(config)}")


def _last_step(config: Config) -> str:
    folder = RunFolder.checkpoints_in(Path(config.run.out))
    checkpointer = Checkpointer(folder, comm=SoloComm())
    with silenced("shard_ckpt"):  # what there is to say of skipped steps the next start says
        step = checkpointer.latest()
    if step is None:
        return "No step was saved; the same command begins again."
    where = shown_path(checkpointer.path(step))
    return f"Step {step} is saved in {where}; the same command goes on from there."


def _say(text: str) -> None:
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
