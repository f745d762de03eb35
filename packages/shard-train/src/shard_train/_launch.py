"""Starting the ranks on this machine, and saying in one line how they ended."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shard_train._borrow import borrowed_environ, borrowed_handlers, silenced
from shard_train._config import Config
from shard_train._errors import UsageError
from shard_train._screen import shown_path
from shard_train._stop import LAUNCHED, is_ignored, was_stopped

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class RankFailure(RuntimeError):
    """A rank ended with an error or was killed; the message is one line."""


def launch_ranks(config: Config) -> int:
    """Start the ranks, wait for them, and pass signals on.

    Rank 0 writes to this process's standard output. What the ranks write to their standard
    error goes to files in the run folder, so that one failing rank does not bury its reason
    under what the others say about it.

    Args:
        config: A checked configuration whose run folder holds it as ``config.toml``.

    Returns:
        0, or 128 and the number of the signal that stopped the run.

    Raises:
        RankFailure: A rank failed or was killed.
        UsageError: The ranks found that what was asked for cannot be done.

    **Collective**: local; it starts the ranks.
    """
    out = Path(config.run.out)
    program = ("-m", "shard_train", "train", "--config", str(out / "config.toml"))
    # Elastic takes the signals over and reports each of them, and each failed process, in
    # several lines of its own.
    with borrowed_environ(), borrowed_handlers(_PASSED_ON), silenced("torch.distributed.elastic"):
        os.environ[LAUNCHED] = "1"
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the machine's cores
        try:
            elastic_launch(_settings(config.run.ranks, out), sys.executable)(*program)
        except SignalException as stopped:
            return 128 + int(stopped.sigval)
        except ChildFailedError as failed:
            return explain(failed.failures, out)
    return 0


def _settings(ranks: int, out: Path) -> LaunchConfig:
    others = dict.fromkeys(range(1, ranks), Std.ALL)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        run_id=uuid.uuid4().hex[:8],
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(out / "logs"), redirects={0: Std.ERR, **others}),
        local_addr="localhost",
        signals_to_handle=",".join(number.name for number in _PASSED_ON if not is_ignored(number)),
    )


def explain(failures: dict[int, ProcessFailure], out: Path) -> int:
    """Find the rank that is to blame and say what happened to it.

    Args:
        failures: Ranks that did not end well.
        out: The run folder.

    Returns:
        128 and the signal's number where a signal sent to a rank stopped all of them.

    Raises:
        RankFailure: A rank failed or was killed.
        UsageError: The ranks found that what was asked for cannot be done.

    **Collective**: local.
    """
    rank = min(failures, key=lambda rank: (_blame(failures[rank]), failures[rank].timestamp))
    failure = failures[rank]
    if was_stopped(failure.exitcode):
        return failure.exitcode
    if failure.exitcode < 0:
        raise RankFailure(f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}")
    kind, _, message = _message(failure).partition(": ")
    if kind == UsageError.__name__:
        raise UsageError(message)
    what = f"{kind}: {message}".splitlines()[0] if message else f"exit status {failure.exitcode}"
    raise RankFailure(f"rank {rank} failed: {what}; its output is in {shown_path(out / 'logs')}")


def _blame(failure: ProcessFailure) -> int:
    """Order failures by how much they explain: a kill, an error, the loss of a peer."""
    if failure.exitcode == -signal.SIGTERM or was_stopped(failure.exitcode):
        return 2  # the launcher ends ranks that are left over
    if failure.exitcode < 0:
        return 0
    return 2 if "failed on rank" in _message(failure) else 1


def _message(failure: ProcessFailure) -> str:
    recorded = failure.error_file_data.get("message", "")
    message = recorded.get("message", "") if isinstance(recorded, dict) else recorded
    return str(message)
