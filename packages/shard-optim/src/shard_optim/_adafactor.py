"""Adafactor: second moments of matrices by row and column."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_flat import GatherComm, ShardTensor, power_sum
from shard_optim._agree import CollectiveOptimizer, sharing
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._homes import Unit
from shard_optim._hyper import check_at_least_0, check_numbers, check_several
from shard_optim._offload import Offload
from shard_optim._rows import Rows, pack, unpack
from shard_optim._runs import flat_piece
from shard_optim._slots import Slot, WholeSlot
from shard_optim._together import counted, members_of
from shard_optim._window import Scratch, windows

States = Iterator[Sequence[torch.Tensor]]
"""Second moments of the vectors, a window at a time, of one parameter after another.

Where they are zipped with one parameter's windows, the windows come first: they end the loop
before anything of the next parameter is taken.
"""


def _slots(dtype: torch.dtype) -> tuple[tuple[Slot, ...], tuple[Slot, ...]]:
    rows, columns = WholeSlot("row_var", dtype, dims=(-1,)), WholeSlot("col_var", dtype, dims=(-2,))
    return (rows, columns), (Slot("variance", dtype),)


_SLOTS = {wide: _slots(wide) for wide in (torch.float32, torch.float64)}


class Adafactor(CollectiveOptimizer):
    """Adam's step with second moments of a whole matrix kept as one number per row and column.

    The rows and columns are those of the whole matrix, wherever ranks are cut. Results are those
    of ``torch.optim.Adafactor`` up to rounding. They do not depend on the number of ranks unless
    a sum lies within about 1e-15 of the middle between two numbers of the state's dtype.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: bound of the relative step, at least 0; a number or a scalar tensor.
        beta2_decay: at most 0; step ``t`` adds the share ``t ** beta2_decay`` of the new squares.
        eps: the root of the smallest second moment, None for the epsilon of the parameter's
            dtype, and the smallest norm of a parameter that steps are in proportion to.
        d: bound of the root mean square of an update, above 0.
        weight_decay: decoupled decay, at least 0.
        offload: where second moments of what is no matrix live between steps: with the parameters
            by default, or ``"cpu"``, ``"disk"`` or an ``Offload``. Those of matrices are few and
            stay. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements, is not
            contiguous or is not floating point; there is no such place to offload to.

    **Collective**: a step takes three small all_reduces per comm for all parameters together: what
    each rank could do, sums by row and column, and one number per parameter; and a fourth where
    state is on disk. State dictionaries are local.

    **Memory**: one number of 4 bytes per row and column of matrices, whole on each rank, and one
    per element of each piece of other parameters. A step takes at most nine windows in float32, or
    a mebibyte, and three times the sums by row and column in float64. Offloaded, what has an
    element per element is elsewhere. Here are ``Offload.window_bytes`` and, where that is less,
    three windows besides.

    **Source**: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
    2018.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-2,
        *,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
        }
        super().__init__(params, hyper, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        check_at_least_0(group, ("lr", "weight_decay"), where)
        check_numbers(group, ("beta2_decay", "d"), where)
        if not group["beta2_decay"] <= 0:
            raise ValueError(f"{where}expected beta2_decay <= 0, got {group['beta2_decay']}")
        if not group["d"] > 0:
            raise ValueError(f"{where}expected d > 0, got {group['d']}")
        eps = check_several(group, "eps", where, count=2, or_none=True)
        if not all(each is None or each >= 0 for each in eps) or eps[1] is None:
            raise ValueError(
                f"{where}expected eps of two numbers >= 0, the first perhaps None, got {eps}"
            )

    def _check_member(self, param: torch.Tensor, name: str, group: Group) -> None:
        if not param.is_contiguous():
            raise ValueError(
                f"{name}: expected rows side by side in memory, got strides {param.stride()}; make "
                f"the parameter from contiguous()"
            )

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        return _SLOTS[wide][0 if param.ndim > 1 else 1]

    def _switches(self) -> Mapping[str, Any]:
        return {"maximize": False}

    def _ranks_of(self, group: Group, param: torch.Tensor) -> GatherComm | None:
        return sharing(param)

    def _advance(self, jobs: Sequence[Job]) -> None:
        with counted(jobs):
            room = Scratch()
            members = members_of(jobs, self.state, _Member.of)
            units = [unit for member in members for unit in member.units()]
            sums = _reduced(members, [member.sums(room) for member in members])
            with self._home.streaming(units) as states:
                scales = [
                    member.learn(room, states, *each)
                    for member, each in zip(members, sums, strict=True)
                ]
            with self._home.streaming(units) as states:
                squares = [[member.update_square(room, states)] for member in members]
            totals = _reduced(members, squares)
            with self._home.streaming(units) as states:
                for member, scale, (total,) in zip(members, scales, totals, strict=True):
                    member.apply(scale, total, room, states)


@dataclass(frozen=True)
class _Member:
    """One rank's piece of a parameter, its gradient and its state."""

    param: torch.Tensor
    piece: torch.Tensor  # [n]
    grad: torch.Tensor  # [n]
    own: dict[str, Any]
    rows: Rows | None  # None for vectors and scalars
    group: Group

    @classmethod
    def of(
        cls, param: torch.Tensor, grad: torch.Tensor, own: dict[str, Any], group: Group
    ) -> _Member:
        piece = flat_piece(param).view(-1)
        start = param.spec.start if isinstance(param, ShardTensor) else 0
        rows = Rows(tuple(param.shape), start, start + piece.numel()) if param.ndim > 1 else None
        return cls(param, piece, grad.view(-1), own, rows, group)

    @property
    def step(self) -> float:
        return float(self.own["step"])

    def units(self) -> list[Unit]:
        """A vector's second moments, in the windows in which each pass takes them."""
        if self.rows is not None:
            return []
        moments = flat_piece(self.own["variance"])
        return [(self.piece.device, window) for window in windows([moments])]

    def sums(self, room: Scratch) -> list[torch.Tensor]:
        """What this piece adds to the parameter's square, and to squares by row and column."""
        square = power_sum([self.piece], 2.0)
        return [square, *(self.rows.square_sums(self.grad, room) if self.rows is not None else ())]

    def learn(
        self, room: Scratch, states: States, square: torch.Tensor, *sums: torch.Tensor
    ) -> torch.Tensor:
        """Update the second moments, and return the length of a step, float64."""
        share = self.step ** self.group["beta2_decay"]
        if self.rows is None:
            for (grad,), (moment,) in zip(windows([self.grad]), states, strict=False):
                new = room.take("new", grad, self._wide).copy_(grad)
                moment.mul_(1 - share).add_(new.mul_(new).mul_(share))
        else:
            for slot, total, count in zip(
                ("row_var", "col_var"),
                sums,
                (self.param.shape[-1], self.param.shape[-2]),
                strict=True,
            ):
                moment = self.own[slot]
                mean = (total / max(count, 1)).to(moment.dtype).view(moment.shape)
                moment.mul_(1 - share).add_(mean.mul_(share))
        rate = min(float(self.group["lr"]), 1 / math.sqrt(self.step))
        size = (square / max(self.param.numel(), 1)).sqrt()
        return size.clamp_min(self.group["eps"][1]).mul_(rate)

    def update_square(self, room: Scratch, states: States) -> torch.Tensor:
        """What this piece adds to the square of the update."""
        total = torch.zeros((), dtype=torch.float64, device=self.piece.device)
        for _, update in self.updates(room, states):
            squares = room.take("squares", update, torch.float64).copy_(update)
            total += squares.mul_(squares).sum()
        return total

    def apply(
        self, scale: torch.Tensor, square: torch.Tensor, room: Scratch, states: States
    ) -> None:
        """Move the parameter, given the step's length and the whole update's square."""
        size = (square / max(self.param.numel(), 1)).sqrt() / self.group["d"]
        factor = (scale / size.clamp_min(1.0)).to(self._wide)
        decay = 1 - float(self.group["lr"]) * self.group["weight_decay"]
        for place, update in self.updates(room, states):
            part = self.piece[place]
            value = room.wide("param", part)
            if decay != 1:
                value.mul_(decay)
            value.sub_(update.mul_(factor))
            if value is not part:
                part.copy_(value)

    def updates(self, room: Scratch, states: States) -> Iterator[tuple[slice, torch.Tensor]]:
        """The update before it is scaled, in windows: where, and its elements."""
        eps = self.group["eps"][0]
        floor = (torch.finfo(self.param.dtype).eps if eps is None else eps) ** 2
        if self.rows is None:
            place = 0
            for (grad,), (moment,) in zip(windows([self.grad]), states, strict=False):
                update = room.take("update", grad, self._wide)
                torch.clamp(moment, floor, out=update).rsqrt_()
                yield slice(place, place + grad.numel()), update.mul_(grad)
                place += grad.numel()
            return
        factored = _Factored.of(self.own, self.rows, floor)
        for first, last in self.rows.windows(self.piece.device):
            grad = self.rows.take(self.grad, first, last)
            update = factored.update(grad, first, last, room)
            begin = max(first * self.rows.columns, self.rows.start)
            end = min(last * self.rows.columns, self.rows.stop)
            offset = first * self.rows.columns
            yield (
                slice(begin - self.rows.start, end - self.rows.start),
                update.view(-1)[begin - offset : end - offset],
            )

    @property
    def _wide(self) -> torch.dtype:
        return torch.float64 if self.param.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class _Factored:
    """Second moments of whole matrices, a product of one number per row and one per column."""

    rows: Rows
    by_row: torch.Tensor  # [all rows, 1]
    by_column: torch.Tensor  # [matrices, columns]
    floor: float
    roots: tuple[torch.Tensor, torch.Tensor] | None  # inverse ones; None where the floor is used

    @classmethod
    def of(cls, own: dict[str, Any], rows: Rows, floor: float) -> _Factored:
        by_row, by_column = own["row_var"], own["col_var"].view(rows.matrices, rows.columns)
        mean = by_row.mean(dim=-2, keepdim=True).clamp_min(math.sqrt(floor))
        by_row = (by_row / mean).view(-1, 1)
        roots = None
        if by_row.numel() and by_column.numel():
            # The smallest products of all matrices, so that all ranks decide alike.
            least = by_row.view(rows.matrices, -1).amin(1) * by_column.amin(1)
            if bool((least >= floor).all()):
                roots = by_row.rsqrt(), by_column.rsqrt()
        return cls(rows, by_row, by_column, floor, roots)

    def update(self, grad: torch.Tensor, first: int, last: int, room: Scratch) -> torch.Tensor:
        """Divide the gradients of rows ``[first, last)`` by roots of second moments."""
        rows = self.rows
        which = rows.matrix_of(first, last, grad.device) if rows.matrices > 1 else slice(None)
        wide = self.by_row.dtype
        update = room.take("update", grad, wide)
        if self.roots is not None:
            torch.mul(room.wide("grad", grad), self.roots[0][first:last], out=update)
            return update.mul_(self.roots[1][which])
        root = room.take("root", grad, wide)
        torch.mul(self.by_row[first:last], self.by_column[which], out=root)
        root.clamp_min_(self.floor).rsqrt_()
        return torch.mul(room.wide("grad", grad), root, out=update)


def _reduced(
    members: Sequence[_Member], parts: Sequence[list[torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Add up parts over the ranks of sharded parameters, one collective per comm."""
    by_comm: dict[GatherComm, list[int]] = {}
    for index, member in enumerate(members):
        if isinstance(member.param, ShardTensor) and member.param.comm.size > 1:
            by_comm.setdefault(member.param.comm, []).append(index)
    result = list(parts)
    for comm, indices in by_comm.items():
        ours = [part for index in indices for part in parts[index]]
        flat = pack(ours)
        comm.all_reduce(flat)
        summed = iter(unpack(flat, ours))
        for index in indices:
            result[index] = [next(summed) for _ in parts[index]]
    return result
