"""Where every element of every parameter lives: layouts, flat buffers, the sharded tensor."""

from shard_flat._buffer import FullBuffer
from shard_flat._layout import FlatLayout, ParamSpec, Piece, plan_layout
from shard_flat._norm import power_sum
from shard_flat._operands import adopt_cut
from shard_flat._outer import Outer
from shard_flat._pages import large_empty
from shard_flat._placement import Ragged, ShardSpec
from shard_flat._protocol import GatherComm
from shard_flat._shadow import Shadow, shadow_of
from shard_flat._tensor import ShardTensor, shard_tensor

__all__ = [
    "FlatLayout",
    "FullBuffer",
    "GatherComm",
    "Outer",
    "ParamSpec",
    "Piece",
    "Ragged",
    "Shadow",
    "ShardSpec",
    "ShardTensor",
    "adopt_cut",
    "large_empty",
    "plan_layout",
    "power_sum",
    "shadow_of",
    "shard_tensor",
]
