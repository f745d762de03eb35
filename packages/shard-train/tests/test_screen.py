from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.console import Console

from shard_train._screen import Screen, StepView, clock, console_for, shown_path, shown_warnings


def view(step: int) -> StepView:
    return StepView(step, loss=2.5, tokens_per_s=5123.4, memory_bytes=412_000_000, left_s=65)


def test_plain_lines_at_intervals_and_at_the_end() -> None:
    out = io.StringIO()
    with Screen(Console(file=out), steps=7, log_every=3) as screen:
        for step in range(1, 8):
            screen.show(view(step))
    assert out.getvalue().splitlines() == [
        f"step {step}/7  loss 2.500  5,123 tokens/s  412 MB per rank  1:05 left"
        for step in (3, 6, 7)
    ]


def test_live_line_shows_every_step() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Screen(console, steps=7, log_every=3) as screen:
        screen.show(view(1))
        shown = out.getvalue()
        for piece in ("1/7", "loss 2.500", "5,123 tokens/s", "412 MB per rank", "1:05 left"):
            assert piece in shown
        screen.show(view(2))
        assert "2/7" in out.getvalue()


def test_live_line_fits_a_narrow_terminal() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Screen(console, steps=12000, log_every=3) as screen:
        screen.show(view(11999))
        assert "step 11999/12000" in out.getvalue()
        assert "1:05 left" in out.getvalue()


def test_lines_are_printed_as_they_are() -> None:
    out = io.StringIO()
    line = "def f(x): return x[0], '[bold]' " + "x" * 100
    Screen(Console(file=out, width=40), steps=1, log_every=1).line(line)
    assert out.getvalue() == line + "\n"


def test_warnings_about_checkpoints_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("shard_ckpt")
    for rank in (0, 1):
        screen = Screen(console_for(rank), steps=1, log_every=1)
        with shown_warnings(screen):
            logger.info("not this")
            logger.warning("step %d: skipped", rank)
    shown = capsys.readouterr()
    assert shown.out == "step 0: skipped\n"
    assert shown.err == ""
    assert logger.handlers == []


def test_only_the_first_rank_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1, 2):
        with Screen(console_for(rank), steps=1, log_every=1) as screen:
            screen.line(f"rank {rank}")
            screen.show(view(1))
    assert capsys.readouterr().out.splitlines() == [
        "rank 0",
        "step 1/1  loss 2.500  5,123 tokens/s  412 MB per rank  1:05 left",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.6, "1:00:00"), (36061, "10:01:01")],
)
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_shown_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert shown_path(tmp_path / "runs" / "a") == str(Path("runs", "a"))
    assert shown_path(tmp_path.parent) == str(tmp_path.parent)
