"""From nested state to named tensors and back to structure."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shard_ckpt._collector import collector_paused
from shard_ckpt._dtypes import dtype_name
from shard_ckpt._header import METADATA_KEY
from shard_ckpt._memory import is_flat
from shard_ckpt._naming import Rename, stored_name
from shard_ckpt._runs import Box, Runs, box_runs
from shard_ckpt._values import PerRank, PerRankRef, TensorRef
from shard_flat import ShardTensor

_MAX_SECTION_BYTES = 160


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


@dataclass
class FlatState:
    """A state taken apart.

    Attributes:
        leaves: its tensors, sorted by section and name.
        values: its structure, with a ``TensorRef`` for each tensor and a ``PerRankRef`` for each
            per-rank value.
        per_rank: where each per-rank value stands, and the value.
    """

    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: list[tuple[str, Any]] = field(default_factory=list)


@collector_paused()
def flatten(state: Mapping[str, Any], *, rename: Rename | None = None) -> FlatState:
    """Take a state apart. Local.

    Components of a path are joined by ``.``, except that a mapping with the keys ``state`` and
    ``param_groups`` is the state of an optimizer, whose tensors are called ``parameter#slot``::

        {"model": {"embed": {"weight": t}}}                     model: embed.weight
        {"optim": {"state": {"embed.weight": {"exp_avg": t}},
                   "param_groups": []}}                         optim: embed.weight#exp_avg

    Args:
        state: sections.
        rename: other names for tensors; those that get one stand at the top of their section in
            the structure, and an optimizer's parameters under their new names.

    Raises:
        TypeError: the state, a key or a tensor is of a kind that cannot be stored.
        ValueError: two tensors would have one name, or a name cannot be used.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state: expected a mapping of sections, got {type(state).__name__}")
    walker = _Walker(rename)
    for key, value in state.items():
        if type(key) is not str:
            raise TypeError(f"state: expected sections of type str, got {key!r}")
        walker.enter(key, value)
    walker.flat.leaves.sort(key=lambda leaf: leaf.id)
    return walker.flat


class _Walker:
    """Carries the section and what was found through the recursion."""

    def __init__(self, rename: Rename | None) -> None:
        self.flat = FlatState()
        self.section = ""
        self._rename = rename
        self._paths: dict[tuple[str, str], str] = {}
        self._moved: dict[str, TensorRef] = {}
        self._lists = 0

    def enter(self, section: str, value: Any) -> None:
        """Take a section apart."""
        self.section = section
        self._moved = {}
        values = self.walk(value, name=None, prefix="", path=f"[{section!r}]")
        for name, ref in self._moved.items():
            if name in values:
                raise ValueError(f"{section}: {name} is a tensor's new name, and a value is there")
            values[name] = ref
        self.flat.values[section] = values

    def walk(self, node: Any, *, name: str | None, prefix: str, path: str) -> Any:
        """Return ``node`` with stand-ins; ``prefix`` is what its children's names begin with."""
        if isinstance(node, torch.Tensor):
            return self._tensor(node, name, path)
        if isinstance(node, PerRank):
            self.flat.per_rank.append((path, node.value))
            return PerRankRef(len(self.flat.per_rank) - 1)
        if isinstance(node, Mapping):
            if "state" in node and "param_groups" in node and isinstance(node["state"], Mapping):
                return self._optimizer(node, prefix, path)
            return self._children(node, prefix, path)
        if type(node) in (list, tuple):
            self._lists += 1
            children = self._children(dict(enumerate(node)), prefix, path)
            self._lists -= 1
            return type(node)(children.values())
        return node

    def _children(self, node: Mapping[Any, Any], prefix: str, path: str) -> dict[Any, Any]:
        result = {}
        for key, value in node.items():
            name = f"{prefix}{key}"
            moved = len(self._moved)
            found = self.walk(value, name=name, prefix=f"{name}.", path=f"{path}[{key!r}]")
            if isinstance(found, TensorRef) and found.name != name and not self._lists:
                self._moved[found.name] = found
            elif found or len(self._moved) == moved:  # else nothing is left of it
                result[key] = found
        return result

    def _optimizer(self, node: Mapping[Any, Any], prefix: str, path: str) -> dict[Any, Any]:
        result = {}
        for key, value in node.items():
            here = f"{path}[{key!r}]"
            if key != "state":
                name = f"{prefix}{key}"
                found = self.walk(value, name=name, prefix=f"{name}.", path=here)
                result[key] = self._groups(found, prefix) if key == "param_groups" else found
                continue
            self._lists += 1  # slots stay with their parameter
            result[key] = {
                self._owner(owner, prefix): self.walk(
                    slots,
                    name=f"{prefix}{owner}#",
                    prefix=f"{prefix}{owner}#",
                    path=f"{here}[{owner!r}]",
                )
                for owner, slots in value.items()
            }
            self._lists -= 1
        return result

    def _owner(self, owner: Any, prefix: str) -> Any:
        """Return the new name of a parameter in an optimizer below ``prefix``."""
        if self._rename is None or type(owner) is not str:
            return owner
        return stored_name(f"{prefix}{owner}", self._rename).removeprefix(prefix)

    def _groups(self, groups: Any, prefix: str) -> Any:
        """Return an optimizer's groups with the new names of parameters."""
        if self._rename is None or not isinstance(groups, list):
            return groups
        return [
            {**group, "params": [self._owner(name, prefix) for name in group["params"]]}
            if isinstance(group, dict) and isinstance(group.get("params"), list)
            else group
            for group in groups
        ]

    def _tensor(self, tensor: torch.Tensor, name: str | None, path: str) -> TensorRef:
        if name is None:
            raise ValueError(
                f"state{path}: a tensor needs a section around it, such as "
                f'{{"model": {{{self.section!r}: tensor}}}}'
            )
        _check_section(self.section)
        name = stored_name(name, self._rename)
        leaf = _leaf(tensor, self.section, name)
        _check_name(leaf)
        taken = self._paths.setdefault(leaf.id, path)
        if taken != path:
            raise ValueError(
                f"{leaf.label}: state{taken} and state{path} would both be stored under this name; "
                f"rename one"
            )
        self.flat.leaves.append(leaf)
        return TensorRef(self.section, name)


def _leaf(tensor: torch.Tensor, section: str, name: str) -> Leaf:
    label = f"{section}: {name}"
    if isinstance(tensor, ShardTensor):
        spec, outer = tensor.spec, tensor.spec.outer
        leaf = Leaf(
            section,
            name,
            tensor=tensor.local.detach(),
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
    if shards == 1 and local.numel() == math.prod(shape):
        return Leaf(section, name, local, shape, 0, local.numel(), None, tensor)
    box = Box((0,) * len(shape), (0,) * len(shape))
    if local.numel():  # else also of ranks that are not in the mesh
        chunks = tensor.__create_chunk_list__()
        box = Box(tuple(chunks[0].offsets), tuple(chunks[0].sizes))
        if len(chunks) != 1 or box.sizes != tuple(local.shape):
            raise TypeError(
                f"{label}: expected a DTensor with one block per rank, got {placements} with a "
                f"local part of {tuple(local.shape)}"
            )
    numel = local.numel()
    return Leaf(section, name, local, shape, 0, numel, shards, tensor, box, (mesh, cut))


def _check_section(section: str) -> None:
    bad = not section or section.startswith(".") or "/" in section or not section.isprintable()
    if bad or len(section.encode("utf-8", "replace")) > _MAX_SECTION_BYTES:
        raise ValueError(
            f"state[{section!r}]: a section with tensors names files, so it must be printable, at "
            f"most {_MAX_SECTION_BYTES} bytes, without '/' and not begin with '.'"
        )


def _check_name(leaf: Leaf) -> None:
    if leaf.name in ("", METADATA_KEY):
        raise ValueError(f"state[{leaf.section!r}]: a tensor cannot be called {leaf.name!r}")
    try:
        leaf.name.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise ValueError(f"{leaf.label!r}: the name has no UTF-8 form ({exc})") from exc
