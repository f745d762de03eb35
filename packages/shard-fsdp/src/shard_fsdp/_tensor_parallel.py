"""Parameters that are DTensors of a tensor-parallel mesh: what is sharded is their local part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shard_comm import Comm, comm_for
from shard_flat import Outer
from shard_fsdp._mesh import Ranks, submesh


@dataclass(frozen=True)
class ParallelSpec:
    """How a forward sees one parameter, and what its pieces are pieces of.

    Attributes:
        mesh: of the DTensor that a forward sees.
        placements: of it, one per dimension of ``mesh``.
        shape: of it.
        outer: the same for pieces; data-parallel dimensions of ``mesh`` are left out. None where
            there are no others.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    outer: Outer | None

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return the DTensor around a full local part, which it shares. Local."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride
        )


def parallel_spec(name: str, param: DTensor, ranks: Ranks) -> ParallelSpec:
    """Check that a DTensor can be sharded over ``ranks`` and say how. Local.

    Raises:
        ValueError: its meshes and ``ranks`` do not fit, or a placement is neither ``Shard`` nor
            ``Replicate``.
    """
    mesh, placements = param.device_mesh, tuple(param.placements)
    for placement in placements:
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"{name}: expected a DTensor placed by Shard and Replicate, got {placements}; "
                f"redistribute it before fully_shard()"
            )
    own_dims = list(range(mesh.ndim))
    if ranks.spmd is not None:
        own_dims = _dims_beside(name, mesh, placements, ranks)
    outer = None
    if own_dims:
        names = _names_of(name, mesh)
        outer = Outer(
            shape=tuple(param.shape),
            placements=tuple(placements[dim] for dim in own_dims),
            comms=tuple(_comm_along(mesh, names[dim]) for dim in own_dims),
            mesh=_joined(name, ranks, submesh(mesh, [names[dim] for dim in own_dims])),
        )
    return ParallelSpec(mesh, placements, param.shape, outer)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor, which it shares, or a plain tensor itself. Local."""
    plain = tensor.detach()
    return plain._local_tensor if isinstance(plain, DTensor) else plain


def local_grad(grad: torch.Tensor, param: torch.Tensor, dp_dims: Sequence[str]) -> torch.Tensor:
    """Return the gradient of a parameter's local part.

    Args:
        grad: of the parameter, placed as backward left it.
        param: as a forward saw it.
        dp_dims: dimensions of its mesh over which gradients are summed later.

    **Collective**: the ranks of the DTensor's mesh, where the gradient is placed otherwise than
    the parameter.
    """
    if not isinstance(param, DTensor):
        return grad
    assert isinstance(grad, DTensor)
    names = param.device_mesh.mesh_dim_names or ("",) * param.device_mesh.ndim
    wanted = [
        found if name in dp_dims and isinstance(found, (Replicate, Partial)) else own
        for name, found, own in zip(names, grad.placements, param.placements, strict=True)
    ]
    if list(grad.placements) != wanted:
        grad = grad.redistribute(placements=wanted)
    local = grad.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _dims_beside(
    name: str, mesh: DeviceMesh, placements: Sequence[Placement], ranks: Ranks
) -> list[int]:
    """The dimensions of an SPMD mesh that are not data-parallel."""
    if mesh != ranks.spmd:
        raise ValueError(
            f"{name}: expected a DTensor of the mesh that fully_shard() was given, {ranks.spmd}, "
            f"got one of {mesh}"
        )
    beside = []
    for dim, dim_name in enumerate(_names_of(name, mesh)):
        if dim_name not in ranks.dp_dims:
            beside.append(dim)
        elif type(placements[dim]) is not Replicate:
            raise ValueError(
                f"{name}: expected Replicate() over the data-parallel dimension {dim_name!r}, got "
                f"{placements[dim]}"
            )
    return beside


def _names_of(name: str, mesh: DeviceMesh) -> tuple[str, ...]:
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"{name}: expected a DTensor of a mesh with mesh_dim_names, got {mesh}; name them in "
            f"init_device_mesh()"
        )
    return mesh.mesh_dim_names


def _comm_along(mesh: DeviceMesh, dim: str) -> Comm:
    return comm_for(mesh if mesh.ndim == 1 else mesh[dim])


def _joined(name: str, ranks: Ranks, own: DeviceMesh) -> DeviceMesh:
    """The mesh that pieces report: that of the ranks they are cut over, then the DTensor's."""
    if ranks.mesh is None:
        if ranks.spmd is None:
            raise ValueError(
                f"{name}: a DTensor of {own}, but fully_shard() was given no DeviceMesh beside it; "
                f"pass mesh= the data-parallel dimension of the mesh that {own} was taken from"
            )
        names = ("shard", *_names_of(name, own))  # nothing is cut: one rank, without a group
        return DeviceMesh(
            own.device_type,
            own.mesh.unsqueeze(0),
            mesh_dim_names=names,
            _init_backend=False,
            _rank=own.get_rank(),
        )
    common = set(ranks.mesh.mesh.flatten().tolist()) & set(own.mesh.flatten().tolist())
    if common != {own.get_rank()}:
        raise ValueError(
            f"{name}: a DTensor of {own}, which shares ranks {sorted(common)} with the mesh to "
            f"shard over, {ranks.mesh}; pass mesh= the data-parallel dimension of the mesh that it "
            f"was taken from"
        )
    try:
        return DeviceMesh._concatenate([ranks.mesh, own])
    except RuntimeError as error:
        raise ValueError(
            f"{name}: a DTensor of {own}, which was not taken from the same mesh as {ranks.mesh}, "
            f"the one to shard over; make one with init_device_mesh() and use its dimensions"
        ) from error
