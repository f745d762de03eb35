"""The sharded tensor: global shape, one rank's piece."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shard_flat._layout import ParamSpec, plan_layout
from shard_flat._placement import Ragged, ShardSpec, gather_pieces
from shard_flat._protocol import GatherComm
from shard_flat._shadow import shadow_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_meshes: WeakKeyDictionary[GatherComm, DeviceMesh] = WeakKeyDictionary()


class ShardTensor(DTensor):
    """A tensor with the parameter's global shape of which this rank holds one piece.

    ``shape``, ``ndim`` and ``numel()`` are global. Element-wise, ``_foreach_`` and ``_fused_``
    operations run on the pieces in one dispatch per call. Norms, sums and extremes are reduced
    over ranks and come back as plain tensors, one collective for a whole list. An operation
    without a sharded meaning, or with a plain tensor beside the pieces, raises RuntimeError.

    Args:
        local: ``[spec.stop - spec.start]``, this rank's elements; shared, not copied.
        spec: name, shape and range.
        comm: the ranks that hold the other pieces.
        mesh: the mesh to report as ``device_mesh``; by default that of ``spec.outer``, or one
            made from ``comm``'s size, without process groups.
        requires_grad: as for any tensor.

    Raises:
        ValueError: ``local`` does not have the shape that ``spec`` says, or the range is not the
            one that ``spec`` gives this rank.
        TypeError: ``local`` is itself sharded.
    """

    spec: ShardSpec
    comm: GatherComm

    @staticmethod
    def __new__(
        cls: type[ShardTensor],
        local: torch.Tensor,
        spec: ShardSpec,
        *,
        comm: GatherComm,
        mesh: DeviceMesh | None = None,
        requires_grad: bool = False,
    ) -> ShardTensor:
        where = f"(rank {comm.rank} of {comm.size})"
        if isinstance(local, DTensor):
            raise TypeError(f"{spec.name}: expected a plain piece, got {local!r} {where}")
        if local.shape != (spec.stop - spec.start,):
            raise ValueError(
                f"{spec.name}: expected a piece of shape ({spec.stop - spec.start},), got "
                f"{tuple(local.shape)} {where}"
            )
        if spec.range_of(comm.rank) != (spec.start, spec.stop):
            raise ValueError(
                f"{spec.name}: expected the range [{spec.start}, {spec.stop}), got an origin and a "
                f"shard_numel that give {spec.range_of(comm.rank)} {where}"
            )
        placements: tuple[Placement, ...] = (Ragged(spec.start, spec.stop, spec=spec, comm=comm),)
        if spec.outer is not None:
            mesh = spec.outer.mesh
            placements += spec.outer.placements
        shape = spec.global_shape
        dtensor_spec = DTensorSpec(
            mesh if mesh is not None else mesh_of(comm, local.device.type),
            placements,
            tensor_meta=TensorMeta(torch.Size(shape), _contiguous_strides(shape), local.dtype),
        )
        return _make(local.detach(), spec, comm, dtensor_spec, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Made whole by ``__new__``."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks func
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from shard_flat._ops import dispatch  # the table names this class

        return dispatch(func, args, kwargs or {})

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements ``[stop - start]``, the tensor's own memory."""
        shadow = shadow_of(self._local_tensor)
        if shadow is not None:  # the caller may write to them without a trace
            shadow.hand_out()
        return self._local_tensor

    @property
    def piece(self) -> torch.Tensor:
        """``local`` for those who change it by torch's operations alone, or count their changes."""
        return self._local_tensor

    @property
    def comms(self) -> tuple[GatherComm, ...]:
        """All ranks that hold other elements: a sum over each of these counts every one once."""
        outer = self.spec.outer
        return (self.comm,) if outer is None else (self.comm, *outer.sharded_comms)

    def like(self, local: torch.Tensor) -> ShardTensor:
        """Wrap another piece of the same range, shared and not copied. Local.

        Raises:
            ValueError: ``local`` does not have the shape of this tensor's piece.
        """
        if local.shape != self._local_tensor.shape:
            raise ValueError(
                f"{self.spec.name}: expected a piece of shape {tuple(self._local_tensor.shape)}, "
                f"got {tuple(local.shape)} (rank {self.comm.rank} of {self.comm.size})"
            )
        spec = self._spec
        meta = spec.tensor_meta
        if meta is None or meta.dtype != local.dtype or local.device.type != self.device.type:
            return ShardTensor(local, self.spec, comm=self.comm, mesh=spec.mesh)
        return _make(local, self.spec, self.comm, spec, False)

    def relocate(self, local: torch.Tensor) -> None:
        """Put this rank's piece elsewhere; the tensor object stays. Local.

        Args:
            local: memory of the same shape, dtype and kind of device; its values become those of
                the tensor.

        Raises:
            ValueError: ``local`` differs in more than its place.
        """
        old = self._local_tensor
        if (local.shape, local.dtype, local.device.type) != (old.shape, old.dtype, old.device.type):
            raise ValueError(
                f"{self.spec.name}: expected a piece like {tuple(old.shape)} {old.dtype} on "
                f"{old.device.type}, got {tuple(local.shape)} {local.dtype} on {local.device.type}"
            )
        self._local_tensor = local.detach()

    @property
    def data(self) -> torch.Tensor:
        """The same memory, unknown to autograd. To replace values use ``copy_``."""
        return super().data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise TypeError(
            f"{self.spec.name}: assigning .data would leave the piece as it is; copy into it under "
            f"torch.no_grad(), as in p.copy_(values)"
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's piece ``[stop - start]``, differentiable where gradients are on.

        The result is a plain tensor in all but one respect: its ``copy_`` also takes a tensor of
        the global shape, or an outer DTensor's local part, and copies the own range, as programs
        written for FSDP2 expect.
        """
        if grad_placements is not None:
            raise ValueError(f"{self.spec.name}: to_local() takes no grad_placements")
        if torch.is_grad_enabled() and self.requires_grad:
            local: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        piece = self.local.as_subclass(_Piece)
        piece.spec = self.spec
        return piece

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Gather the whole tensor in its global shape, differentiable where gradients are on.

        Each rank's gradient of the result is taken to be the same; every rank keeps its range.

        **Collective**: all ranks of ``comms``. **Memory**: up to twice the full tensor, for the
        call; three times for a piece of a DTensor.
        """
        if grad_placements is not None:
            raise ValueError(f"{self.spec.name}: full_tensor() takes no grad_placements")
        full: torch.Tensor = _FullTensor.apply(self)  # type: ignore[no-untyped-call]
        return full

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: Any,
    ) -> DTensor:
        """Replicate over the mesh; the only placement a ragged piece can turn into here.

        Raises:
            ValueError: another placement or mesh is asked for.

        **Collective**: all ranks of ``comms``.
        """
        mesh = self.device_mesh
        wanted = tuple(placements or ())
        possible = (Replicate(),) * mesh.ndim
        if (device_mesh is not None and device_mesh != mesh) or wanted != possible:
            raise ValueError(
                f"{self.spec.name}: a ShardTensor redistributes to {possible} on its own mesh "
                f"only, got {wanted}; use full_tensor() and shard the result"
            )
        return DTensor.from_local(self.full_tensor(), mesh, wanted, run_check=False)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        spec = self.spec
        return (
            f"ShardTensor({spec.name!r}, shape={spec.global_shape}, range=[{spec.start}, "
            f"{spec.stop}), rank={self.comm.rank} of {self.comm.size}, dtype={self.dtype})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardTensor:
        if id(self) in memo:
            copied: ShardTensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError(f"{self.spec.name}: only leaves copy deeply; use detach().clone()")
        result = self.like(self._local_tensor.clone())
        if isinstance(self, torch.nn.Parameter):
            result = torch.nn.Parameter(result, self.requires_grad)  # type: ignore[assignment]
        else:
            result.requires_grad_(self.requires_grad)
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"{self.spec.name}: a ShardTensor holds its communicator and does not pickle; save it "
            f"with shard_ckpt, or pickle full_tensor()"
        )

    def share_memory_(self) -> ShardTensor:
        """Raise TypeError: a piece belongs to its rank."""
        raise TypeError(f"{self.spec.name}: a ShardTensor does not move to shared memory")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from shard_flat._checkpointable import write_items  # not before somebody saves this way

        return write_items(fqn, self._local_tensor, self.spec, rank=self.comm.rank)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from shard_flat._checkpointable import chunks

        return chunks(self.spec)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        from shard_flat._checkpointable import box_at

        return box_at(self._local_tensor, self.spec, index)


def mesh_of(comm: GatherComm, device_type: str) -> DeviceMesh:
    """Return the mesh that stands for ``comm`` in ``device_mesh``: one per comm, no groups."""
    mesh = _meshes.get(comm)
    if mesh is None:
        mesh = DeviceMesh(
            device_type, torch.arange(comm.size, device="cpu"), _init_backend=False, _rank=comm.rank
        )
        _meshes[comm] = mesh
    return mesh


def shard_tensor(full: torch.Tensor, *, comm: GatherComm, name: str = "tensor") -> ShardTensor:
    """Cut a plain tensor into equal runs and keep this rank's.

    Args:
        full: the same values on every rank; any shape.
        comm: the ranks to cut over.
        name: what errors and checkpoints call it.

    Returns:
        A ShardTensor with a copy of this rank's elements.

    **Collective**: local.
    """
    layout = plan_layout([ParamSpec(name, tuple(full.shape), full.dtype)], comm.size)
    spec = layout.shard_spec(comm.rank, 0)
    local = full.detach().reshape(-1)[spec.start : spec.stop].clone()
    return ShardTensor(local, spec, comm=comm, requires_grad=full.requires_grad)


def _make(
    local: torch.Tensor,
    spec: ShardSpec,
    comm: GatherComm,
    dtensor_spec: DTensorSpec,
    requires_grad: bool,
) -> ShardTensor:
    made: ShardTensor = torch.Tensor._dtensor__new__(
        ShardTensor, local, dtensor_spec, requires_grad=requires_grad
    )
    made.spec = spec
    made.comm = comm
    return made


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for dim in reversed(shape):
        strides.append(step)
        step *= max(dim, 1)
    return tuple(reversed(strides))


class _Piece(torch.Tensor):
    """What ``to_local`` returns: results of operations on it are plain tensors."""

    spec: ShardSpec
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if source.shape != self.shape:
            if tuple(source.shape) == self.spec.global_shape:
                source = self.spec.part_of(source)
            elif tuple(source.shape) == self.spec.shape:  # cut by the outer placements already
                source = source.reshape(-1)[self.spec.start : self.spec.stop]
        return super().copy_(source, non_blocking)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.source = tensor.detach()
        return tensor.local.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardTensor:
        like: ShardTensor = ctx.source.like(grad.contiguous())
        return like


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: ShardTensor) -> torch.Tensor:
        ctx.source = tensor.detach()
        return gather_pieces(tensor.piece, tensor.spec, tensor.comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> ShardTensor:
        like: ShardTensor = ctx.source.like(ctx.source.spec.part_of(grad).clone())
        return like
