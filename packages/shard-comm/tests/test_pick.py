"""comm_for without a process group; with one, see test_collectives.py."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import GroupComm, SoloComm, ThreadComm, comm_for


def mesh_of(*shape: int, rank: int = 0) -> DeviceMesh:
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank)


def test_one_process_without_a_group_is_one_rank() -> None:
    comm = comm_for()
    assert isinstance(comm, SoloComm)
    assert (comm.rank, comm.size, comm.device) == (0, 1, torch.device("cpu"))
    assert comm_for(device="meta").device == torch.device("meta")


def test_a_comm_passes_through() -> None:
    comm = ThreadComm.group(2)[1]
    assert comm_for(comm) is comm


def test_a_mesh_of_one_is_one_rank() -> None:
    comm = comm_for(mesh_of(1))
    assert isinstance(comm, SoloComm)
    assert comm.device == torch.device("cpu")


def test_meshes_of_several_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a 1-D mesh, got .*; pick one dimension"):
        comm_for(mesh_of(2, 2))


def test_a_mesh_elsewhere_is_refused() -> None:
    """One rank of its own would look like a comm of one, and nothing would ever be summed."""
    for mesh in (mesh_of(1, rank=1), mesh_of(2, rank=5)):
        with pytest.raises(ValueError, match="this process is not part of"):
            comm_for(mesh)


def test_other_things_are_refused() -> None:
    for thing in (3, "cpu", object()):
        name = type(thing).__name__
        with pytest.raises(TypeError, match=f"Comm, DeviceMesh, ProcessGroup or None, got {name}"):
            comm_for(thing)  # type: ignore[arg-type]


def test_a_group_comm_needs_a_group() -> None:
    with pytest.raises(
        RuntimeError, match=r"torch.distributed is not initialised; .* SoloComm\(\)"
    ):
        GroupComm()
