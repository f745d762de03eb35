"""What the units of one root share: order, prefetching, and the end of backward."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable

from shard_fsdp._agree import Arrivals, agree_on_arrivals

if TYPE_CHECKING:
    from shard_fsdp._boundary import Call
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
        generation: counts forwards of the root and backwards; forwards of one generation are
            expected to be reached by one backward.
        is_last_backward: False leaves the last reduction in flight and keeps the recorded order,
            for another backward through the same forwards.
        max_flying: reductions in flight at once.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.is_last_backward = True
        self.max_flying = 1
        self.generation = 0
        self._depth = 0
        self._entered: list[Unit] = []  # in this forward, as they began
        self._expected: list[Unit] = []  # in the last one
        self._left: list[Unit] = []  # recorded for backward, as they ended
        self._ahead: set[Unit] = set()  # gathered before their forward
        self._ending: weakref.ref[_EndOfBackward] | None = None
        self._flying: list[ParamGroup] = []
        self._reduced: dict[ParamGroup, list[bool]] = {}

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

    # --- forward ---

    def enter_forward(self, unit: Unit) -> None:
        """Note that a unit's forward begins; the outermost one starts a new order.

        **Collective**: local, except after a backward that an exception cut short.
        """
        self._depth += 1
        if in_backward():
            return
        if self._depth == 1:
            self.recover()
            self.generation += 1
            self._expected, self._entered = self._entered, []
            self._left.clear()
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
            following = self._expected[at : at + 1] if same else []
        for each in following:
            if each.unshard():
                self._ahead.add(each)

    def leave_forward(self) -> None:
        """Note that a unit's forward ended, with or without an exception. Local."""
        self._depth -= 1
        if self._depth == 0 and self._ahead:
            for unit in self._ahead:
                unit.reshard()
            self._ahead.clear()

    def record(self, call: Call) -> None:
        """Append a forward to the order that backward will follow in reverse. Local."""
        call.generation = self.generation
        if not in_backward():
            call.position = len(self._left)
            self._left.append(call.unit)

    # --- backward ---

    def start_backward(self) -> None:
        """Have autograd call ``finish_backward`` when it is done, once per backward. Local."""
        self.recover()
        if self._ending is None:
            self._land()  # what the last backward left in flight
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
            logger.warning("the last backward did not finish; its gradients are dropped")
            self.reset()

    def prefetch_backward(self, call: Call) -> None:
        """Start gathering what ran before ``call``, or what its unit was told to. Collective."""
        explicit = call.unit.settings.backward_prefetch
        if explicit is not None:
            for unit in explicit:
                unit.unshard()
        elif 0 < call.position < len(self._left):
            self._left[call.position - 1].unshard()

    def reduce(self, group: ParamGroup) -> None:
        """Start reducing a group's gradients. Collective.

        The reduction before it, which ran beside this unit's backward, is waited for first: one
        buffer is in flight while the next one fills.
        """
        while len(self._flying) >= self.max_flying:
            self._flying.pop(0).reducer.finish()
        self._reduced[group] = self._seen(group)
        group.reducer.launch()
        self._flying.append(group)

    def finish_backward(self) -> None:
        """Reduce what is left, wait for everything, free full buffers. Collective.

        Raises:
            RuntimeError: a parameter got a gradient on some ranks only; raised on all of them.
        """
        for unit in reversed(self.units):
            unit.reduce_touched()
        complaints = []
        for config, arrivals in self._arrivals():
            verdict = agree_on_arrivals(arrivals, config.comm, config.replicas)
            for group in verdict.waiting:
                self.reduce(group)
            if verdict.complaint is not None:
                complaints.append(verdict.complaint)
        if self.is_last_backward:
            self._land()
            self._left.clear()
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
        self._left.clear()
        self._end_step()

    def _land(self) -> None:
        flying, self._flying = self._flying, []
        for group in flying:
            group.reducer.finish()

    def _end_step(self) -> None:
        self._reduced = {}
        self._ending = None
        self.generation += 1
        for unit in self.units:
            unit.end_step()

    def _seen(self, group: ParamGroup) -> list[bool]:
        """Which parameters got a gradient in this backward, reduced already or not."""
        arrived = group.reducer.arrived
        before = self._reduced.get(group, arrived)
        return [a or b for a, b in zip(arrived, before, strict=True)]

    def _arrivals(self) -> list[tuple[UnitConfig, list[Arrivals]]]:
        """What arrived, for each set of ranks that shares parameters, outer units first."""
        found: dict[tuple[int, int], tuple[UnitConfig, list[Arrivals]]] = {}
        for unit in reversed(self.units):
            if not unit.settings.sync_gradients:
                continue
            ranks = (id(unit.config.comm), id(unit.config.replicas))
            _, arrivals = found.setdefault(ranks, (unit.config, []))
            for group in unit.groups:
                if not group.was_trainable:
                    continue
                waiting = any(group.reducer.arrived)
                may_differ = unit.settings.zero_fill_unused
                arrivals.append(Arrivals(group, self._seen(group), waiting, may_differ))
        return list(found.values())


class _EndOfBackward:
    """The callback that autograd holds while a backward runs."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule.finish_backward()


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward. Local."""
    return torch._C._current_graph_task_id() != -1
