"""What the units of one root share: order, prefetching, and the end of backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from shard_comm import Comm
from shard_fsdp._agree import (
    Arrivals,
    Trail,
    agree_on_any,
    agree_on_arrivals,
    check_same_model,
    check_trail,
)
from shard_fsdp._boundary import reaches_a_leaf
from shard_fsdp._path import Path

if TYPE_CHECKING:
    from shard_fsdp._group import ParamGroup
    from shard_fsdp._unit import Unit, UnitConfig

logger = logging.getLogger("shard_fsdp")


class Schedule:
    """Orders the collectives of all units below one root.

    All ranks launch the same collectives in the same order, because each launch happens at a
    point of the module graph (a unit's forward, its outputs or its inputs in backward, the end
    of backward) or after the ranks agreed on it. None depends on which gradients one rank
    happened to produce.

    Attributes:
        units: all of them, inner before outer.
        is_free: nothing is ever gathered or cast, so all units go together with the outermost one.
        accumulates: the backward that runs accumulates gradients of some parameters.
        path: of the outermost forward that runs, or ran last.
        pauses: counts ends of outermost forwards and of backwards; between them shards may change.
        is_in_step: no collective raised in the outermost forward that runs, and nobody interrupted
            it, so other ranks may be in the same one.
        is_last_backward: False leaves the last reduction in flight, for another backward.
        strays: tensors with a graph that the forwards that run now put elsewhere than into their
            outputs.
        max_flying: reductions in flight at once.
        forward_depth: how many units are gathered ahead of the one that runs forward.
        backward_depth: the same in backward.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.is_in_step = True
        self.is_last_backward = True
        self.max_flying = 1
        self.forward_depth = self.backward_depth = 1
        self.strays: list[torch.Tensor] = []
        self.is_free = False
        self.accumulates = False
        self.path = Path()
        self.pauses = 0
        self._depth = 0
        self._entered: list[Unit] = []  # in this forward, as they began
        self._expected: list[Unit] = []  # in the last one of its kind that ended well
        self._orders: dict[tuple[Unit, str], list[Unit]] = {}  # of each kind
        self._followed: list[Path] = []  # by the backward that runs
        self._ahead: set[Unit] = set()  # gathered before their forward
        self._ending: weakref.ref[_EndOfBackward] | None = None
        self._flying: list[ParamGroup] = []
        self._reduced: dict[ParamGroup, list[bool]] = {}
        self._remakes_graph = False  # the backward that runs
        self._trails: dict[tuple[int, int], Trail] = {}

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[-1]

    def add(self, unit: Unit) -> None:
        """Append a unit that is outside of all units so far. Local."""
        self.units.append(unit)

    def adopt(self, other: Schedule) -> None:
        """Take over the units of ``other``, which lie inside this root. Local."""
        self.units[-1:-1] = other.units
        for unit in other.units:
            unit.schedule = self

    def copy_for(self, new: Unit, old: Unit, memo: dict[int, Any]) -> Schedule:
        """Return the schedule that copies of these units share, with ``new`` put in. Local."""
        schedule: Schedule | None = memo.get(id(self))
        if schedule is None:
            schedule = memo[id(self)] = Schedule()
        schedule.units.append(new)
        order = {id(memo[id(u)]): i for i, u in enumerate(self.units) if id(u) in memo}
        schedule.units.sort(key=lambda u: order[id(u)])
        return schedule

    def compare(self, unit: Unit) -> None:
        """Make sure, before a gather, that the ranks that share ``unit`` have the same units.

        Raises:
            RuntimeError: they have not; on all of them.

        **Collective**: all ranks of the unit.
        """
        alike = [each for each in self.units if _ranks_of(each) == _ranks_of(unit)]
        check_same_model(alike, unit.config.comm, unit.config.replicas)
        for each in alike:
            each.is_compared = True

    # --- forward ---

    def enter_forward(self, unit: Unit, method: str) -> None:
        """Note that a unit's forward begins; the outermost one starts a new order.

        Args:
            unit: the unit.
            method: which of its module's methods runs.

        **Collective**: local, except after a backward that an exception cut short.
        """
        self._depth += 1
        if in_backward():
            return
        if self._depth == 1:
            self.is_in_step = True
            self.recover()
            for each in self.units:
                each.backward.begin_step()
            self._drop_stale()
            for trail in self._trails.values():
                trail.begun_at = trail.count
            self.is_free = all(each.is_free for each in self.units)
            self.path = Path()
            self._expected, self._entered = self._orders.get((unit, method), []), []
        self._entered.append(unit)
        self._ahead.discard(unit)

    def prefetch_forward(self, unit: Unit) -> None:
        """Start gathering what is expected to run after ``unit``. Collective."""
        if in_backward():
            return
        if unit.settings.forward_prefetch is not None:
            following = unit.settings.forward_prefetch
        else:
            at = len(self._entered)
            same = self._expected[:at] == self._entered
            following = self._expected[at : at + self.forward_depth] if same else []
        for each in following:
            if each.unshard():
                self._ahead.add(each)

    def leave_forward(self, unit: Unit, method: str, *, failed: bool) -> None:
        """Note that a unit's forward ended.

        When the outermost one ends, all that was left gathered for modules that never ran is
        freed, and without gradients the root as well: no backward follows, at whose end ranks
        would find out that they ran different units.

        Args:
            unit: the unit.
            method: which of its module's methods ran.
            failed: it raised. Other ranks may go on, so this one does what they did the last time.

        Raises:
            RuntimeError: the ranks ran different units without gradients; on all of them.

        **Collective**: all ranks where they read each other's shards, and without gradients where
        it gathered something; else local. Where a collective raised it is local.
        """
        self._depth -= 1
        if self._depth or in_backward():
            return
        if not failed:
            self._orders[unit, method] = self._entered
        elif self.is_in_step:
            self._go_on()
        self.pauses += 1
        self.strays.clear()
        for each in (*self._ahead, *(u for u in self._entered if u.to_run)):
            each.end_forward()
        self._ahead.clear()
        if not torch.is_grad_enabled() and self.root.settings.reshard_after_forward is None:
            self.root.reshard()
        if failed and not self.is_in_step:  # all that raised begin the next forward alike
            for each in self.units:
                each.reshard()
            return
        self._meet([] if torch.is_grad_enabled() else self._check_trails())

    def _go_on(self) -> None:
        """Gather and free what the last such forward did behind the place where this one raised.

        Where all ranks raised they do it for nothing. A forward of other units than the last one,
        and the first of its kind, say nothing about what other ranks do.

        **Collective**: all ranks.
        """
        at = len(self._entered)
        following = self._expected[at:] if self._expected[:at] == self._entered else []
        for unit in following:
            self._entered.append(unit)
            self._ahead.discard(unit)
            if unit.comm.size == 1 and unit.config.replicas is None:
                continue
            unit.unshard()
            self.prefetch_forward(unit)
            unit.to_run.update(() if unit.to_run else unit.modules)
            unit.to_run.pop()
            if not unit.to_run:
                unit.end_forward()

    def _drop_stale(self) -> None:
        """Reshard what was kept gathered since an earlier step and has changed on some rank.

        **Collective**: all ranks where something was kept, else local.
        """
        kept = [u for u in self.units if u.is_full and u.gathered_in != self.pauses]
        for unit in kept:
            unit.settle()
        for config, units in _by_ranks(kept):
            stale = agree_on_any(
                [unit.may_be_stale for unit in units],
                config.comm,
                config.replicas,
                name="the start of a forward",
            )
            for unit, drop in zip(units, stale, strict=True):
                if drop:
                    unit.reshard()

    def _meet(self, met: Sequence[Comm]) -> None:
        """Wait for the ranks that read this one's shards, which may be written afterwards.

        Args:
            met: comms whose ranks have just waited for each other.

        **Collective**: all ranks where they read each other's shards, else local.
        """
        groups = (group for unit in self.units for group in unit.groups)
        for comm in dict.fromkeys(group.comm for group in groups if group.exposes_shard):
            if comm not in met:
                comm.barrier()

    def _check_trails(self) -> list[Comm]:
        """Raise where ranks ran different units; return the comms whose ranks were asked."""
        asked = []
        for config, units in _by_ranks(self.units):
            trail = self.trail_of(units[0])
            if trail.count > trail.begun_at:  # what is full already may run on one rank alone
                check_trail(trail, config.comm, config.replicas)
                asked.append(config.comm)
        return asked

    def trail_of(self, unit: Unit) -> Trail:
        """Return the record of collectives among the ranks that share ``unit``. Local."""
        return self._trails.setdefault(_ranks_of(unit), Trail())

    # --- backward ---

    def start_backward(self) -> None:
        """Have autograd call ``finish_backward`` when it is done, once per backward. Local."""
        self.recover()
        if self._ending is None:
            self._land()  # what the last backward left in flight
            self._remakes_graph = torch.is_grad_enabled()
            groups = (group for unit in self.units for group in unit.groups)
            self.accumulates = (
                any(group.expects_gradients() for group in groups) or reaches_a_leaf()
            )
            ending = _EndOfBackward(self)
            self._ending = weakref.ref(ending)
            Variable._execution_engine.queue_callback(ending)

    def recover(self) -> None:
        """Drop what a backward left behind that an exception cut short.

        Autograd holds the callback for as long as its backward lives, so a callback that is gone
        without having been called tells.

        **Collective**: local, except that a reduction in flight is waited for.
        """
        if self._ending is not None and self._ending() is None:
            lost = [u.name for u in self.units if any(any(g.reducer.arrived) for g in u.groups)]
            logger.warning(
                "the last backward did not finish: gradients that were not reduced yet are "
                "dropped, those of earlier microbatches too (units of %s)",
                ", ".join(lost[:8]) + (", ..." if len(lost) > 8 else "") if lost else "none",
            )
            self.reset()

    def follow(self, path: Path, number: int) -> bool:
        """Follow a path in backward, as all ranks do; False if it is passed already. Collective."""
        if path not in self._followed:
            self._followed.append(path)
        return path.follow(number)

    def prefetch_backward(self, unit: Unit, path: Path | None, left_at: int) -> None:
        """Start gathering what ran before, or what the unit was told to. Collective."""
        following = unit.settings.backward_prefetch
        if following is None:
            following = path.before(left_at, self.backward_depth) if path is not None else []
        for each in following:
            each.unshard(for_backward=True)

    def reduce(self, unit: Unit, group: ParamGroup) -> None:
        """Start reducing a group's gradients. Collective.

        The reduction before it, which ran beside this unit's backward, is waited for first: one
        buffer is in flight while the next one fills.
        """
        while len(self._flying) >= self.max_flying:
            self._flying.pop(0).reducer.finish()
        self._reduced[group] = self._seen(group)
        self.trail_of(unit).append(f"reduce {unit.name}")
        group.reducer.launch()
        self._flying.append(group)

    def finish_backward(self) -> None:
        """Reduce what is left, wait for everything, free full buffers. Collective.

        Raises:
            RuntimeError: a parameter got a gradient on some ranks only; raised on all of them.
        """
        for path in self._followed:
            path.follow(-1)
        for unit in reversed(self.units):
            unit.backward.reduce_touched()
        complaints = []
        for unit in self.units:
            if not unit.settings.sync_gradients:
                for group in unit.trainable_groups():
                    group.reducer.accumulate()
        syncing = _by_ranks(u for u in reversed(self.units) if u.settings.sync_gradients)
        for config, units in syncing:
            arrivals = self._arrivals(units)
            trail = self.trail_of(units[0])
            verdict = agree_on_arrivals(arrivals, trail, config.comm, config.replicas)
            for arrival in verdict.waiting:
                self.reduce(arrival.unit, arrival.group)
            if verdict.complaint is not None:
                complaints.append(verdict.complaint)
        if self.is_last_backward:
            self._land()
        self._meet([config.comm for config, _ in syncing])
        self._end_step()
        if complaints:
            raise RuntimeError("; ".join(complaints))

    def reset(self) -> None:
        """Drop what a step left behind that an exception cut short.

        **Collective**: local, except that a reduction in flight is waited for.
        """
        for unit in self.units:
            for group in unit.groups:
                group.reducer.discard()
        self._flying = []
        self._end_step()

    def _land(self) -> None:
        flying, self._flying = self._flying, []
        for group in flying:
            group.reducer.finish()

    def _end_step(self) -> None:
        self._reduced = {}
        self._ending = None
        self.pauses += 1
        for path in self._followed:
            path.rewind()
        self._followed.clear()
        for unit in self.units:
            unit.backward.end_step(remakes_graph=self._remakes_graph)

    def _seen(self, group: ParamGroup) -> list[bool]:
        """Which parameters got a gradient in this backward, reduced already or not."""
        arrived = group.reducer.arrived
        before = self._reduced.get(group, arrived)
        return [a or b for a, b in zip(arrived, before, strict=True)]

    def _arrivals(self, units: list[Unit]) -> list[Arrivals]:
        """What arrived at the groups that may be trained."""
        return [
            Arrivals(
                unit,
                group,
                seen=self._seen(group),
                waiting=any(group.reducer.arrived),
                may_differ=unit.settings.zero_fill_unused,
            )
            for unit in units
            for group in unit.groups
            if group.was_trainable
        ]


class _EndOfBackward:
    """The callback that autograd holds while a backward runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule.finish_backward()


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward. Local."""
    return torch._C._current_graph_task_id() != -1


def _ranks_of(unit: Unit) -> tuple[int, int]:
    return id(unit.config.comm), id(unit.config.replicas)


def _by_ranks(units: Iterable[Unit]) -> list[tuple[UnitConfig, list[Unit]]]:
    """Units by the set of ranks that shares them, both in the order given."""
    found: dict[tuple[int, int], tuple[UnitConfig, list[Unit]]] = {}
    for unit in units:
        found.setdefault(_ranks_of(unit), (unit.config, []))[1].append(unit)
    return list(found.values())
