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
    """

    name: str
    dtype: torch.dtype | None = None
    joined: ClassVar[bool] = True

    def dtype_of(self, param: torch.Tensor) -> torch.dtype:
        """Return the dtype for a parameter. Local."""
        return param.dtype if self.dtype is None else self.dtype

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
        return torch.zeros(self.shape_of(param), dtype=self.dtype_of(param), device=param.device)

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
        home: where joined slots live.

    Raises:
        OSError: there is no room for them; nothing was made.

    **Collective**: local. **Memory**: the slots of each parameter's piece.
    """
    by_device: dict[torch.device, list[tuple[Slot, list[torch.Tensor]]]] = {}
    for slot in slots:
        if slot.joined:
            for block in _blocks(params, state, slot, home):
                by_device.setdefault(block[0].device, []).append((slot, block))
    made = [
        (slot, block, flat)
        for device, blocks in by_device.items()
        for (slot, block), flat in zip(
            blocks, home.zeros([_size_of(*block) for block in blocks], device), strict=True
        )
    ]
    for param in params:  # the counter comes first
        if "step" not in state[param]:
            state[param]["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for slot, block, flat in made:
        sizes = [piece_of(member).numel() for member in block]
        for member, part in zip(block, flat.split(sizes), strict=True):
            old = state[member].get(slot.name)
            state[member][slot.name] = _shaped(part, member)
            if old is not None:
                state[member][slot.name].copy_(old)
    for param in params:
        own = state[param]
        for slot in slots:
            if slot.name not in own:
                own[slot.name] = slot.blank(param)


def _blocks(
    params: Sequence[torch.Tensor], state: State, slot: Slot, home: Home
) -> Iterator[list[torch.Tensor]]:
    """Parameters whose slot is to be made: neighbours together, and those that are alone."""
    lacking = [p for p in params if not _is_right(state[p].get(slot.name), p, home)]
    runs = find_runs([[flat_piece(p) for p in lacking]])
    empty = [row for row, p in enumerate(lacking) if not piece_of(p).numel()]
    for rows in [*runs, *([row] for row in empty)]:
        yield [lacking[row] for row in rows]


def _is_right(value: torch.Tensor | None, param: torch.Tensor, home: Home) -> bool:
    """Whether state is there, where it should be and in its parameter's order."""
    if value is None:
        return False
    piece = piece_of(value)
    # The kernel goes by memory alone.
    return piece.stride() == piece_of(param).stride() and home.holds(piece, param.device)


def _size_of(slot: Slot, block: Sequence[torch.Tensor]) -> tuple[int, torch.dtype]:
    numel = sum(piece_of(member).numel() for member in block)
    return numel, slot.dtype_of(block[0])


def _shaped(flat: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Show ``[n]`` as state of a parameter, in the same order of memory."""
    if isinstance(param, ShardTensor):
        return param.like(flat)
    return flat.as_strided(param.shape, param.stride())


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
