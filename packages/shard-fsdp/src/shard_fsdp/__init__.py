"""Fully sharded data parallel training: the runtime that composes layouts, comms and wrapping."""

from shard_fsdp._fully_shard import fully_shard
from shard_fsdp._module import FSDPModule, UnshardHandle
from shard_fsdp._policy import MixedPrecisionPolicy

__all__ = ["FSDPModule", "MixedPrecisionPolicy", "UnshardHandle", "fully_shard"]
