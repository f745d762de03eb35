from __future__ import annotations

import pytest
import torch

from shard_train import DataConfig
from shard_train._data import as_tensor, draw_batch, held_out_sequences

TEXT = as_tensor(bytearray(range(256)))
CONFIG = DataConfig(seq=7, batch=12, seed=3)


def test_as_tensor_shares_memory() -> None:
    text = bytearray(b"abc")
    tensor = as_tensor(text)
    text[1] = 0
    assert tensor.tolist() == [97, 0, 99]


def test_batch_is_cut_from_the_text() -> None:
    batch = draw_batch(TEXT, CONFIG, step=1, rank=0, size=1)
    assert batch.shape == (12, 8)
    assert batch.dtype == torch.int64
    # The text counts up, so each sequence does.
    assert torch.equal(batch, batch[:, :1] + torch.arange(8))


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_ranks_share_out_the_same_batch(size: int) -> None:
    whole = draw_batch(TEXT, CONFIG, step=5, rank=0, size=1)
    parts = [draw_batch(TEXT, CONFIG, step=5, rank=rank, size=size) for rank in range(size)]
    assert {len(part) for part in parts} == {12 // size}
    assert torch.equal(torch.cat(parts), whole)


def test_batch_depends_on_seed_and_step_alone() -> None:
    batch = draw_batch(TEXT, CONFIG, step=5, rank=0, size=1)
    torch.manual_seed(123)
    assert torch.equal(draw_batch(TEXT, CONFIG, step=5, rank=0, size=1), batch)
    assert not torch.equal(draw_batch(TEXT, CONFIG, step=6, rank=0, size=1), batch)
    other = DataConfig(seq=7, batch=12, seed=4)
    assert not torch.equal(draw_batch(TEXT, other, step=5, rank=0, size=1), batch)


def test_every_place_can_be_drawn() -> None:
    config = DataConfig(seq=7, batch=400)
    batch = draw_batch(TEXT[:10], config, step=1, rank=0, size=1)
    assert set(batch[:, 0].tolist()) == {0, 1, 2}  # 2 + 7 is the last byte
    only = draw_batch(TEXT[:8], config, step=1, rank=0, size=1)
    assert set(only[:, 0].tolist()) == {0}


def test_held_out_sequences_span_the_text() -> None:
    sequences = held_out_sequences(TEXT, DataConfig(seq=7, held_out=5))
    assert sequences[:, 0].tolist() == [0, 62, 124, 186, 248]
    assert sequences[-1, -1] == 255
    assert held_out_sequences(TEXT, DataConfig(seq=7, held_out=1)).tolist() == [list(range(8))]
