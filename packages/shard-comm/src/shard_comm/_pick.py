"""From a mesh or a group to a comm."""

from __future__ import annotations

import logging
import os
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_comm._comm import Comm
from shard_comm._group import GroupComm, backends_of
from shard_comm._hierarchical import through_memory
from shard_comm._solo import SoloComm
from shard_comm._staged import HostStaged

logger = logging.getLogger("shard_comm")

# A comm holds its group, so a group lives no longer than the last comm of it.
_Key = tuple[dist.ProcessGroup, torch.device, bool, bool]
_comms: WeakValueDictionary[_Key, Comm] = WeakValueDictionary()


def comm_for(
    mesh_or_group: Comm | DeviceMesh | dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    shared_memory: bool = True,
    separate_reductions: bool = False,
) -> Comm:
    """Return the comm for a mesh, a process group, or the whole world.

    Args:
        mesh_or_group: a comm (returned as it is), a 1-D mesh, a process group, or None for the
            default group. Without an initialised default group, None is one rank.
        device: where tensors live; by default what the group's backend serves.
        shared_memory: whether ranks of one host may use their memory; the same on all ranks.
        separate_reductions: whether reductions of a GroupComm go through a process group of their
            own, which is made for it, so that gathers and reductions need not wait for each other
            (on NCCL, a second communicator); the same on all ranks.

    Returns:
        A SoloComm for one rank. For CPU tensors a SharedMemoryComm where all ranks are on one
        host, a HierarchicalComm where they are on several and some share one, if ranks of a host
        can open memory of one another. Else a GroupComm, through host memory where the backend
        does not serve the device. The same group gives the same comm.

    Raises:
        ValueError: the mesh has more than one dimension, or this process is not part of the mesh
            or group.
        RuntimeError: nothing was given and torch.distributed is not initialised, though the
            environment says that there are several ranks.
        TypeError: something else was given.

    **Collective**: the first call for a group and the CPU, where the ranks find out who
    shares a host, and the first one with ``separate_reductions``. All else is local.
    """
    if isinstance(mesh_or_group, Comm):
        return mesh_or_group
    group: object
    if mesh_or_group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is None:
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            if ranks > 1:
                raise RuntimeError(
                    f"this process is rank {os.environ.get('RANK')} of {ranks} of a job, but "
                    f"torch.distributed is not initialised, so every rank would work alone; call "
                    f"torch.distributed.init_process_group() first, or pass SoloComm()"
                )
            return SoloComm(_with_index(device or "cpu"))
    elif isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim != 1:
            raise ValueError(
                f"expected a 1-D mesh, got {mesh_or_group}; pick one dimension, as in mesh['shard']"
            )
        if mesh_or_group.get_coordinate() is None:
            raise ValueError(f"this process is not part of {mesh_or_group}; leave it out there")
        device = device or mesh_or_group.device_type
        if mesh_or_group.size() == 1:
            return SoloComm(_with_index(device))
        group = mesh_or_group.get_group()
    else:
        group = mesh_or_group
    if not isinstance(group, dist.ProcessGroup):
        if mesh_or_group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("this process is not part of the group; leave it out there")
        raise TypeError(
            f"expected a Comm, DeviceMesh, ProcessGroup or None, got {type(mesh_or_group).__name__}"
        )
    backends = backends_of(group)
    place = _with_index(device or ("cuda" if backends.get("cuda") == "nccl" else "cpu"))
    if dist.get_world_size(group) == 1:
        return SoloComm(place)
    key = (group, place, shared_memory, separate_reductions)
    comm = _comms.get(key)
    if comm is None or comm.closed:
        comm = _comms[key] = _make(
            group, place, shared_memory=shared_memory, separate_reductions=separate_reductions
        )
    return comm


def _make(
    group: dist.ProcessGroup,
    place: torch.device,
    *,
    shared_memory: bool,
    separate_reductions: bool,
) -> Comm:
    backends = backends_of(group)
    staged = place.type not in backends and "cpu" in backends
    comm = GroupComm(group, device="cpu" if staged else place)
    if shared_memory and not staged and place.type == "cpu":
        found = through_memory(comm)
        if found is not comm:
            return found
    if separate_reductions:
        other = comm.split(0)
        assert isinstance(other, GroupComm)
        comm._set_reducing(other)
        comm._made = other
    if staged:
        logger.warning("no backend of the group serves %s: staging through the host", place)
        return HostStaged(comm, place)
    return comm


def _with_index(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device
