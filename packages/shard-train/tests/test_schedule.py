from __future__ import annotations

import pytest

from shard_train import OptimConfig
from shard_train._schedule import learning_rate


def test_worked_example() -> None:
    config = OptimConfig(lr=1.0, warmup=2, decay_steps=6)
    rates = [learning_rate(step, config) for step in range(1, 8)]
    assert rates == pytest.approx([0.5, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1], abs=5e-4)


def test_without_warmup_it_starts_near_the_top() -> None:
    assert learning_rate(1, OptimConfig(lr=2.0, warmup=0, decay_steps=1000)) > 1.99


def test_warmup_beyond_the_decay() -> None:
    config = OptimConfig(lr=1.0, warmup=10, decay_steps=5)
    assert learning_rate(10, config) == 1.0
    assert learning_rate(11, config) == pytest.approx(0.1)
