"""Which parameters one step updates together, and where their state lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._homes import Home
from shard_optim._runs import find_runs, flat_piece, join, piece_of
from shard_optim._slots import Slot, State, allocate_slots, check_slots
from shard_optim._stage import GRAIN, Stage, Window
from shard_optim._tails import Cut, Tails, plan_tails


@dataclass(frozen=True)
class Run:
    """Members that are updated as one flat tensor.

    Attributes:
        rows: their indices among the plan's members.
        offsets: where each one's gradient begins, in bytes from that of the first.
        nbytes: bytes of all of them.
        span: which of their elements a lane has; None for all.
    """

    rows: list[int]
    offsets: list[int]
    nbytes: int
    span: slice | None = None

    def flat(self, column: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what the lane has of the members' tensors as one. Local."""
        whole = join([column[row] for row in self.rows])
        return whole if self.span is None else whole.view(-1)[self.span]


@dataclass(frozen=True)
class Lane:
    """Runs of one dtype on one device: what one call of the kernel updates.

    Attributes:
        runs: how members are joined.
        members: the plan's members, which the runs' rows count.
        params: the flat parameters.
        slots: the flat state tensors, by slot name.
        flats: the same, uncut, the parameters under ``"param"``.
        grads: how to cut the flat gradients.
        steps: the step counter of each part, 0-dim.
        counts: steps of each run before the plan.
        fresh: whether the first step of the plan is the first one of the members' state.
        window: how state that lives elsewhere comes to where ``slots`` and ``flats`` have it.
    """

    runs: list[Run]
    members: Sequence[torch.Tensor]
    params: Cut
    slots: dict[str, Cut]
    flats: dict[str, list[torch.Tensor]]
    grads: Tails
    steps: list[torch.Tensor]
    counts: list[float]
    fresh: bool
    window: Window | None = None

    def flat_grads(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return one flat gradient per run. Local."""
        return [run.flat(grads) for run in self.runs]

    def ranges(self, index: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield the members of a run and which of their elements the lane has. Local."""
        run, at = self.runs[index], 0
        for row in run.rows:
            member = self.members[row]
            numel = piece_of(member).numel()
            low, high = 0, numel
            if run.span is not None:
                low, high = max(run.span.start - at, 0), min(run.span.stop - at, numel)
            if low < high:
                start = member.spec.start if isinstance(member, ShardTensor) else 0
                yield member, start + low, start + high
            at += numel

    def join_grads(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the members' gradients to match ``params.parts``. Local."""
        cut = self.grads.cut(self.flat_grads(grads))
        cut.load()
        return cut.parts

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Have a kernel change the parameters and slots inside. Local."""
        cuts = [self.params, *self.slots.values()]
        for cut in cuts:
            cut.load()
        yield
        for cut in cuts:
            cut.store()


@dataclass
class StepPlan:
    """Flat tensors of one parameter group, valid while members and memory stay as they are.

    Attributes:
        keys: names of the state tensors, the step counter's first.
        addresses: where the piece of each member was, a parameter that had a gradient.
        numels: elements of each one's piece.
        slots: each one's state tensors, the step counter first.
        lanes: calls of the kernel.
        counters: all step counters, one tensor per device; the states hold views.
        versions: the counters' versions after the last step. Others mean that somebody wrote
            into one.
        touched: what a step changes without autograd's noticing: fused kernels count nothing, and
            who holds the memory behind pieces watches its version. A rank whose piece is empty must
            see a change too, or ranks disagree on what is stale.
        bases: a piece in each of the storages that a step changes.
        age: steps that were counted by this plan.
    """

    keys: tuple[str, ...]
    addresses: list[int]
    numels: list[int]
    slots: list[list[torch.Tensor]]
    lanes: list[Lane]
    counters: list[torch.Tensor]
    versions: list[int]
    touched: list[torch.Tensor]
    bases: list[torch.Tensor]
    age: int = 0

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
            if own is None or not all(map(is_, map(own.get, self.keys), known)):
                return False
        return all(_lie_alike(run, grads) for lane in self.lanes for run in lane.runs)

    def count(self) -> None:
        """Add one to every step counter. Local."""
        self.age += 1
        for counter in self.counters:
            counter.add_(1)
        self.versions = [_version_of(counter) for counter in self.counters]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell autograd of what is done inside, also where that fails half way. Local."""
        try:
            yield
        finally:
            torch.autograd.graph.increment_version(self.touched)


def make_plan(
    members: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    state: State,
    *,
    slots: Sequence[Slot],
    home: Home,
    name_of: Callable[[torch.Tensor], str],
) -> StepPlan:
    """Find runs and make the state that is missing.

    Args:
        members: parameters with a gradient.
        grads: this rank's piece of each gradient.
        state: the optimizer's; missing slots are added, step counters are moved into one tensor.
        slots: the state tensors that each of the members has.
        home: where they live.
        name_of: gives a parameter's name, for errors.

    Raises:
        ValueError: a parameter changed its shape or dtype under its state.
        OSError: there is no room for the state.

    **Collective**: local.
    """
    for member in members:
        check_slots(member, state.get(member, {}), slots, name_of)
    keys = ("step", *(slot.name for slot in slots))
    blank = [any(key not in state.get(member, {}) for key in keys) for member in members]
    allocate_slots(members, state, slots, home)
    pieces = [flat_piece(member) for member in members]
    joined = {
        slot.name: [flat_piece(state[m][slot.name]) for m in members]
        for slot in slots
        if slot.joined
    }
    counters, counts = _count_together(members, state)
    ages = [(count, new or count == 0) for count, new in zip(counts, blank, strict=True)]
    by_kind: dict[tuple[torch.device, torch.dtype, bool], list[list[int]]] = {}
    for rows in find_runs([pieces, grads, *joined.values()]):
        for part in _split_by(rows, ages):
            head = part[0]
            kind = pieces[head].device, pieces[head].dtype, ages[head][1]
            by_kind.setdefault(kind, []).append(part)
    builder = _Builder({"param": pieces, **joined}, grads, members, state, ages, home)
    return StepPlan(
        keys=keys,
        addresses=[piece.data_ptr() for piece in pieces],
        numels=[piece.numel() for piece in pieces],
        slots=[[state[member][key] for key in keys] for member in members],
        lanes=[lane for parts in by_kind.values() for lane in builder.lanes(parts)],
        counters=counters,
        versions=[_version_of(counter) for counter in counters],
        touched=[*members, *pieces],
        bases=list({piece.untyped_storage()._cdata: piece for piece in pieces}.values()),
    )


@dataclass
class _Builder:
    """What lanes are made of.

    Attributes:
        columns: flat tensors of all members, parameters and slots by name.
        grads: the members' gradients.
        members: the members.
        state: the optimizer's.
        ages: each member's step count, and whether its state is new.
        home: where state lives.
        staged: lanes so far whose state passes through a window, by the stage.
    """

    columns: Mapping[str, Sequence[torch.Tensor]]
    grads: Sequence[torch.Tensor]
    members: Sequence[torch.Tensor]
    state: State
    ages: Sequence[tuple[float, bool]]
    home: Home
    staged: dict[Stage, int] = field(default_factory=dict)

    def lanes(self, parts: list[list[int]]) -> Iterator[Lane]:
        """Yield the lanes of runs of one kind: one, or as many as windows are needed."""
        runs = [_run(rows, self.grads) for rows in parts]
        slots = [key for key in self.columns if key != "param"]
        stage = self.home.stage(self.grads[parts[0][0]].device) if slots else None
        if stage is None:
            yield self._lane(runs, {key: self._flats(runs, key) for key in self.columns}, None)
            return
        sizes = [self.columns[key][parts[0][0]].itemsize for key in slots]
        for spans in cut_windows(runs, [g.numel() for g in self.grads], stage.numel_of(sizes)):
            number = self.staged[stage] = self.staged.get(stage, -1) + 1
            window, near = stage.window(number, [self._flats(spans, key) for key in slots])
            flats = {"param": self._flats(spans, "param"), **dict(zip(slots, near, strict=True))}
            yield self._lane(spans, flats, window)

    def _flats(self, runs: Sequence[Run], key: str) -> list[torch.Tensor]:
        return [run.flat(self.columns[key]) for run in runs]

    def _lane(
        self, runs: list[Run], flats: dict[str, list[torch.Tensor]], window: Window | None
    ) -> Lane:
        tails = plan_tails(flats["param"])
        cuts = {key: plan_tails(column).cut(column) for key, column in flats.items()}
        heads = [run.rows[0] for run in runs]
        first_steps = [self.state[self.members[head]]["step"] for head in heads]
        return Lane(
            runs=runs,
            members=self.members,
            params=cuts.pop("param"),
            slots=cuts,
            flats=flats,
            grads=tails,
            steps=[first_steps[i] for i in tails.origin],
            counts=[self.ages[head][0] for head in heads],
            fresh=self.ages[heads[0]][1],
            window=window,
        )


def cut_windows(runs: Sequence[Run], numels: Sequence[int], room: int) -> Iterator[list[Run]]:
    """Cut runs into windows of so many elements, each but the last of a run at a whole vector.

    Worked example: runs of 300 and 100 elements and windows of 140 make windows of 128, of 128, of
    44 and 64, and of 36.
    """
    found: list[Run] = []
    left = room
    for run in runs:
        start, total = 0, sum(numels[row] for row in run.rows)
        while start < total:
            taken = total - start
            if taken > left:
                taken = left - left % GRAIN
            if taken:
                found.append(replace(run, span=slice(start, start + taken)))
                start, left = start + taken, left - taken
            if start < total:
                yield found
                found, left = [], room
    if found:
        yield found


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


def _split_by(rows: Sequence[int], ages: Sequence[tuple[float, bool]]) -> list[list[int]]:
    """Cut a run where the step count changes, or state that is new meets older."""
    parts: list[list[int]] = []
    for row in rows:
        if parts and ages[parts[-1][-1]] == ages[row]:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def _version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
