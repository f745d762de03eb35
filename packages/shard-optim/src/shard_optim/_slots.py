"""The state that belongs to each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from shard_flat import GatherComm, ShardSpec, ShardTensor
from shard_optim._homes import Home
from shard_optim._runs import find_runs, flat_piece, piece_of

State = MutableMapping[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Slot:
    """A state tensor with one element for each of its parameter's, cut as that is.

    Attributes:
        name: what the state calls it.
        dtype: of its elements; the parameter's by default.
        joined: whether those of neighbours are updated as one flat tensor.
        moves: whether it lives where the optimizer's state is offloaded to.
    """

    name: str
    dtype: torch.dtype | None = None
    joined: ClassVar[bool] = True
    moves: ClassVar[bool] = True

    def dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype for a parameter. Local."""
        return param.dtype if self.dtype is None else self.dtype

    def numel_of(self, param: torch.Tensor) -> int:
        """Return how many elements this rank has for a parameter. Local."""
        return piece_of(param).numel()

    def shaped(self, flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Show ``[n]`` as state of a parameter, in the same order of memory. Local."""
        if isinstance(param, ShardTensor):
            return param.like(flat)
        return flat.as_strided(param.shape, param.stride())

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
    moves: ClassVar[bool] = False

    def numel_of(self, param: torch.Tensor) -> int:
        """Return how many elements every rank has for a parameter. Local."""
        return math.prod(self.shape_of(param))

    def shaped(self, flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Show ``[n]`` as state of a parameter. Local."""
        return flat.view(self.shape_of(param))

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

    def numel_of(self, param: torch.Tensor) -> int:
        """Return how many elements this rank has for a parameter: all or none. Local."""
        comm = self._comm_of(param)
        if comm is None:
            return math.prod(self.shape_of(param))
        spec = self._spec(param, comm)
        return spec.stop - spec.start

    def shaped(self, flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Show ``[n]`` as state of a parameter. Local."""
        comm = self._comm_of(param)
        if comm is None:
            return flat.view(self.shape_of(param))
        mesh = param.device_mesh if isinstance(param, ShardTensor) else None
        return ShardTensor(flat, self._spec(param, comm), comm=comm, mesh=mesh)

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


def allocate_slots(
    params: Sequence[torch.Tensor], state: State, slots: Sequence[Slot], home: Home
) -> None:
    """Make what is missing of the parameters' state: zeros, and step counters at 0.

    Where parameters lie side by side and none of them has a slot, theirs do so too. State that
    lies elsewhere than it should, or in another order than its parameter, is moved.

    Args:
        params: parameters.
        state: the optimizer's.
        slots: those that each of the parameters has.
        home: where slots live that move.

    Raises:
        OSError: there is no room for them; nothing was made.

    **Collective**: local. **Memory**: the slots of each parameter's piece.
    """
    wanted = [
        (slot, block)
        for slot in slots
        if slot.joined
        for block in _blocks(params, state, slot, home)
    ]
    wanted += [
        (slot, [param])
        for param in params  # all state of one side by side
        for slot in slots
        if not slot.joined and not _is_right(state[param].get(slot.name), param, slot, home)
    ]
    by_place: dict[tuple[torch.device, bool], list[tuple[Slot, list[torch.Tensor]]]] = {}
    for slot, block in wanted:
        by_place.setdefault((block[0].device, slot.moves), []).append((slot, block))
    made = [
        (slot, block, flat)
        for (device, moves), blocks in by_place.items()
        for (slot, block), flat in zip(
            blocks,
            (home if moves else Home()).zeros([_size_of(*each) for each in blocks], device),
            strict=True,
        )
    ]
    for param in params:  # the counter comes first
        if "step" not in state[param]:
            state[param]["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for slot, block, flat in made:
        sizes = [slot.numel_of(member) for member in block]
        for member, part in zip(block, flat.split(sizes), strict=True):
            old = state[member].get(slot.name)
            state[member][slot.name] = slot.shaped(part, member)
            if old is not None:
                state[member][slot.name].copy_(old)


def _blocks(
    params: Sequence[torch.Tensor], state: State, slot: Slot, home: Home
) -> Iterator[list[torch.Tensor]]:
    """Parameters whose slot is to be made: neighbours together, and those that are alone."""
    lacking = [p for p in params if not _is_right(state[p].get(slot.name), p, slot, home)]
    runs = find_runs([[flat_piece(p) for p in lacking]])
    empty = [row for row, p in enumerate(lacking) if not piece_of(p).numel()]
    for rows in [*runs, *([row] for row in empty)]:
        yield [lacking[row] for row in rows]


def _is_right(value: torch.Tensor | None, param: torch.Tensor, slot: Slot, home: Home) -> bool:
    """Whether state is there, where it should be and in its parameter's order."""
    if value is None:
        return False
    piece = piece_of(value)
    # The kernel goes by memory alone.
    ordered = piece.stride() == piece_of(param).stride() if slot.joined else piece.is_contiguous()
    return ordered and (home if slot.moves else Home()).holds(piece, param.device)


def _size_of(slot: Slot, block: Sequence[torch.Tensor]) -> tuple[int, torch.dtype]:
    return sum(slot.numel_of(member) for member in block), slot.dtype_of(block[0])


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
        dtype = slot.dtype_of(param)
        if not slot.fits(value, param) or value.dtype != dtype:
            wanted, there = piece_of(param).shape if slot.joined else slot.shape_of(param), value
            raise ValueError(
                f"{name_of(param)}: expected {slot.name} of shape {tuple(wanted)} and {dtype}, got "
                f"{tuple(piece_of(there).shape)} and {there.dtype}; the parameter changed under "
                f"its state, make a new optimizer"
            )
