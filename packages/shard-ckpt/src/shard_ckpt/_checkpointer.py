"""A folder of checkpoints, one per step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shard_ckpt._agree import agree, attempt
from shard_ckpt._async import Saver
from shard_ckpt._draft import discard, draft_is_live, is_draft
from shard_ckpt._errors import CheckpointError
from shard_ckpt._load import load
from shard_ckpt._log import logger
from shard_ckpt._marker import read_marker
from shard_ckpt._naming import Rename
from shard_ckpt._places import Place, absolute, names_in, place_of
from shard_ckpt._remote import RemotePath
from shard_ckpt._remote_draft import discard_remote
from shard_ckpt._save import save
from shard_comm import Comm

_STEP = re.compile(r"step-(\d{8}|[1-9]\d{8,})", re.ASCII)  # as steps are spelled, no other way


class Checkpointer:
    """Saves under ``step-00000120`` and so on, keeps the newest, and finds the newest to resume.

    Only folders with a readable ``COMMITTED`` marker count. Others that look like a step are left
    alone, and a warning says why, once per folder.

    Args:
        dir: the folder that holds the steps, or its URL; made by the first save.
        comm: the ranks that save and load.
        keep: after a save, remove committed steps but the newest ``keep``; None keeps all. The
            step just saved always stays.
        every: save only steps that this number divides; None saves every step it is given.
        async_: ``save`` copies the state and returns; see ``save_async``. Call ``wait`` at the end
            of training.
        timeout_s: how long a rank waits for the slowest one, as for ``save`` and ``load``.

    Raises:
        ValueError: ``keep`` or ``every`` is less than 1.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str],
        *,
        comm: Comm,
        keep: int | None = None,
        every: int | None = None,
        async_: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep: expected at least 1, or None for all, got {keep}")
        if every is not None and every < 1:
            raise ValueError(f"every: expected at least 1, or None for all, got {every}")
        self._dir = place_of(absolute(dir))
        self._comm = comm
        self._keep = keep
        self._every = every
        self._async = async_
        self._saver: Saver | None = None
        self._timeout_s = timeout_s
        self._reported: set[str] = set()

    def path(self, step: int) -> Path:
        """Return the folder of a step, whether or not it exists. Local.

        Raises:
            ValueError: no step, or the folders are behind a URL: see ``location``.
        """
        place = self._place(step)
        if isinstance(place, RemotePath):
            raise ValueError(f"{place}: is no path of this system; use location()")
        return place

    def location(self, step: int) -> str:
        """Return the folder or URL of a step, whether or not it exists. Local."""
        return str(self._place(step))

    def due(self, step: int) -> bool:
        """Whether ``save`` would save this step, for states that are costly to collect. Local."""
        self._place(step)
        return self._every is None or step % self._every == 0

    def save(self, step: int, state: Mapping[str, Any], *, rename: Rename | None = None) -> bool:
        """Save a step if it is due, then remove what is over ``keep``; see ``save``.

        A removal that fails is logged, as the new step is safe by then.

        Args:
            step: its number.
            state: as for ``save``.
            rename: as for ``save``.

        Returns:
            Whether the step was due. With ``async_`` it is being saved then.

        Raises:
            FileExistsError: the step is there already.
            Exception: as for ``save``; with ``async_`` as for ``save_async``.

        **Collective**: all ranks of the comm.
        """
        if not self.due(step):
            return False
        if self._async:
            if self._saver is None:
                self._saver = Saver(self._comm)
            self._saver.start(
                state,
                self.location(step),
                rename=rename,
                timeout_s=self._timeout_s,
                after=lambda: self._retire(step),
            )
        else:
            where = self.location(step)
            save(state, where, comm=self._comm, rename=rename, timeout_s=self._timeout_s)
            self._retire(step)
        return True

    def wait(self) -> None:
        """Return when the last save is published; raise its error. Local."""
        if self._saver is not None:
            self._saver.wait()

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first. Local."""
        names: list[str] = []
        while True:
            before, names = names, self._names()
            found = self._committed(names)
            if found or names == before:
                return found  # else a save may have published one and removed all that were listed

    def latest(self) -> int | None:
        """Return the newest committed step; None if there is none. Local."""
        return max(self.steps(), default=None)

    def restore(
        self,
        state: Mapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        cast: bool = False,
        rename: Rename | None = None,
        only: Sequence[str] | None = None,
    ) -> tuple[int, dict[str, Any]] | None:
        """Load a step, by default the newest committed one as rank 0 sees it; see ``load``.

        A save under way is waited for first.

        Args:
            state: the template.
            step: which step.
            strict: as for ``load``.
            cast: as for ``load``.
            rename: as for ``load``.
            only: as for ``load``.

        Returns:
            The step and what ``load`` returns; None, with ``state`` untouched, if there is no
            committed step.

        Raises:
            Exception: as for ``load``. A step that is committed but damaged is an error: ask for
                an earlier one by ``step``.

        **Collective**: all ranks of the comm.
        """
        chosen = attempt(lambda: self._choose(step))  # waits for a save under way
        choice = agree(self._comm, chosen, share=lambda number: number, timeout_s=self._timeout_s)[
            0
        ]
        if choice is None:
            return None
        loaded = load(
            state,
            self.location(choice),
            comm=self._comm,
            strict=strict,
            cast=cast,
            rename=rename,
            only=only,
            timeout_s=self._timeout_s,
        )
        return choice, loaded

    def _names(self) -> list[str]:
        try:
            return names_in(self._dir)
        except FileNotFoundError:
            return []

    def _committed(self, names: Sequence[str]) -> list[int]:
        found = []
        for name in names:
            reason = why_not_committed(self._dir / name)
            matched = _STEP.fullmatch(name)
            if reason is not None:
                self._report(name, reason)
            elif matched is not None:
                found.append(int(matched[1]))
        return sorted(found)

    def _place(self, step: int) -> Place:
        if type(step) is not int or step < 0:
            raise ValueError(f"step: expected an int of at least 0, got {step!r}")
        return self._dir / f"step-{step:08d}"

    def _choose(self, step: int | None) -> int | None:
        self.wait()
        if step is not None:
            self._place(step)
            return step
        return self.latest() if self._comm.rank == 0 else None

    def _retire(self, saved: int) -> None:
        if self._keep is None or self._comm.rank != 0:
            return
        for step in self.steps()[: -self._keep]:
            if step == saved:
                continue
            try:
                remove_checkpoint(self._place(step))
            except OSError as exc:
                logger.warning("%s: could not be removed (%s)", self.location(step), exc)

    def _report(self, name: str, reason: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            logger.warning("%s: skipped: %s", self._dir / name, reason)


def why_not_committed(path: Place) -> str | None:
    """Return why a folder that looks like a step does not count; None if it does, or not. Local."""
    if is_draft(path.name) and isinstance(path, Path):
        if not path.is_dir():
            return None
        live = draft_is_live(path)
        return "a save is writing it" if live else "left by a save or removal that was cut off"
    if _STEP.fullmatch(path.name) is None:
        return None
    try:
        read_marker(path)
    except (CheckpointError, OSError) as exc:
        return str(exc)
    return None


def remove_checkpoint(place: Place) -> None:
    """Take a checkpoint back: first the marker, then the data. Local.

    Raises:
        OSError: the marker could not be removed.
    """
    if isinstance(place, RemotePath):
        discard_remote(place)
    else:
        discard(place)
