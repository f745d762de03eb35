"""Which parameters one step updates together, and where their state lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._runs import find_runs, join, piece_of
from shard_optim._tails import Cut, cut_tails

SLOTS = ("exp_avg", "exp_avg_sq")


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
class StepPlan:
    """Flat tensors of one parameter group, valid while members and memory stay as they are.

    Attributes:
        members: parameters that had a gradient when the plan was made.
        addresses: where each one's piece was.
        runs: how members are joined.
        params: the flat parameters, one per run.
        slots: the flat state tensors, by slot name.
        steps: one counter per run, 0-dim float32, shared by the run's members.
        empty: pieces without elements, which no run updates.
    """

    members: list[torch.Tensor]
    addresses: list[int]
    runs: list[Run]
    params: Cut
    slots: dict[str, Cut]
    steps: list[torch.Tensor]
    empty: list[torch.Tensor]

    def holds(self, members: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> bool:
        """Whether the plan fits these members and gradients. Local."""
        if len(members) != len(self.members):
            return False
        for member, known, address in zip(members, self.members, self.addresses, strict=True):
            if member is not known or _raw(member).data_ptr() != address:
                return False
        for run in self.runs:
            head = grads[run.rows[0]]
            base = head.data_ptr()
            for row, offset in zip(run.rows, run.offsets, strict=True):
                if grads[row].data_ptr() != base + offset:
                    return False
            # Neighbours by address may still be two allocations.
            used = head.storage_offset() * head.itemsize + run.nbytes
            if used > head.untyped_storage().nbytes():
                return False
        return True

    def join_grads(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients to match ``params.parts``. Local."""
        cut = cut_tails([join([grads[row] for row in run.rows]) for run in self.runs])
        cut.load()
        return cut.parts

    def part_steps(self) -> list[torch.Tensor]:
        """Return the step counters to match ``params.parts``. Local."""
        return [self.steps[i] for i in self.params.origin]

    def cuts(self) -> list[Cut]:
        """Return everything the kernel changes. Local."""
        return [self.params, *self.slots.values()]


def make_plan(
    members: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    state: dict[torch.Tensor, dict[str, Any]],
) -> StepPlan:
    """Find runs and make the state that is missing, flat where a run is new as a whole.

    Args:
        members: parameters with a gradient.
        grads: this rank's piece of each gradient.
        state: the optimizer's; missing slots are added, step counters are replaced by shared ones
            of the same value.

    **Collective**: local.
    """
    pieces = [piece_of(p) for p in members]
    for rows in find_runs([pieces, grads]):
        if not any("step" in state[members[row]] for row in rows):
            _allocate_together([members[row] for row in rows], state)
    for member in members:
        allocate_state(member, state[member])
    slots = {s: [piece_of(state[m][s]) for m in members] for s in SLOTS}
    counts = [float(state[m]["step"]) for m in members]
    joined = []
    for rows in find_runs([pieces, grads, *slots.values()]):
        joined.extend(_split_by(rows, counts))
    runs, steps = [], []
    for rows in joined:
        base = grads[rows[0]].data_ptr()
        offsets = [grads[row].data_ptr() - base for row in rows]
        runs.append(Run(rows, offsets, sum(grads[row].nbytes for row in rows)))
        step = state[members[rows[0]]]["step"].clone()
        steps.append(step)
        for row in rows:
            state[members[row]]["step"] = step

    def flatten(column: Sequence[torch.Tensor]) -> Cut:
        return cut_tails([join([column[row] for row in run.rows]) for run in runs])

    return StepPlan(
        members=list(members),
        addresses=[p.data_ptr() for p in pieces],
        runs=runs,
        params=flatten(pieces),
        slots={slot: flatten(column) for slot, column in slots.items()},
        steps=steps,
        empty=[p for p in pieces if not p.numel()],
    )


def allocate_state(param: torch.Tensor, state: dict[str, Any]) -> None:
    """Make a parameter's missing state, zeros, of its own memory. Local."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    for slot in SLOTS:
        if slot not in state:
            state[slot] = torch.zeros_like(param.detach(), memory_format=torch.preserve_format)


def _allocate_together(
    members: Sequence[torch.Tensor], state: dict[torch.Tensor, dict[str, Any]]
) -> None:
    pieces = [piece_of(m) for m in members]
    if len(members) == 1 or not all(isinstance(m, ShardTensor) for m in members):
        return
    for slot in SLOTS:
        flat = torch.zeros(
            sum(p.numel() for p in pieces), dtype=pieces[0].dtype, device=pieces[0].device
        )
        start = 0
        for member, piece in zip(members, pieces, strict=True):
            assert isinstance(member, ShardTensor)
            state[member][slot] = member.like(flat[start : start + piece.numel()])
            start += piece.numel()


def _split_by(rows: Sequence[int], counts: Sequence[float]) -> list[list[int]]:
    """Cut a run where the step count changes."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and counts[parts[-1][-1]] == counts[row]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardTensor) else tensor
