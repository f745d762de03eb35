"""Optimizers whose state is sharded like the parameters, and gradient clipping."""

from shard_optim._adamw import AdamW
from shard_optim._clip import clip_grad_norm_

__all__ = ["AdamW", "clip_grad_norm_"]
