"""What the user sees while a run goes on."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

_PIECES = "{task.fields[loss]}  {task.fields[speed]}  {task.fields[memory]}"


@dataclass(frozen=True)
class StepView:
    """One step in numbers.

    Attributes:
        step: Number of the step, from 1.
        loss: Mean loss over all ranks, nats per byte.
        tokens_per_s: Bytes learned from per second, all ranks together.
        memory_bytes: Memory held by the rank that holds the most.
        left_s: Seconds left, as far as one can tell.
    """

    step: int
    loss: float
    tokens_per_s: float
    memory_bytes: int
    left_s: float


class Screen:
    """A live line on a terminal, plain lines at intervals elsewhere.

    Args:
        console: Where to write. A quiet one makes a quiet screen, for all ranks but one.
        steps: Steps in all.
        log_every: Steps between plain lines.
    """

    def __init__(self, console: Console, *, steps: int, log_every: int) -> None:
        self._console = console
        self._steps = steps
        self._log_every = log_every
        self._progress: Progress | None = None

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn(_PIECES),
                TextColumn("{task.fields[left]} left"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            blank: dict[str, Any] = {"loss": "", "speed": "", "memory": "", "left": "-"}
            self._task = self._progress.add_task("", total=self._steps, **blank)
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def line(self, text: str) -> None:
        """Print one line, above the live one.

        Args:
            text: Printed as it is.

        **Collective**: local.
        """
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, view: StepView) -> None:
        """Show a step: always on a terminal, every so many steps and the last one elsewhere.

        Args:
            view: The step.

        **Collective**: local.
        """
        pieces: dict[str, Any] = {
            "loss": f"loss {view.loss:.3f}",
            "speed": f"{view.tokens_per_s:,.0f} tokens/s",
            "memory": f"{view.memory_bytes / 1e6:,.0f} MB per rank",
            "left": clock(view.left_s),
        }
        if self._progress is not None:
            self._progress.update(self._task, completed=view.step, refresh=True, **pieces)
        elif view.step % self._log_every == 0 or view.step == self._steps:
            self.line(
                f"step {view.step}/{self._steps}  {pieces['loss']}  {pieces['speed']}  "
                f"{pieces['memory']}  {pieces['left']} left"
            )


class _ScreenHandler(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__(logging.WARNING)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        self._screen.line(record.getMessage())


@contextmanager
def shown_warnings(screen: Screen) -> Iterator[None]:
    """Show what the checkpoint package warns of, such as a step that it skips.

    Args:
        screen: Where to show it; a quiet one keeps it back.

    Yields:
        Nothing; warnings are shown until the block ends.

    **Collective**: local.
    """
    logger = logging.getLogger("shard_ckpt")
    handler = _ScreenHandler(screen)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def console_for(rank: int) -> Console:
    """Return the console of a rank; all but the first are quiet.

    Args:
        rank: The rank.

    Returns:
        A console on the standard output.

    **Collective**: local.
    """
    if rank == 0:
        return Console()
    return Console(quiet=True, force_terminal=False)


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    Args:
        seconds: A duration of 0 or more.

    Returns:
        Such as ``1:05`` or ``2:00:00``.

    **Collective**: local.
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as the user would write it.

    Args:
        path: An absolute path.

    Returns:
        The path from the working directory where it is below it.

    **Collective**: local.
    """
    relative = os.path.relpath(path)
    return os.fspath(path) if relative.startswith(os.pardir) else relative
