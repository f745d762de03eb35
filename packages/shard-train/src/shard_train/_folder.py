"""The run folder: whose it is, and that one run at a time uses it."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from shard_train._config import Config, flag
from shard_train._errors import UsageError
from shard_train._files import write_atomically
from shard_train._text import Text
from shard_train._toml import read_config, to_toml

_LOCK = ".lock"
_TEXT = "text.json"


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run is.

    Attributes:
        path: The folder.
        lock: Held open for as long as the run goes on.
    """

    path: Path
    lock: TextIO

    @staticmethod
    def checkpoints_in(path: Path) -> Path:
        """Return the folder of the checkpoints.

        Args:
            path: A run folder.

        Returns:
            A folder in it.

        **Collective**: local.
        """
        return path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The record of the run."""
        return self.path / "metrics.jsonl"

    def release(self) -> None:
        """Let another run use the folder.

        **Collective**: local.
        """
        self.lock.close()


def claim_folder(config: Config, text: Text) -> RunFolder:
    """Take a run folder, or make one.

    A folder belongs to the tables ``model``, ``data`` and ``optim`` of the configuration that
    it was made with, and to the text that it was made from. It is taken only for those. The
    table ``run`` may change; ``config.toml`` in the folder says what was asked for last.

    Args:
        config: A resolved configuration.
        text: The text of the run.

    Returns:
        The folder, locked.

    Raises:
        UsageError: The folder cannot be made or written, belongs to something else, or is in
            use.

    **Collective**: local; one process.
    """
    path = Path(config.run.out)
    folder = RunFolder(path, _take_lock(path))
    try:
        _check_owner(path, config, text)
        write_atomically(path / _TEXT, json.dumps(_facts(text), indent=2) + "\n")
        write_atomically(path / "config.toml", to_toml(config))
    except OSError as error:
        folder.release()
        raise _unwritable(path, error) from error
    except UsageError:
        folder.release()
        raise
    return folder


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"--out {path}: cannot write there: {error.strerror}")


def _take_lock(path: Path) -> TextIO:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("w", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UsageError(
            f"--out {path}: a run is going on in this folder; wait for it, end it, or choose "
            "another folder"
        ) from None
    return lock


def _facts(text: Text) -> dict[str, Any]:
    return {
        "digest": text.digest,
        "train_bytes": len(text.train),
        "held_out_bytes": len(text.held_out),
    }


def _check_owner(path: Path, config: Config, text: Text) -> None:
    made_with = path / "config.toml"
    if not made_with.exists():
        found = sorted({entry.name for entry in path.iterdir()} - {_LOCK, _TEXT})
        if found:
            raise UsageError(
                f"--out {path}: expected a run folder or an empty one, but it holds {found[0]} "
                "and no config.toml; choose another folder"
            )
        return
    before, now = read_config(made_with).identity, config.identity
    changed = [key for key in now if before[key] != now[key]]
    if changed:
        listing = ", ".join(f"{key} ({before[key]} there, {now[key]} now)" for key in changed)
        raise UsageError(
            f"--out {path}: this folder belongs to another configuration: {listing}; choose "
            f"another folder, or go on as it was with --config {made_with}"
        )
    _check_text(path, config, text)


def _check_text(path: Path, config: Config, text: Text) -> None:
    try:
        before = json.loads((path / _TEXT).read_text(encoding="utf-8"))["digest"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path / _TEXT}: cannot be read ({error}); choose another --out"
        ) from error
    if before != text.digest:
        raise UsageError(
            f"--out {path}: the text of {flag('path')} {config.data.path} has changed since this "
            "run began; choose another folder"
        )
