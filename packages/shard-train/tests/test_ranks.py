"""Real ranks: started by the command, killed, stopped, and gone on with elsewhere."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shard_train._cli import main
from shard_train._metrics import read_metrics

TINY = "--width 16 --layers 2 --heads 2 --seq 16 --batch 4 --held-out 9 --log-every 1 --sample 8"
LONG = "--steps 1000000 --decay-steps 20 --save-every 3"


class Running:
    """The command in a process of its own."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self.lines: list[str] = []

    def until_step(self, step: int) -> None:
        """Read until a step at or after the given one has been shown."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            shown = re.match(r"step (\d+)/\d+  loss", line)
            if shown and int(shown[1]) >= step:
                return
        raise AssertionError(f"ended early: {''.join(self.lines)}{self._process.communicate()[1]}")

    def end(self) -> tuple[int, str, str]:
        """Wait; return the exit status, what was shown since, and the errors."""
        out, err = self._process.communicate(timeout=60)
        return self._process.returncode, out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def pid_of_rank(self, rank: int) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        wanted = f"RANK={rank}".encode()
        for child in children:
            if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return int(child)
        raise AssertionError(f"rank {rank} is not among {children}")


@contextmanager
def deadline(limit_s: int) -> Iterator[None]:
    def give_up(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"waited for {limit_s} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_bytes(b"def f(x):\n    return x + 1\n\n" * 100)
    return tmp_path


def shard(flags: str, folder: Path) -> Running:
    program = [sys.executable, "-m", "shard_train", "train", "--data", "text.txt", "--out", "run"]
    return Running([*program, *TINY.split(), *flags.split()], folder)


def steps_of(folder: Path, key: str) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for entry in read_metrics(folder / "run" / "metrics.jsonl"):
        if key in entry:
            assert entry["step"] not in found
            found[entry["step"]] = entry[key]
    return found


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds ranks through /proc")
def test_killed_stopped_and_gone_on_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rank is killed: one line, and the other rank ends too.
    running = shard(LONG, folder)
    running.until_step(4)
    os.kill(running.pid_of_rank(1), signal.SIGKILL)
    status, _, err = running.end()
    assert status == 1
    (line,) = err.splitlines()
    killed = re.match(
        r"rank 1 was killed by SIGKILL\. Step (\d+) is saved in run/checkpoints", line
    )
    assert killed is not None
    saved = int(killed[1])
    assert saved % 3 == 0

    # Started again it goes on from there; a signal saves the step it is at.
    running = shard(LONG, folder)
    running.until_step(saved + 2)
    assert f"Going on from step {saved}.\n" in running.lines
    os.kill(running.pid, signal.SIGTERM)
    status, _, err = running.end()
    assert status == 128 + signal.SIGTERM
    (line,) = err.splitlines()
    stopped = re.match(r"Stopped by SIGTERM\. Step (\d+) is saved in run/checkpoints", line)
    assert stopped is not None
    step = int(stopped[1])
    assert step >= saved + 2

    # One rank goes on with what two began, and no step is missing or there twice.
    monkeypatch.chdir(folder)
    flags = f"--ranks 1 --steps {step + 3} --decay-steps 20"
    where = "train --data text.txt --out run"
    assert main([*where.split(), *TINY.split(), *flags.split()]) == 0
    assert list(steps_of(folder, "loss")) == list(range(1, step + 4))


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds ranks through /proc")
def test_ranks_end_with_the_process_that_started_them(folder: Path) -> None:
    running = shard(LONG, folder)
    running.until_step(1)
    running.kill()
    with (folder / "run" / ".lock").open("w") as lock, deadline(60):
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by rank 0 for as long as it lives
    last = list(steps_of(folder, "loss"))[-1]
    assert (folder / "run" / "checkpoints" / f"step-{last:08}").exists()


def test_under_torchrun_as_in_one_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = "--steps 6 --eval-every 3"
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2 -m shard_train train"
    program = [sys.executable, *torchrun.split(), "--data", "text.txt", "--out", "run"]
    status, out, err = Running([*program, *TINY.split(), *flags.split()], folder).end()
    assert status == 0, err
    assert "step 6/6  loss" in out
    assert out.count("Held-out loss from") == 1
    two = steps_of(folder, "loss"), steps_of(folder, "held_out_loss")

    (folder / "run").rename(folder / "two")
    monkeypatch.chdir(folder)
    where = "train --data text.txt --out run --ranks 1"
    assert main([*where.split(), *TINY.split(), *flags.split()]) == 0
    one = steps_of(folder, "loss"), steps_of(folder, "held_out_loss")
    # The same batches; only the order of summation within a step differs.
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    assert two[1] == pytest.approx(one[1], rel=1e-5)
    # Before the first step the weights are the same, and so are the bits.
    assert two[1][0] == one[1][0]
