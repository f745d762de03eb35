"""Distributed safetensors checkpoints that any number of ranks can read."""

from shard_ckpt._async import SaveHandle, save_async
from shard_ckpt._blocks import FileRecord
from shard_ckpt._checkpointer import Checkpointer
from shard_ckpt._errors import CheckpointError
from shard_ckpt._index import Range, TensorRecord
from shard_ckpt._inspect import CheckpointInfo, inspect, verify
from shard_ckpt._load import load
from shard_ckpt._save import save
from shard_ckpt._values import PerRank, RankValues

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "FileRecord",
    "PerRank",
    "Range",
    "RankValues",
    "SaveHandle",
    "TensorRecord",
    "inspect",
    "load",
    "save",
    "save_async",
    "verify",
]
