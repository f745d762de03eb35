"""Batches: the same ones at any number of ranks."""

from __future__ import annotations

import torch

from shard_train._config import DataConfig
from shard_train._seed import generator_for


def as_tensor(text: bytearray) -> torch.Tensor:
    """View text as a tensor.

    Args:
        text: Bytes, at least one.

    Returns:
        uint8 ``[bytes]`` on the CPU; it shares the memory of ``text``.

    **Collective**: local.
    """
    return torch.frombuffer(text, dtype=torch.uint8)


def draw_batch(
    text: torch.Tensor, config: DataConfig, *, step: int, rank: int, size: int
) -> torch.Tensor:
    """Draw this rank's part of the batch of a step.

    The whole batch is drawn from a generator seeded by the seed and the step, and each rank
    takes its contiguous share. So the batch does not depend on the number of ranks, and the
    step is all there is to remember of the position in the data.

    Args:
        text: uint8 ``[bytes]``.
        config: Sequence length, batch over all ranks, seed.
        step: Number of the step.
        rank: This rank.
        size: Number of ranks; divides the batch.

    Returns:
        int64 ``[batch / size, seq + 1]``: inputs are all but the last column, targets all but
        the first.

    **Collective**: local.
    """
    generator = generator_for(config.seed, "batch", step)
    starts = torch.randint(text.numel() - config.seq, (config.batch,), generator=generator)
    share = config.batch // size
    return _cut(text, starts[rank * share : (rank + 1) * share], config.seq)


def held_out_sequences(text: torch.Tensor, config: DataConfig) -> torch.Tensor:
    """Return the sequences of the held-out evaluation.

    Args:
        text: The held-out text, uint8 ``[bytes]``.
        config: Sequence length and number of sequences.

    Returns:
        int64 ``[held_out, seq + 1]``, spread evenly over the text from its first byte to its
        last.

    **Collective**: local.
    """
    last = text.numel() - config.seq - 1
    starts = torch.arange(config.held_out) * last // max(config.held_out - 1, 1)
    return _cut(text, starts, config.seq)


def _cut(text: torch.Tensor, starts: torch.Tensor, seq: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(seq + 1)].long()
