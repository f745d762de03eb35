"""From a mesh to the ranks that a unit shards and replicates over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import Comm, SoloComm, comm_for

Mesh: TypeAlias = "DeviceMesh | Comm | tuple[Comm, Comm]"

_meshes: WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = WeakKeyDictionary()


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh are data-parallel; the names and meaning of torch's FSDP2.

    Attributes:
        shard: name or names of the dimensions to shard over, taken as one.
        replicate: name or names of those to replicate over, taken as one.

    Raises:
        ValueError: neither is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.shard is None and self.replicate is None:
            raise ValueError("DataParallelMeshDims: expected shard= or replicate=, got neither")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The dimensions to shard over."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The dimensions to replicate over."""
        return _as_names(self.replicate)


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a unit's parameters.

    Attributes:
        comm: to shard over.
        replicas: that hold the same pieces, in hybrid sharding.
        mesh: that sharded parameters report; None where there is no group to make one from.
        spmd: the mesh that all parameters are DTensors of, where ``dp_mesh_dims`` was given.
        dp_dims: its data-parallel dimensions.
    """

    comm: Comm
    replicas: Comm | None
    mesh: DeviceMesh | None
    spmd: DeviceMesh | None = None
    dp_dims: tuple[str, ...] = ()


def ranks_of(mesh: Any, dp_mesh_dims: Any = None, *, device: torch.device | None) -> Ranks:
    """Return the ranks that a mesh, a comm, a pair of comms or None stands for.

    Args:
        mesh: as given to ``fully_shard``.
        dp_mesh_dims: ours or torch's, or None.
        device: the accelerator that parameters are on already, if any.

    Raises:
        ValueError: dimensions are not there or have no names.

    **Collective**: local; all ranks, where several dimensions are taken as one.
    """
    if dp_mesh_dims is not None:
        return _named_ranks(mesh, dp_mesh_dims)
    comm, replicas = _comms_of(mesh, device)
    return Ranks(comm, replicas, _mesh_of(mesh, comm))


def submesh(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return these dimensions of a mesh. Local."""
    if tuple(names) == mesh.mesh_dim_names:
        return mesh
    return mesh[tuple(names)] if len(names) > 1 else mesh[names[0]]


def _as_names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _named_ranks(mesh: Any, dims: Any) -> Ranks:
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names is None:
        raise ValueError(
            f"dp_mesh_dims: expected mesh= to be a DeviceMesh with mesh_dim_names, got {mesh!r}"
        )
    shard, replicate = tuple(dims.shard_names), tuple(dims.replicate_names)
    for name in shard + replicate:
        if name not in mesh.mesh_dim_names or (shard + replicate).count(name) > 1:
            raise ValueError(
                f"dp_mesh_dims: expected different names out of {mesh.mesh_dim_names}, got "
                f"{shard + replicate}"
            )
    replicas = comm_for(_as_one(mesh, replicate)) if replicate else None
    shard_mesh = _as_one(mesh, shard) if shard else None
    if shard_mesh is not None:
        comm = comm_for(shard_mesh)
    else:
        assert replicas is not None
        comm = SoloComm(replicas.device)
    if replicas is not None and replicas.size == 1:
        replicas = None
    return Ranks(comm, replicas, shard_mesh, spmd=mesh, dp_dims=shard + replicate)


def _as_one(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    found = submesh(mesh, names)
    return found if len(names) == 1 else found._flatten("_".join(names))


def _comms_of(mesh: Any, device: torch.device | None) -> tuple[Comm, Comm | None]:
    """The comms to shard and to replicate over."""
    if isinstance(mesh, tuple):
        replicate, shard = mesh
        return comm_for(shard), replicate if replicate.size > 1 else None
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        names = _dim_names(mesh)
        replicas = comm_for(mesh[names[0]])
        return comm_for(mesh[names[1]]), replicas if replicas.size > 1 else None
    return comm_for(mesh, device=device if mesh is None else None), None


def _mesh_of(mesh: Any, comm: Comm) -> DeviceMesh | None:
    """The mesh that sharded parameters report, with a process group where there is one."""
    if isinstance(mesh, DeviceMesh):
        return mesh if mesh.ndim == 1 else mesh[_dim_names(mesh)[1]]
    group = comm.process_group
    if mesh is None and group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if group is None:
        return None  # ShardTensor makes one without groups
    found = _meshes.get(group)
    if found is None:
        found = _meshes[group] = DeviceMesh.from_group(group, comm.device.type)
    return found


def _dim_names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"expected a 2-D mesh with mesh_dim_names, got {mesh}")
    return names
