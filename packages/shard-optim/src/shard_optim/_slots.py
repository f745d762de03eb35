"""The state that belongs to each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from shard_flat import GatherComm, ShardSpec, ShardTensor
from shard_optim._runs import find_runs, flat_piece, piece_of

State = MutableMapping[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Slot:
    """A state tensor with one element for each of its parameter's, cut as that is.

    Attributes:
        name: what the state calls it.
        dtype: of its elements; the parameter's by default.
        joined: whether those of neighbours are updated as one flat tensor.
    """

    name: str
    dtype: torch.dtype | None = None
    joined: ClassVar[bool] = True

    def blank(self, param: torch.Tensor) -> torch.Tensor:
        """Return zeros for a parameter. Local."""
        like = param.detach()
        return torch.zeros_like(like, dtype=self.dtype, memory_format=torch.preserve_format)

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape. Local."""
        return tuple(param.shape)

    def fits(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a tensor has the cut of the parameter's as it is now. Local."""
        return piece_of(value).shape == piece_of(param).shape

    def is_cut_like(self, value: ShardTensor, param: torch.Tensor) -> bool:
        """Whether a piece is that of the slot on every rank. Local."""
        return isinstance(param, ShardTensor) and param.spec.is_cut_like(
            value.spec, param.comm.size
        )


@dataclass(frozen=True)
class WholeSlot(Slot):
    """A plain state tensor that every rank holds whole, such as a matrix's row statistics.

    Attributes:
        dims: dimensions of the parameter that it does not have; they have length 1.
    """

    dims: tuple[int, ...] = ()
    joined: ClassVar[bool] = False

    def blank(self, param: torch.Tensor) -> torch.Tensor:
        """Return zeros for a parameter. Local."""
        dtype = param.dtype if self.dtype is None else self.dtype
        return torch.zeros(self.shape_of(param), dtype=dtype, device=param.device)

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the shape. Local."""
        gone = {dim % param.ndim for dim in self.dims}
        return tuple(1 if dim in gone else size for dim, size in enumerate(param.shape))

    def fits(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a tensor has the shape that the parameter asks for. Local."""
        return tuple(value.shape) == self.shape_of(param)


@dataclass(frozen=True)
class OwnedSlot(Slot):
    """A state tensor of which one rank holds all, as the owner of a matrix does.

    Attributes:
        owner: the rank.
        dims: which dimensions of the parameter it has, in order.
        comm: the ranks that hold the parameter, where it is plain and there are several.
    """

    owner: int = 0
    dims: tuple[int, ...] = (0, 1)
    comm: GatherComm | None = None
    joined: ClassVar[bool] = False

    def blank(self, param: torch.Tensor) -> torch.Tensor:
        """Return zeros for a parameter. Local."""
        dtype = param.dtype if self.dtype is None else self.dtype
        comm = self._comm_of(param)
        if comm is None:
            return torch.zeros(self.shape_of(param), dtype=dtype, device=param.device)
        spec = self._spec(param, comm)
        local = torch.zeros(spec.stop - spec.start, dtype=dtype, device=param.device)
        mesh = param.device_mesh if isinstance(param, ShardTensor) else None
        return ShardTensor(local, spec, comm=comm, mesh=mesh)

    def shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        """Return the global shape. Local."""
        return tuple(param.shape[dim] for dim in self.dims)

    def fits(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether a tensor is what the owner, or another rank, is to have. Local."""
        if isinstance(value, ShardTensor):
            return self.is_cut_like(value, param)
        return self._comm_of(param) is None and tuple(value.shape) == self.shape_of(param)

    def is_cut_like(self, value: ShardTensor, param: torch.Tensor) -> bool:
        """Whether a piece is that of the slot on every rank. Local."""
        comm = self._comm_of(param)
        return comm is not None and self._spec(param, comm).is_cut_like(value.spec, comm.size)

    def _comm_of(self, param: torch.Tensor) -> GatherComm | None:
        return param.comm if isinstance(param, ShardTensor) else self.comm

    def _spec(self, param: torch.Tensor, comm: GatherComm) -> ShardSpec:
        name = param.spec.name if isinstance(param, ShardTensor) else self.name
        shape = self.shape_of(param)
        numel = math.prod(shape)
        whole = ShardSpec(name, shape, 0, 0, self.owner * numel, numel)
        start, stop = whole.range_of(comm.rank)
        return replace(whole, start=start, stop=stop)


def allocate_slots(params: Sequence[torch.Tensor], state: State, slots: Sequence[Slot]) -> None:
    """Make what is missing of the parameters' state: zeros, and step counters at 0.

    Where parameters lie side by side and none of them has a slot, theirs do so too.

    Args:
        params: parameters.
        state: the optimizer's.
        slots: those that each of the parameters has.

    **Collective**: local. **Memory**: the slots of each parameter's piece.
    """
    joined = [slot for slot in slots if slot.joined]
    for rows in find_runs([[flat_piece(p) for p in params]]):
        members = [params[row] for row in rows]
        if len(members) > 1 and not any(slot.name in state[m] for m in members for slot in joined):
            _allocate_together(members, state, joined)
    for param in params:
        own = state[param]
        if "step" not in own:
            own["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for slot in slots:
            if slot.name not in own:
                own[slot.name] = slot.blank(param)
            elif slot.joined and piece_of(own[slot.name]).stride() != piece_of(param).stride():
                # The kernel goes by memory alone.
                own[slot.name] = slot.blank(param).copy_(own[slot.name])


def check_slots(
    param: torch.Tensor,
    own: Mapping[str, Any],
    slots: Sequence[Slot],
    name_of: Callable[[torch.Tensor], str],
) -> None:
    """Check that state that is there fits its parameter; the kernel would not.

    Args:
        param: the parameter.
        own: its state.
        slots: those that it has.
        name_of: gives its name, for errors.

    Raises:
        ValueError: a slot's shape, dtype or range is not what the parameter asks for.

    **Collective**: local.
    """
    for slot in slots:
        value = own.get(slot.name)
        if value is None:
            continue
        dtype = param.dtype if slot.dtype is None else slot.dtype
        if not slot.fits(value, param) or value.dtype != dtype:
            wanted, there = piece_of(param).shape if slot.joined else slot.shape_of(param), value
            raise ValueError(
                f"{name_of(param)}: expected {slot.name} of shape {tuple(wanted)} and {dtype}, got "
                f"{tuple(piece_of(there).shape)} and {there.dtype}; the parameter changed under "
                f"its state, make a new optimizer"
            )


def _allocate_together(
    members: Sequence[torch.Tensor], state: State, slots: Sequence[Slot]
) -> None:
    pieces = [piece_of(m) for m in members]
    sizes = [p.numel() for p in pieces]
    for slot in slots:
        dtype = pieces[0].dtype if slot.dtype is None else slot.dtype
        flat = torch.zeros(sum(sizes), dtype=dtype, device=pieces[0].device)
        for member, part in zip(members, flat.split(sizes), strict=True):
            if isinstance(member, ShardTensor):
                state[member][slot.name] = member.like(part)
            elif member.is_contiguous():
                state[member][slot.name] = part.view(member.shape)
