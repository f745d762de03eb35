"""Fully sharded training from one command."""

from shard_train._config import Config, DataConfig, ModelConfig, OptimConfig, RunConfig
from shard_train._errors import UsageError
from shard_train._run import run
from shard_train._toml import read_config

__all__ = [
    "Config",
    "DataConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "UsageError",
    "read_config",
    "run",
]
