from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shard_comm import Comm, SoloComm
from shard_testing import run_threads
from shard_train import ModelConfig
from shard_train._evaluate import byte_losses, held_out_loss
from shard_train._model import build_model

SMALL = ModelConfig(width=16, layers=1, heads=2, hidden=32)


class Guess(nn.Module):
    """Gives every byte the same score."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return torch.zeros(*tokens.shape, 256)


def sequences(count: int) -> torch.Tensor:
    return torch.randint(256, (count, 6), generator=torch.Generator().manual_seed(0))


def test_guess_costs_eight_bits() -> None:
    losses = byte_losses(Guess(), sequences(3))
    assert losses.shape == (3, 5)
    torch.testing.assert_close(losses, torch.full((3, 5), math.log(256)))
    assert held_out_loss(Guess(), sequences(3), comm=SoloComm()) == pytest.approx(math.log(256))


def test_mean_is_over_all_bytes() -> None:
    model = build_model(SMALL, seed=0)
    tokens = sequences(21)  # two whole groups and a rest
    with torch.no_grad():
        expected = float(byte_losses(model, tokens).double().mean())
    assert held_out_loss(model, tokens, comm=SoloComm()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_same_bits_at_any_number_of_ranks(size: int) -> None:
    tokens = sequences(21)

    def evaluate(comm: Comm) -> float:
        return held_out_loss(build_model(SMALL, seed=0), tokens, comm=comm)

    assert run_threads(evaluate, size) == [evaluate(SoloComm())] * size


def test_ranks_take_part_in_the_same_number_of_forwards() -> None:
    def forwards(comm: Comm) -> int:
        model = Guess()
        held_out_loss(model, sequences(21), comm=comm)
        return model.forwards

    assert run_threads(forwards, 2) == [2, 2]  # three groups: the second rank repeats one


def test_gradients_are_not_recorded() -> None:
    model = build_model(SMALL, seed=0)
    held_out_loss(model, sequences(3), comm=SoloComm())
    assert all(param.grad is None for param in model.parameters())
