"""One rank's part of a run."""

from __future__ import annotations

import math
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shard_ckpt import Checkpointer, CheckpointError
from shard_comm import Comm
from shard_optim import clip_grad_norm_
from shard_train._agree import Exchange, agree, exchange
from shard_train._build import make_optimizer, sharded_model
from shard_train._config import Config
from shard_train._data import as_tensor, draw_batch, held_out_sequences
from shard_train._errors import UsageError
from shard_train._evaluate import byte_losses, held_out_loss
from shard_train._folder import RunFolder
from shard_train._metrics import MetricsLog, read_metrics
from shard_train._sample import generate
from shard_train._schedule import learning_rate
from shard_train._screen import Screen, StepView, console_for, shown_path, shown_warnings
from shard_train._seed import generator_for
from shard_train._stop import StopFlag
from shard_train._text import Text

_PROMPT = b"def "
_TIMED_STEPS = 20


def train(config: Config, *, comm: Comm) -> int:
    """Train, from where the run folder is, to the last step or a signal.

    Args:
        config: A resolved and checked configuration.
        comm: The ranks.

    Returns:
        0, or 128 and the number of the signal that ended the run; the same on all ranks.

    Raises:
        UsageError: What was asked for cannot be done; on all ranks.

    **Collective**: all ranks of ``comm``.
    **Memory**: the whole model while it is built; then this rank's share of parameters,
    gradients and optimizer state, the text, and what a step needs.
    """
    console = console_for(comm.rank)
    screen = Screen(console, steps=config.run.steps, log_every=config.run.log_every)
    with StopFlag() as stop, ExitStack() as held:
        held.enter_context(shown_warnings(screen))
        text, folder = agree(config, comm)
        if folder is not None:
            held.callback(folder.release)
        run = _Run(config, comm=comm, text=text, folder=folder, screen=screen)
        held.callback(run.close)
        with screen:
            number = run.go(stop)
        if not number:
            run.conclude()
    return 128 + number if number else 0


class _Run:
    """A run between its first and its last step, on one rank.

    Args:
        config: A resolved and checked configuration.
        comm: The ranks.
        text: What to learn from.
        folder: The run folder, on the first rank.
        screen: Where to show the run.
    """

    def __init__(
        self, config: Config, *, comm: Comm, text: Text, folder: RunFolder | None, screen: Screen
    ) -> None:
        self._config = config
        self._comm = comm
        self._screen = screen
        self._text = as_tensor(text.train)
        self._held_out = held_out_sequences(as_tensor(text.held_out), config.data)
        self._model = sharded_model(config, comm)
        self._optimizer = make_optimizer(self._model, config)
        out = Path(config.run.out)
        self._checkpointer = Checkpointer(
            RunFolder.checkpoints_in(out), comm=comm, keep=config.run.keep
        )
        self._step = self._saved = self._restore()
        self._log = MetricsLog(folder.metrics, after=self._step) if folder else None
        # One rank reads, so that all of them agree on what is left to evaluate.
        self._losses = comm.all_gather_object(_held_out_losses(folder) if folder else {})[0]
        self._timed: deque[float] = deque(maxlen=_TIMED_STEPS)
        self._introduce(text)

    def go(self, stop: StopFlag) -> int:
        """Take the steps that are left; return the number of the signal that ended them."""
        run = self._config.run
        if self._step not in self._losses and (self._step == 0 or self._step >= run.steps):
            self._evaluate()
        signal = 0
        while self._step < run.steps and not signal:
            signal = self._take_step(stop)
            last = self._step >= run.steps
            if last or self._step % run.eval_every == 0:
                self._evaluate()
            if last or signal or self._step % run.save_every == 0:
                self._save()
        return signal if self._step < run.steps else 0

    def conclude(self) -> None:
        """Say what came of the run."""
        data, run = self._config.data, self._config.run
        sample = b""
        if run.sample:
            sample = generate(
                self._model,
                _PROMPT,
                numel=run.sample,
                window=data.seq,
                generator=generator_for(data.seed, "sample", self._step),
            )
        if self._log is None:
            return
        steps = sorted(self._losses)
        first, last = self._losses[steps[0]], self._losses[steps[-1]]
        out = Path(run.out)
        if sample:
            shown = sample.decode("utf-8", "replace")
            (out / "sample.txt").write_text(shown + "\n", encoding="utf-8")
            self._screen.line(f"\nA sample, from the prompt {_PROMPT.decode()!r}:\n\n{shown}\n")
        self._screen.line(
            f"Held-out loss from {first:.3f} to {last:.3f} nats per byte in {self._step} steps."
        )
        checkpoint = shown_path(self._checkpointer.path(self._saved))
        self._screen.line(f"Checkpoint: {checkpoint}")
        self._screen.line(f"Metrics, configuration and sample: {shown_path(out)}")

    def close(self) -> None:
        """Close the record."""
        if self._log is not None:
            self._log.close()

    def _take_step(self, stop: StopFlag) -> int:
        began = time.perf_counter()
        config, comm, step = self._config, self._comm, self._step + 1
        rate = learning_rate(step, config.optim)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batch = draw_batch(self._text, config.data, step=step, rank=comm.rank, size=comm.size)
        loss = byte_losses(self._model, batch.to(comm.device)).mean()
        loss.backward()
        norm = clip_grad_norm_(self._model.parameters(), config.optim.clip)
        self._optimizer.step()
        self._optimizer.zero_grad()
        everyone = exchange(loss.detach(), stop.number, comm=comm)
        if not math.isfinite(everyone.loss):
            raise UsageError(
                f"the loss of step {step} is {everyone.loss}; begin again in another --out "
                "with a lower --lr"
            )
        self._step = step
        self._timed.append(time.perf_counter() - began)
        self._report(everyone, rate, float(norm))
        return everyone.signal

    def _report(self, everyone: Exchange, rate: float, norm: float) -> None:
        data = self._config.data
        step_s = sum(self._timed) / len(self._timed)
        view = StepView(
            step=self._step,
            loss=everyone.loss,
            tokens_per_s=data.batch * data.seq / step_s,
            memory_bytes=everyone.memory_bytes,
            left_s=step_s * (self._config.run.steps - self._step),
        )
        self._write(
            {
                "step": view.step,
                "loss": view.loss,
                "lr": rate,
                "grad_norm": norm,
                "tokens_per_s": round(view.tokens_per_s, 1),
                "memory_bytes": view.memory_bytes,
                "time": round(time.time(), 3),
            }
        )
        self._screen.show(view)

    def _evaluate(self) -> None:
        loss = held_out_loss(self._model, self._held_out, comm=self._comm)
        self._losses[self._step] = loss
        self._write({"step": self._step, "held_out_loss": loss, "time": round(time.time(), 3)})
        self._screen.line(f"step {self._step}/{self._config.run.steps}  held-out loss {loss:.3f}")

    def _write(self, entry: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(entry)

    def _save(self) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        try:
            self._checkpointer.save(self._step, state)
        except OSError as error:  # on all ranks
            raise UsageError(f"step {self._step} could not be saved: {error}") from error
        self._saved = self._step

    def _restore(self) -> int:
        slots = self._optimizer.state_dict(allocate=True)
        template = {"model": self._model.state_dict(), "optimizer": slots}
        try:
            found = self._checkpointer.restore(template)
        except (CheckpointError, OSError) as error:  # on all ranks
            raise UsageError(
                f"the last checkpoint cannot be read: {error}; remove its folder to go on from "
                "the one before"
            ) from error
        if found is None:
            return 0
        step, state = found
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return step

    def _introduce(self, text: Text) -> None:
        numel = sum(param.numel() for param in self._model.parameters())
        ranks = "1 rank" if self._comm.size == 1 else f"{self._comm.size} ranks"
        self._screen.line(
            f"{numel / 1e6:.2f}M parameters over {ranks}; {len(text.train) / 1e6:.1f} MB of text "
            f"in {text.files} files, {len(text.held_out) / 1e6:.1f} MB in {text.held_out_files} "
            "held out"
        )
        if self._step:
            self._screen.line(f"Going on from step {self._step}.")


def _held_out_losses(folder: RunFolder) -> dict[int, float]:
    entries = read_metrics(folder.metrics)
    return {e["step"]: e["held_out_loss"] for e in entries if "held_out_loss" in e}
