"""What the units of one root share: order, prefetching, and the end of backward."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from shard_fsdp._agree import Arrivals, agree_on_arrivals

if TYPE_CHECKING:
    from shard_fsdp._boundary import Call
    from shard_fsdp._group import ParamGroup
    from shard_fsdp._unit import Unit

logger = logging.getLogger("shard_fsdp")


class Schedule:
    """Orders the collectives of all units below one root.

    All ranks launch the same collectives in the same order, because each launch happens at a
    point of the module graph (a unit's forward, its outputs or its inputs in backward, the end
    of backward) or after the ranks agreed on it. None depends on which gradients one rank
    happened to produce.

    Args:
        unit: the first unit; more join as their parents are wrapped.
    """

    def __init__(self, unit: Unit) -> None:
        self.units: list[Unit] = [unit]  # inner before outer
        self._depth = 0
        self._forwards: list[Unit] = []
        self._in_backward = False
        self._flying: ParamGroup | None = None
        self._reduced: dict[ParamGroup, list[bool]] = {}

    @property
    def root(self) -> Unit:
        """The outermost unit."""
        return self.units[-1]

    def adopt(self, other: Schedule) -> None:
        """Take over the units of ``other``, which lie inside this root. Local."""
        self.units[-1:-1] = other.units
        for unit in other.units:
            unit.schedule = self

    def enter_forward(self) -> None:
        """Note that a unit's forward begins; the outermost one starts a new order.

        **Collective**: local, except after a backward that an exception cut short.
        """
        self._depth += 1
        if self._depth == 1 and not in_backward():
            if self._in_backward:
                logger.warning("the last backward did not finish; its gradients are dropped")
                self.reset()
            self._forwards.clear()

    def leave_forward(self) -> None:
        """Note that a unit's forward ended, with or without an exception. Local."""
        self._depth -= 1

    def record(self, call: Call) -> None:
        """Append a forward to the order that backward will follow in reverse. Local."""
        if not in_backward():
            call.position = len(self._forwards)
            self._forwards.append(call.unit)

    def start_backward(self) -> None:
        """Have autograd call ``finish_backward`` when it is done, once per backward. Local."""
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self.finish_backward)

    def prefetch_before(self, call: Call) -> None:
        """Start gathering the unit that ran before ``call``. Collective."""
        if 0 < call.position < len(self._forwards):
            self._forwards[call.position - 1].unshard()

    def reduce(self, group: ParamGroup) -> None:
        """Start reducing a group's gradients. Collective.

        The reduction before it, which ran beside this unit's backward, is waited for first: one
        buffer is in flight while the next one fills.
        """
        if self._flying is not None:
            self._flying.reducer.finish()
        arrived = group.reducer.arrived
        before = self._reduced.get(group, arrived)
        self._reduced[group] = [a or b for a, b in zip(arrived, before, strict=True)]
        group.reducer.launch()
        self._flying = group

    def finish_backward(self) -> None:
        """Reduce what is left, wait for everything, free full buffers. Collective.

        Raises:
            RuntimeError: a parameter got a gradient on some ranks only; raised on all of them.
        """
        for unit in reversed(self.units):
            unit.reduce_touched()
        verdict = agree_on_arrivals(self._arrivals(), self.root.comm)
        for group in verdict.waiting:
            self.reduce(group)
        if self._flying is not None:
            self._flying.reducer.finish()
        self._end_step()
        if verdict.complaint is not None:
            raise RuntimeError(verdict.complaint)

    def reset(self) -> None:
        """Drop what a step left behind that an exception cut short.

        **Collective**: local, except that a reduction in flight is waited for.
        """
        for unit in self.units:
            for group in unit.groups:
                group.reducer.discard()
        self._end_step()

    def _end_step(self) -> None:
        self._flying = None
        self._reduced = {}
        self._forwards.clear()
        self._in_backward = False
        for unit in self.units:
            unit.end_step()

    def _arrivals(self) -> list[Arrivals]:
        found = []
        for unit in reversed(self.units):
            if not unit.settings.sync_gradients:
                continue
            for group in unit.trainable_groups():
                arrived = group.reducer.arrived
                before = self._reduced.get(group, arrived)
                seen = [a or b for a, b in zip(arrived, before, strict=True)]
                may_differ = unit.settings.zero_fill_unused
                found.append(Arrivals(group, seen, any(arrived), may_differ))
        return found


def in_backward() -> bool:
    """Whether this thread runs inside an autograd backward. Local."""
    return torch._C._current_graph_task_id() != -1
