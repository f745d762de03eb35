from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer
from shard_train import _train, read_config
from shard_train._cli import main
from shard_train._data import draw_batch
from shard_train._metrics import read_metrics

TINY = "--width 16 --layers 2 --heads 2 --seq 16 --batch 4 --held-out 9 --warmup 2 --ranks 1"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(b"def f(x):\n    return x + 1\n\n" * 100)
    return path


@pytest.fixture
def run(text: Path, tmp_path: Path) -> Callable[..., int]:
    def run(folder: str, flags: str) -> int:
        where = f"--data {text} --out {tmp_path / folder}"
        return main(["train", *TINY.split(), *where.split(), *flags.split()])

    return run


def record(folder: Path) -> dict[tuple[int, str], float]:
    """The losses of a run by step and kind; a step that comes twice fails."""
    found: dict[tuple[int, str], float] = {}
    for entry in read_metrics(folder / "metrics.jsonl"):
        kind = "held_out_loss" if "held_out_loss" in entry else "loss"
        assert (entry["step"], kind) not in found
        found[entry["step"], kind] = entry[kind]
    return found


def at_step(step: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def draw_and_act(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs["step"] == step:
            act()
        return draw_batch(*args, **kwargs)

    monkeypatch.setattr(_train, "draw_batch", draw_and_act)


def test_a_run_from_end_to_end(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--steps 40 --lr 0.02 --eval-every 15 --save-every 9 --keep 2 --sample 12"
    assert run("a", flags) == 0
    out = tmp_path / "a"
    losses = record(out)
    assert [step for step, kind in losses if kind == "loss"] == list(range(1, 41))
    assert [step for step, kind in losses if kind == "held_out_loss"] == [0, 15, 30, 40]
    assert losses[0, "held_out_loss"] == pytest.approx(5.55, abs=0.2)
    assert losses[40, "held_out_loss"] < 3.5
    entry = next(e for e in read_metrics(out / "metrics.jsonl") if e["step"] == 1)
    assert entry["lr"] == pytest.approx(0.01)
    assert entry.keys() == {
        "step", "loss", "lr", "grad_norm", "tokens_per_s", "memory_bytes", "time",
    }  # fmt: skip
    steps = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert steps == ["step-00000036", "step-00000040"]
    assert read_config(out / "config.toml").run.steps == 40

    shown = capsys.readouterr()
    assert shown.err == ""
    first, last = (losses[step, "held_out_loss"] for step in (0, 40))
    assert f"Held-out loss from {first:.3f} to {last:.3f} nats per byte in 40 steps." in shown.out
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert sample.strip() in shown.out
    assert "step-00000040" in shown.out
    assert "step 40/40  loss" in shown.out


def test_resumed_run_is_the_same_run(run: Callable[..., int], tmp_path: Path) -> None:
    flags = "--decay-steps 8 --eval-every 3 --sample 0"
    assert run("whole", f"{flags} --steps 8") == 0
    assert run("parts", f"{flags} --steps 4") == 0
    assert run("parts", f"{flags} --steps 8") == 0
    whole, parts = record(tmp_path / "whole"), record(tmp_path / "parts")
    assert parts.pop((4, "held_out_loss")) > 0  # each part ends with an evaluation
    assert parts == whole


def test_finished_run_started_again_says_the_same(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("a", "--steps 3 --sample 8") == 0
    before, metrics = capsys.readouterr().out, record(tmp_path / "a")
    assert run("a", "--steps 3 --sample 8") == 0
    again = capsys.readouterr().out
    assert "Going on from step 3." in again
    assert again.splitlines()[-3:] == before.splitlines()[-3:]
    assert record(tmp_path / "a") == metrics


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_stops(
    number: signal.Signals,
    run: Callable[..., int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--steps 6 --sample 0"
    with monkeypatch.context() as patch:
        at_step(3, lambda: signal.raise_signal(number), patch)
        assert run("a", flags) == 128 + number
    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert line.startswith(f"Stopped by {number.name}. Step 3 is saved in ")
    assert "Held-out loss from" not in shown.out
    assert run("a", flags) == 0
    assert "Going on from step 3." in capsys.readouterr().out
    assert run("whole", flags) == 0
    assert record(tmp_path / "a") == record(tmp_path / "whole")


def test_steps_after_the_last_checkpoint_are_taken_again(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down() -> None:
        raise MemoryError

    flags = "--steps 6 --save-every 2 --eval-every 3 --sample 0"
    with monkeypatch.context() as patch:
        at_step(4, break_down, patch)
        with pytest.raises(MemoryError):
            run("a", flags)
    assert (3, "held_out_loss") in record(tmp_path / "a")
    assert run("a", flags) == 0
    assert run("whole", flags) == 0
    assert record(tmp_path / "a") == record(tmp_path / "whole")


def test_metrics_that_are_gone_are_no_obstacle(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("a", "--steps 3 --sample 0") == 0
    (tmp_path / "a" / "metrics.jsonl").unlink()
    assert run("a", "--steps 3 --sample 0") == 0
    assert list(record(tmp_path / "a")) == [(3, "held_out_loss")]


def test_skipped_checkpoint_is_explained(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("a", "--steps 3 --sample 0") == 0
    (tmp_path / "a" / "checkpoints" / "step-00000009").mkdir()
    assert run("a", "--steps 3 --sample 0") == 0
    shown = capsys.readouterr().out
    assert "step-00000009: skipped: " in shown
    assert "Going on from step 3." in shown


def test_damaged_checkpoint(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("a", "--steps 3 --sample 0") == 0
    damaged = next((tmp_path / "a" / "checkpoints").glob("*/model*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    capsys.readouterr()
    assert run("a", "--steps 3 --sample 0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the last checkpoint cannot be read" in line
    assert damaged.name in line


def test_checkpoint_that_cannot_be_written(
    run: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Checkpointer, "save", full)
    assert run("a", "--steps 3 --save-every 2 --sample 0") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 2 could not be saved" in line
    assert "No space left on device" in line


def test_loss_that_is_no_number(
    run: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("a", "--steps 50 --lr 1e30 --clip 1e30") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "shard: error: the loss of step" in line
    assert "lower --lr" in line


def test_bf16_learns(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("a", "--steps 20 --lr 0.02 --precision bf16 --sample 4") == 0
    losses = record(tmp_path / "a")
    assert losses[20, "held_out_loss"] < losses[0, "held_out_loss"] - 1


def test_tied_model_resumes(run: Callable[..., int], tmp_path: Path) -> None:
    flags = "--decay-steps 4 --tied --sample 0"
    assert run("whole", f"{flags} --steps 4") == 0
    assert run("parts", f"{flags} --steps 2") == 0
    assert run("parts", f"{flags} --steps 4") == 0
    whole, parts = record(tmp_path / "whole"), record(tmp_path / "parts")
    assert parts[4, "held_out_loss"] == whole[4, "held_out_loss"]
