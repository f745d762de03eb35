"""One tensor of a state, and what of it a rank holds."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shard_ckpt._dtypes import dtype_name
from shard_ckpt._header import METADATA_KEY
from shard_ckpt._memory import is_flat
from shard_ckpt._runs import Box, Runs, box_runs
from shard_ckpt._strided import Cut, strided_boxes
from shard_flat import ShardTensor


@dataclass(frozen=True)
class Leaf:
    """One tensor of a state, as one rank sees it.

    Attributes:
        section: top-level key of the state.
        name: its name within the section.
        tensor: the whole tensor, or the elements ``[start, stop)`` of a sharded one; detached.
        shape: global shape.
        start: first element of the flattened tensor that ``tensor`` holds.
        stop: one past the last.
        shards: over how many ranks it is cut; None where every rank has it whole.
        source: the tensor that the state holds.
        box: the block of the whole in which ``start`` and ``stop`` count, where it is a DTensor's
            local part; None where they count in the whole.
        holders: equal for tensors that are cut over the same ranks; means something on this rank
            only.
    """

    section: str
    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    start: int
    stop: int
    shards: int | None
    source: torch.Tensor
    box: Box | None = None
    holders: Hashable = None

    @property
    def id(self) -> tuple[str, str]:
        """Section and name: what no two tensors of a checkpoint share."""
        return self.section, self.name

    @property
    def label(self) -> str:
        """What errors call it."""
        return f"{self.section}: {self.name}"

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def runs(self, first: int, last: int) -> Iterator[tuple[Runs, int]]:
        """Yield where elements ``[first, last)`` of ``tensor`` lie in the whole one. Local.

        Returns:
            Elements of the flattened whole tensor, and which of ``tensor`` the first of them is;
            the others follow it there.
        """
        low, high = self.start + first, self.start + last
        if self.box is None:
            yield Runs(low, high), first
            return
        for runs, at in box_runs(self.shape, self.box, first=low, last=high):
            yield runs, at - self.start

    @property
    def dtype(self) -> str:
        """Its dtype as safetensors spells it."""
        name = dtype_name(self.tensor.dtype)
        if name is None:
            raise AssertionError(f"{self.label}: dtype {self.tensor.dtype} was let through")
        return name

    @property
    def alias_key(self) -> tuple[object, ...] | None:
        """Equal for tensors that are the same elements of the same memory; None for no memory."""
        tensor = self.tensor
        if tensor.numel() == 0:
            return None
        part = (self.start, self.stop, self.numel, self.box)
        where = (tensor.device, tensor.data_ptr(), tensor.dtype, *part)
        if is_flat(tensor):
            return (*where, self.shards)
        return (*where, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def leaf_of(tensor: torch.Tensor, section: str, name: str) -> Leaf:
    """Return a tensor of any kind as a leaf. Local.

    Raises:
        TypeError: it cannot be stored.
        ValueError: the name cannot be used.
    """
    label = f"{section}: {name}"
    if isinstance(tensor, ShardTensor):
        spec, outer = tensor.spec, tensor.spec.outer
        leaf = Leaf(
            section,
            name,
            tensor=tensor.piece.detach(),
            shape=spec.global_shape,
            start=spec.start,
            stop=spec.stop,
            shards=math.prod(comm.size for comm in tensor.comms),
            source=tensor,
            box=None if outer is None else Box(outer.offsets, outer.local_shape),
            holders=tensor.comms,
        )
    elif isinstance(tensor, DTensor):
        leaf = _dtensor_leaf(tensor, section, name)
    else:
        shape = tuple(tensor.shape)
        leaf = Leaf(section, name, tensor.detach(), shape, 0, tensor.numel(), None, tensor)
    _check_name(leaf)
    held = leaf.tensor
    if held.layout != torch.strided or held.is_quantized:
        raise TypeError(f"{label}: expected a dense tensor, got layout {held.layout}")
    if dtype_name(held.dtype) is None:
        raise TypeError(f"{label}: safetensors has no dtype for {held.dtype}; convert the tensor")
    if held.is_meta:
        raise TypeError(f"{label}: a meta tensor has no elements; materialise it first")
    if held.numel() > 0 and held.untyped_storage().data_ptr() == 0:
        raise TypeError(f"{label}: {type(tensor).__name__} has no memory of its own to store")
    return leaf


def _dtensor_leaf(tensor: DTensor, section: str, name: str) -> Leaf:
    mesh, placements, shape = tensor.device_mesh, tensor.placements, tuple(tensor.shape)
    label = f"{section}: {name}"
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            f"{label}: a DTensor placed as {placements} is a sum that was not taken yet; "
            f"redistribute() it to Shard or Replicate first"
        )
    local = tensor.to_local().detach()
    cut = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
    shards = math.prod(mesh.size(dim) for dim in cut)
    is_whole = shards == 1 and local.numel() == math.prod(shape)
    if is_whole and (not dist.is_initialized() or mesh.size() == dist.get_world_size()):
        return Leaf(section, name, local, shape, 0, local.numel(), None, tensor)
    box = Box((0,) * len(shape), (0,) * len(shape))
    if local.numel():  # else also of ranks that are not in the mesh
        boxes = _boxes_of(tensor, local)
        box = boxes.pop() if boxes else box
        if boxes or box.sizes != tuple(local.shape):
            raise TypeError(
                f"{label}: expected a DTensor with one block per rank, got {placements} of "
                f"{shape} over {tuple(mesh.shape)} ranks with a local part of "
                f"{tuple(local.shape)}; redistribute() it to Shard or Replicate first"
            )
    numel = local.numel()
    return Leaf(section, name, local, shape, 0, numel, shards, tensor, box, (mesh, cut))


def _boxes_of(tensor: DTensor, local: torch.Tensor) -> set[Box]:
    """Return the blocks of the whole that a DTensor's local part may be: one, if all is well."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate() or ()
    cuts = [
        Cut(placement.dim, mesh.size(at), coordinate[at], getattr(placement, "split_factor", 1))
        for at, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")
    ]
    if any(cut.factor > 1 for cut in cuts):
        return strided_boxes(tuple(tensor.shape), tuple(local.shape), cuts)
    chunks = tensor.__create_chunk_list__()
    return {Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks}


def _check_name(leaf: Leaf) -> None:
    if leaf.name in ("", METADATA_KEY):
        raise ValueError(f"state[{leaf.section!r}]: a tensor cannot be called {leaf.name!r}")
    try:
        leaf.name.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ValueError(f"{leaf.label!r}: the name has no UTF-8 form ({exc})") from exc
