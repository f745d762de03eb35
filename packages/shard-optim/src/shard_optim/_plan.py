"""Which parameters one step updates together, and where their state lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from shard_optim._runs import find_runs, flat_piece, join, piece_of
from shard_optim._slots import SLOTS, State, allocate_slots, check_slots
from shard_optim._tails import Cut, Tails, plan_tails

_KEYS = ("step", *SLOTS)


@dataclass(frozen=True)
class Run:
    """Members that are updated as one flat tensor.

    Attributes:
        rows: their indices among the plan's members.
        offsets: where each one's gradient begins, in bytes from that of the first.
        nbytes: bytes of all of them.
    """

    rows: list[int]
    offsets: list[int]
    nbytes: int


@dataclass(frozen=True)
class Lane:
    """Runs of one dtype on one device: what one call of the kernel updates.

    Attributes:
        runs: how members are joined.
        params: the flat parameters.
        slots: the flat state tensors, by slot name.
        grads: how to cut the flat gradients.
        steps: the step counter of each part, 0-dim.
    """

    runs: list[Run]
    params: Cut
    slots: dict[str, Cut]
    grads: Tails
    steps: list[torch.Tensor]

    def join_grads(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the members' gradients to match ``params.parts``. Local."""
        cut = self.grads.cut([join([grads[row] for row in run.rows]) for run in self.runs])
        cut.load()
        return cut.parts

    def changed(self) -> list[Cut]:
        """Return everything that the kernel changes. Local."""
        return [self.params, *self.slots.values()]


@dataclass
class StepPlan:
    """Flat tensors of one parameter group, valid while members and memory stay as they are.

    Attributes:
        addresses: where the piece of each member was, a parameter that had a gradient.
        numels: elements of each one's piece.
        slots: each one's state tensors, the step counter first.
        lanes: calls of the kernel.
        counters: all step counters, one tensor per device; the states hold views.
        versions: the counters' versions after the last step. Others mean that somebody wrote
            into one.
        touched: what a step changes without autograd's noticing. A rank whose piece is empty
            must see the same change of version as the others, or they disagree on what is stale.
    """

    addresses: list[int]
    numels: list[int]
    slots: list[list[torch.Tensor]]
    lanes: list[Lane]
    counters: list[torch.Tensor]
    versions: list[int]
    touched: list[torch.Tensor]

    def holds(
        self,
        members: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, Mapping[str, Any]],
    ) -> bool:
        """Whether the plan fits these members, their gradients and their state. Local."""
        if [piece_of(m).data_ptr() for m in members] != self.addresses:
            return False
        if [g.numel() for g in grads] != self.numels:
            return False
        if [_version_of(counter) for counter in self.counters] != self.versions:
            return False
        for member, known in zip(members, self.slots, strict=True):  # no state, no member
            own = state.get(member)
            if own is None or not all(map(is_, map(own.get, _KEYS), known)):
                return False
        return all(_lie_alike(run, grads) for lane in self.lanes for run in lane.runs)

    def count(self) -> None:
        """Add one to every step counter. Local."""
        for counter in self.counters:
            counter.add_(1)
        self.versions = [_version_of(counter) for counter in self.counters]


def make_plan(
    members: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    state: State,
    *,
    name_of: Callable[[torch.Tensor], str],
) -> StepPlan:
    """Find runs and make the state that is missing.

    Args:
        members: parameters with a gradient.
        grads: this rank's piece of each gradient.
        state: the optimizer's; missing slots are added, step counters are moved into one tensor.
        name_of: gives a parameter's name, for errors.

    Raises:
        ValueError: a parameter changed its shape or dtype under its state.

    **Collective**: local.
    """
    for member in members:
        check_slots(member, state.get(member, {}), name_of)
    allocate_slots(members, state)
    pieces = [flat_piece(member) for member in members]
    slots = {slot: [flat_piece(state[m][slot]) for m in members] for slot in SLOTS}
    counters, counts = _count_together(members, state)
    by_kind: dict[tuple[torch.device, torch.dtype], list[list[int]]] = {}
    for rows in find_runs([pieces, grads, *slots.values()]):
        kind = pieces[rows[0]].device, pieces[rows[0]].dtype
        by_kind.setdefault(kind, []).extend(_split_by(rows, counts))
    lanes = []
    for joined in by_kind.values():
        flat = [join([pieces[row] for row in rows]) for rows in joined]
        params = plan_tails(flat)
        first_steps = [state[members[rows[0]]]["step"] for rows in joined]
        lane = Lane(
            runs=[_run(rows, grads) for rows in joined],
            params=params.cut(flat),
            slots={slot: _cut(column, joined) for slot, column in slots.items()},
            grads=plan_tails(flat),
            steps=[first_steps[i] for i in params.origin],
        )
        lanes.append(lane)
    return StepPlan(
        addresses=[piece.data_ptr() for piece in pieces],
        numels=[piece.numel() for piece in pieces],
        slots=[[state[member][key] for key in _KEYS] for member in members],
        lanes=lanes,
        counters=counters,
        versions=[_version_of(counter) for counter in counters],
        touched=[*members, *(piece for piece in pieces if not piece.numel())],
    )


def _count_together(
    members: Sequence[torch.Tensor], state: State
) -> tuple[list[torch.Tensor], list[float]]:
    """Move step counters into one tensor per device, so that adding to all is one call."""
    by_device: dict[torch.device, list[int]] = {}
    for row, member in enumerate(members):
        by_device.setdefault(member.device, []).append(row)
    counters, counts = [], [0.0] * len(members)
    for device, rows in by_device.items():
        steps = [state[members[row]]["step"] for row in rows]
        counter = torch.stack(
            [torch.as_tensor(s, dtype=torch.float32, device=device) for s in steps]
        )
        for row, count, step in zip(rows, counter.tolist(), counter.unbind(), strict=True):
            counts[row] = count
            state[members[row]]["step"] = step
        counters.append(counter)
    return counters, counts


def _cut(column: Sequence[torch.Tensor], joined: Sequence[Sequence[int]]) -> Cut:
    flats = [join([column[row] for row in rows]) for rows in joined]
    return plan_tails(flats).cut(flats)


def _run(rows: list[int], grads: Sequence[torch.Tensor]) -> Run:
    base = grads[rows[0]].data_ptr()
    offsets = [grads[row].data_ptr() - base for row in rows]
    return Run(rows, offsets, sum(grads[row].nbytes for row in rows))


def _lie_alike(run: Run, grads: Sequence[torch.Tensor]) -> bool:
    if len(run.rows) == 1:
        return True
    head = grads[run.rows[0]]
    base = head.data_ptr()
    if [grads[row].data_ptr() - base for row in run.rows] != run.offsets:
        return False
    # Neighbours by address may still be two allocations.
    used = head.storage_offset() * head.itemsize + run.nbytes
    return used <= head.untyped_storage().nbytes()


def _split_by(rows: Sequence[int], counts: Sequence[float]) -> list[list[int]]:
    """Cut a run where the step count changes."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and counts[parts[-1][-1]] == counts[row]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
