"""A byte-level decoder in plain PyTorch: RMSNorm, rotary positions, SwiGLU."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from shard_train._config import ModelConfig
from shard_train._seed import generator_for

VOCAB = 256
_ROTARY_BASE = 10_000.0
_TABLE_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions.

    Args:
        width: Elements per position.
        heads: Number of heads; divides ``width`` into an even number.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Attend.

        Args:
            x: ``[batch, positions, width]``.
            rotary: Cosines and sines, ``[2, positions, head_dim / 2]``.

        Returns:
            ``[batch, positions, width]``.

        **Collective**: local.
        """
        batch, positions, width = x.shape
        qkv = self.qkv(x).view(batch, positions, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, positions, head_dim]
        mixed = F.scaled_dot_product_attention(
            _rotate(q, rotary), _rotate(k, rotary), v, is_causal=True
        )
        y: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, positions, width))
        return y


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    cos, sin = rotary.to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``.

    Args:
        width: Elements per position.
        hidden: Elements per position inside.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform each position by itself.

        Args:
            x: ``[batch, positions, width]``.

        Returns:
            ``[batch, positions, width]``.

        **Collective**: local.
        """
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        y: torch.Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One layer: attention and feed-forward, each normalised before and added after.

    Args:
        config: Sizes of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config.width, config.heads)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config.width, config.hidden)

    def forward(self, x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: ``[batch, positions, width]``.
            rotary: Cosines and sines, ``[2, positions, head_dim / 2]``.

        Returns:
            ``[batch, positions, width]``.

        **Collective**: local; where the block is sharded, all ranks.
        """
        x = x + self.attention(self.attention_norm(x), rotary)
        y: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class Decoder(nn.Module):
    """Predicts each next byte from the bytes before it.

    Args:
        config: Sizes of the model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores of each next byte.

        Args:
            tokens: Bytes as int64, ``[batch, positions]``.

        Returns:
            Logits, ``[batch, positions, 256]``.

        **Collective**: local; where the model is sharded, all ranks.
        """
        head_dim = self.config.width // self.config.heads
        rotary = rotary_table(tokens.shape[1], head_dim, device=tokens.device)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotary)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def rotary_table(
    positions: int, head_dim: int, *, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the cosines and sines that turn each pair of elements by its position.

    Args:
        positions: Number of positions.
        head_dim: Elements per head, even.
        device: Where to make the table.

    Returns:
        float32 ``[2, positions, head_dim / 2]``.

    **Collective**: local.
    **Source**: Su et al., RoFormer, arXiv:2104.09864.
    """
    exponents = torch.arange(0, head_dim, 2, device=device) / head_dim
    steps = torch.arange(positions, device=device)
    angles = torch.outer(steps, _ROTARY_BASE**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def build_model(config: ModelConfig, *, seed: int) -> Decoder:
    """Build a decoder whose initial values depend on the seed and on nothing else.

    Each parameter is drawn from a generator seeded by its name, so the values are the same
    on every rank, at any number of ranks, and a model with more layers begins with the
    values of one with fewer.

    Args:
        config: Sizes of the model.
        seed: Any integer.

    Returns:
        The model, float32, on the CPU.

    **Collective**: local.
    **Memory**: the whole model, 4 bytes per parameter.
    """
    model = Decoder(config)
    # Each block adds two outputs to the residual stream; this keeps its variance at one
    # block's whatever the depth.
    residual = 1.0 / math.sqrt(2 * config.layers)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim < 2:
                param.fill_(1.0)
                continue
            table = name in ("embed.weight", "head.weight")
            std = _TABLE_STD if table else 1.0 / math.sqrt(param.shape[1])
            if name.endswith(("attention.out.weight", "feed_forward.down.weight")):
                std *= residual
            param.normal_(0.0, std, generator=generator_for(seed, name))
    return model
