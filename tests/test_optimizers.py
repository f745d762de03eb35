"""Every optimizer under shard-fsdp: a checkpoint of two ranks goes on on one and on four.

All ranks see the same batch, and means over 1, 2 and 4 equal numbers are exact, so that runs have
the same bits wherever they are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import load, save
from shard_comm import Comm
from shard_fsdp import fully_shard
from shard_optim import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Offload,
    Shampoo,
    clip_grad_norm_,
)
from shard_testing import DecoderBlock, TinyDecoder, full_value, run_threads, token_batches
from shard_wrap import by_class

KINDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda named: SGD(named, lr=0.1, momentum=0.9, dampening=0.2),
    "adam": lambda named: Adam(named, lr=1e-2),
    "adamw": lambda named: AdamW(named, lr=1e-2),
    "adamw, disk": lambda named: AdamW(named, lr=1e-2, offload=Offload("disk", None, 1 << 14)),
    "adamw8bit": lambda named: AdamW8bit(named, lr=1e-2),
    "adamw8bit, disk": lambda named: AdamW8bit(named, lr=1e-2, offload="disk"),
    "lion": lambda named: Lion(named, lr=1e-3),
    "adafactor": lambda named: Adafactor(named, lr=5e-2),
    "muon": lambda named, **hyper: Muon(named, lr=1e-2, **hyper),
    "soap": lambda named, **hyper: SOAP(named, lr=1e-2, precondition_frequency=2, **hyper),
    "soap, disk": lambda named, **hyper: SOAP(named, lr=1e-2, offload="disk", **hyper),
    "shampoo": lambda named, **hyper: Shampoo(
        named, lr=1e-2, precondition_frequency=2, max_preconditioner_dim=40, **hyper
    ),
}


class Run:
    """A model, its optimizer and an average of its parameters."""

    def __init__(self, comm: Comm, kind: str) -> None:
        self.comm = comm
        self.model = TinyDecoder(width=48)  # some parameters above 4,096 elements, some below
        fully_shard(self.model, mesh=comm, policy=by_class(DecoderBlock))
        self.optimizer = KINDS[kind](self.model.parameters())
        self.average = EMA(self.model.parameters(), 0.5)

    def train(self, batches: list[list[torch.Tensor]]) -> list[float]:
        losses = []
        for (tokens,) in batches:
            self.optimizer.zero_grad()
            loss = self.model.loss(tokens)
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.average.update()
            losses.append(float(loss.detach()))
        return losses

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(allocate=True),
            "average": self.average.state_dict(),
        }

    def load(self, path: Path) -> None:
        state = load(self.state(), path, comm=self.comm)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state["average"])

    def averaged(self, tokens: torch.Tensor) -> float:
        with self.average.swapped_in(), torch.no_grad():
            return float(self.model.loss(tokens))

    def values(self) -> list[torch.Tensor]:
        return [full_value(param) for param in self.model.parameters()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_on_other_ranks(kind: str, tmp_path: Path) -> None:
    batches = token_batches(1, 1) * 4

    def first(comm: Comm) -> tuple[list[float], float, list[torch.Tensor]]:
        run = Run(comm, kind)
        early = run.train(batches[:2])
        save(run.state(), tmp_path / "there", comm=comm)
        losses = early + run.train(batches[2:])
        return losses, run.averaged(batches[0][0]), run.values()

    def later(comm: Comm) -> tuple[list[float], float, list[torch.Tensor]]:
        run = Run(comm, kind)
        run.load(tmp_path / "there")
        losses = run.train(batches[2:])
        return losses, run.averaged(batches[0][0]), run.values()

    losses, averaged, values = run_threads(first, 2)[0]
    assert losses[-1] < losses[0]
    assert averaged not in losses
    for world_size in (1, 2, 4):
        for found, mean, ends in run_threads(later, world_size):
            assert found == losses[2:]
            assert mean == averaged
            assert all(torch.equal(a, b) for a, b in zip(ends, values, strict=True))


@pytest.mark.parametrize("kind", ["muon", "soap", "soap, disk", "shampoo"])
def test_owners_of_replicated_matrices_change(kind: str, tmp_path: Path) -> None:
    """State of owners among two ranks goes on with owners among three, and without any."""
    batches = token_batches(1, 1) * 4

    def run(comm: Comm, path: Path, resume: bool) -> list[float]:
        model = TinyDecoder(width=16)
        optimizer = KINDS[kind](model.named_parameters(), comm=comm)

        def state() -> dict[str, Any]:
            return {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(allocate=True),
            }

        if resume:
            loaded = load(state(), path, comm=comm)
            model.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
        losses = []
        for step, (tokens,) in enumerate(batches[2:] if resume else batches):
            optimizer.zero_grad()
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step == 1 and not resume:
                save(state(), path, comm=comm)
        return losses

    losses = run_threads(run, 2, tmp_path / "there", False)[0]
    assert losses[-1] < losses[0]
    for world_size in (1, 3):
        assert run_threads(run, world_size, tmp_path / "there", True) == [losses[2:]] * world_size
