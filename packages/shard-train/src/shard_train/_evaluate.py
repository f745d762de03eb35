"""The loss on held-out text."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from shard_comm import Comm

_GROUP = 8  # sequences per forward


def byte_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the loss of each predicted byte.

    Args:
        model: From int64 ``[batch, seq]`` to logits ``[batch, seq, 256]``.
        tokens: int64 ``[batch, seq + 1]``.

    Returns:
        Cross entropy in nats, float32 ``[batch, seq]``.

    **Collective**: local; where the model is sharded, all ranks.
    """
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    return losses.view(tokens.shape[0], -1)


@torch.no_grad()
def held_out_loss(model: nn.Module, sequences: torch.Tensor, *, comm: Comm) -> float:
    """Return the mean loss over sequences that the ranks share out among themselves.

    The sequences are cut into groups of a fixed size, whatever the number of ranks, and the
    losses are gathered before they are summed. So equal weights give the same bits at any
    number of ranks.

    Args:
        model: From int64 ``[batch, seq]`` to logits ``[batch, seq, 256]``; its parameters may
            be sharded over ``comm``.
        sequences: int64 ``[sequences, seq + 1]``, the same on all ranks.
        comm: The ranks.

    Returns:
        Nats per byte.

    **Collective**: all ranks of ``comm``.
    """
    groups = torch.split(sequences, _GROUP)
    sums = torch.zeros(len(sequences), dtype=torch.float64, device=comm.device)
    for first in range(0, len(groups), comm.size):
        # Each forward is collective: a rank that is left without a group repeats the last one
        # and keeps it to itself.
        mine = first + comm.rank
        group = groups[min(mine, len(groups) - 1)].to(comm.device)
        losses = byte_losses(model, group).double().sum(dim=1)
        if mine < len(groups):
            sums[mine * _GROUP : mine * _GROUP + len(group)] = losses
    comm.all_reduce(sums)
    return float(sums.sum()) / (len(sequences) * (sequences.shape[1] - 1))
