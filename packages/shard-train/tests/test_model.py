from __future__ import annotations

import math

import pytest
import torch

from shard_train import Config, ModelConfig
from shard_train._config import resolve
from shard_train._model import build_model, rotary_table

SMALL = ModelConfig(width=32, layers=2, heads=2, hidden=48)


def numel(config: ModelConfig) -> int:
    return sum(param.numel() for param in build_model(config, seed=0).parameters())


def test_shapes() -> None:
    logits = build_model(SMALL, seed=0)(torch.randint(256, (3, 5)))
    assert logits.shape == (3, 5, 256)


def test_parameter_count() -> None:
    block = 4 * 32 * 32 + 3 * 32 * 48 + 2 * 32
    assert numel(SMALL) == 2 * 256 * 32 + 2 * block + 32
    tied = ModelConfig(width=32, layers=2, heads=2, hidden=48, tied=True)
    assert numel(tied) == numel(SMALL) - 256 * 32


def test_default_model_has_about_three_million_parameters() -> None:
    assert 2.5e6 < numel(resolve(Config()).model) < 3.5e6


def test_tied_tables_are_one_parameter() -> None:
    model = build_model(ModelConfig(width=32, layers=1, heads=2, hidden=48, tied=True), seed=0)
    assert model.head.weight is model.embed.weight


def test_no_position_sees_what_comes_after_it() -> None:
    model = build_model(SMALL, seed=0)
    tokens = torch.randint(256, (1, 9))
    other = tokens.clone()
    other[0, 5:] = (other[0, 5:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(other)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_every_position_sees_what_comes_before_it() -> None:
    model = build_model(SMALL, seed=0)
    tokens = torch.randint(256, (1, 9))
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    with torch.no_grad():
        difference = (model(tokens) - model(other)).abs().amax(dim=-1)[0]
    assert (difference > 0).all()


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    weights = build_model(SMALL, seed=1).state_dict()
    torch.manual_seed(99)
    for name, value in build_model(SMALL, seed=1).state_dict().items():
        assert torch.equal(value, weights[name])
    deeper = build_model(ModelConfig(width=32, layers=3, heads=2, hidden=48), seed=1)
    name = "blocks.1.attention.qkv.weight"
    assert torch.equal(deeper.state_dict()[name], weights[name])
    assert not torch.equal(build_model(SMALL, seed=2).state_dict()[name], weights[name])


def test_initial_loss_is_near_that_of_a_guess() -> None:
    config = resolve(Config()).model
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = build_model(config, seed=0)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss) == pytest.approx(math.log(256), abs=0.15)


def test_rotary_table() -> None:
    cos, sin = rotary_table(3, 4)
    assert cos[0].tolist() == [1.0, 1.0]
    assert sin[0].tolist() == [0.0, 0.0]
    # Frequencies 1 and 1/100 for head_dim 4.
    torch.testing.assert_close(sin[2], torch.tensor([math.sin(2.0), math.sin(0.02)]))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones(3, 2))
