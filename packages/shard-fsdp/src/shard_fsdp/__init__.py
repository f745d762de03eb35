"""Fully sharded data parallel training: the runtime that composes layouts, comms and wrapping."""

from shard_fsdp._fully_shard import fully_shard
from shard_fsdp._materialize import materialize
from shard_fsdp._mesh import DataParallelMeshDims
from shard_fsdp._module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shard_fsdp._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "materialize",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
