"""Distributed safetensors checkpoints that any number of ranks can read."""

from shard_ckpt._async import SaveHandle, save_async
from shard_ckpt._checkpointer import Checkpointer
from shard_ckpt._cli import main
from shard_ckpt._convert import convert
from shard_ckpt._diff import Difference, diff
from shard_ckpt._errors import CheckpointError
from shard_ckpt._grains import FileRecord
from shard_ckpt._hf_export import export_hf
from shard_ckpt._hf_load import load_hf
from shard_ckpt._index import Range, TensorRecord
from shard_ckpt._inspect import CheckpointInfo, inspect, verify
from shard_ckpt._load import load
from shard_ckpt._naming import Naming
from shard_ckpt._reindex import reindex
from shard_ckpt._save import save
from shard_ckpt._values import PerRank, RankValues

__all__ = [
    "CheckpointError",
    "CheckpointInfo",
    "Checkpointer",
    "Difference",
    "FileRecord",
    "Naming",
    "PerRank",
    "Range",
    "RankValues",
    "SaveHandle",
    "TensorRecord",
    "convert",
    "diff",
    "export_hf",
    "inspect",
    "load",
    "load_hf",
    "main",
    "reindex",
    "save",
    "save_async",
    "verify",
]
