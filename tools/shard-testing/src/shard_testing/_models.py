"""Small models: a decoder whose gradients are all well away from zero, and parts by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class Scale(nn.Module):
    """Multiplies by its one parameter, so that gradients can be told by hand.

    Args:
        weight: the parameter's first value.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``weight * x``."""
        return self.weight * x


class TiedTable(nn.Module):
    """A 5x1 table of ones that is also the weight of an output layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding.from_pretrained(torch.ones(5, 1), freeze=False)
        self.head = nn.Linear(1, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self) -> torch.Tensor:
        """Return the sum of all rows and of the output layer's answer to 1."""
        total: torch.Tensor = self.embed(torch.arange(5)).sum() + self.head(torch.ones(1)).sum()
        return total


class DecoderBlock(nn.Module):
    """Attention and a gated MLP with pre-norms and without biases.

    Args:
        width: model width.
        heads: attention heads; they divide ``width``.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        hidden: torch.Tensor = self.down(functional.silu(self.up(self.norm2(x))))
        return x + hidden


class TinyDecoder(nn.Module):
    """A byte-sized language model for tests.

    Args:
        vocab: number of tokens.
        width: model width.
        layers: number of blocks.
        heads: attention heads.
        seed: of the initial weights, drawn from a generator of their own.
    """

    def __init__(
        self, vocab: int = 61, width: int = 24, layers: int = 2, heads: int = 2, *, seed: int = 0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                if param.ndim > 1:
                    param.copy_(
                        torch.randn(param.shape, generator=generator) * param.shape[-1] ** -0.5
                    )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of predicting each next token of ``[batch, tokens]``."""
        logits = self(tokens[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def token_batches(
    steps: int, per_step: int, *, vocab: int = 61, shape: tuple[int, int] = (2, 9), seed: int = 1
) -> list[list[torch.Tensor]]:
    """Return ``steps`` lists of ``per_step`` token tensors, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(0, vocab, shape, generator=generator) for _ in range(per_step)]
        for _ in range(steps)
    ]
