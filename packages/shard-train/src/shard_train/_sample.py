"""Text from the model, byte by byte."""

from __future__ import annotations

import torch
from torch import nn

_TEMPERATURE = 0.7


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, *, numel: int, window: int, generator: torch.Generator
) -> bytes:
    """Continue a prompt.

    Args:
        model: From int64 ``[1, seq]`` to logits ``[1, seq, 256]``.
        prompt: At least one byte.
        numel: Number of bytes to add.
        window: Number of bytes that the model sees at most.
        generator: Draws the bytes; on the CPU, in the same state on all ranks.

    Returns:
        The prompt and what follows.

    **Collective**: local; where the model is sharded, all ranks.
    """
    device = next(model.parameters()).device
    tokens = torch.tensor(list(prompt))
    for _ in range(numel):
        logits = model(tokens[None, -window:].to(device))[0, -1].float().cpu()
        chances = (logits / _TEMPERATURE).softmax(dim=0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        tokens = torch.cat((tokens, drawn))
    return bytes(tokens.tolist())
