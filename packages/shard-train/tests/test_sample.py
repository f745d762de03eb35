from __future__ import annotations

import torch
from torch import nn

from shard_train import ModelConfig
from shard_train._model import build_model
from shard_train._sample import generate


class Successor(nn.Module):
    """Is certain that the byte after ``n`` is ``n + 1``; records how much it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1000.0))
        self.seen: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen.append(tokens.shape[1])
        scores = nn.functional.one_hot((tokens + 1) % 256, 256) * self.scale
        assert not scores.requires_grad
        return scores


def test_each_byte_follows_from_the_ones_before() -> None:
    model = Successor()
    text = generate(model, b"ab", numel=5, window=4, generator=torch.Generator())
    assert text == b"abcdefg"
    assert model.seen == [2, 3, 4, 4, 4]


def test_generator_decides() -> None:
    model = build_model(ModelConfig(width=16, layers=1, heads=2, hidden=32), seed=0)

    def draw(seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, b"x", numel=20, window=8, generator=generator)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(draw(1)) == 21
