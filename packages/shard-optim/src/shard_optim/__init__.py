"""Optimizers whose state is sharded like the parameters, and gradient clipping."""

from shard_optim._adafactor import Adafactor
from shard_optim._adam import Adam, AdamW
from shard_optim._adamw8bit import AdamW8bit
from shard_optim._clip import clip_grad_norm_, clip_grad_value_, get_grad_norm
from shard_optim._ema import EMA
from shard_optim._lion import Lion
from shard_optim._muon import Muon
from shard_optim._offload import Offload
from shard_optim._scaler import GradScaler
from shard_optim._sgd import SGD
from shard_optim._shampoo import Shampoo
from shard_optim._sharded import ShardedOptimizer
from shard_optim._soap import SOAP

__all__ = [
    "EMA",
    "SGD",
    "SOAP",
    "Adafactor",
    "Adam",
    "AdamW",
    "AdamW8bit",
    "GradScaler",
    "Lion",
    "Muon",
    "Offload",
    "Shampoo",
    "ShardedOptimizer",
    "clip_grad_norm_",
    "clip_grad_value_",
    "get_grad_norm",
]
