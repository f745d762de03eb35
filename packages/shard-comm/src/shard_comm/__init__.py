"""Moving elements between ranks: collectives and their transports."""

from shard_comm._call_entry import CallEntry
from shard_comm._checked import Checked
from shard_comm._comm import Comm, Work
from shard_comm._group import GroupComm
from shard_comm._hierarchical import HierarchicalComm
from shard_comm._pick import comm_for
from shard_comm._plan import PlanComm
from shard_comm._quantized import Quantized
from shard_comm._recorded import OpRecord, Recorded
from shard_comm._shared_array import SharedArray
from shard_comm._shared_memory import SharedMemoryComm
from shard_comm._slices import Slices
from shard_comm._solo import SoloComm
from shard_comm._staged import HostStaged
from shard_comm._thread import ThreadComm
from shard_comm._tree import tree_sum

__all__ = [
    "CallEntry",
    "Checked",
    "Comm",
    "GroupComm",
    "HierarchicalComm",
    "HostStaged",
    "OpRecord",
    "PlanComm",
    "Quantized",
    "Recorded",
    "SharedArray",
    "SharedMemoryComm",
    "Slices",
    "SoloComm",
    "ThreadComm",
    "Work",
    "comm_for",
    "tree_sum",
]
