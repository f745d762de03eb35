"""One unit in backward: gathered again, its gradients reduced, freed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_fsdp._boundary import Call
from shard_fsdp._schedule import in_backward

if TYPE_CHECKING:
    from shard_fsdp._path import Path
    from shard_fsdp._unit import Unit


class UnitBackward:
    """What backward does with one unit, and where it stands.

    Args:
        unit: the unit.

    Attributes:
        is_reached: the backward that runs came by.
        remakes_graph: a backward made a graph of itself, which holds full parameters.
    """

    def __init__(self, unit: Unit) -> None:
        self.is_reached = False
        self.remakes_graph = False
        self._unit = unit
        self._begun: list[Call] = []
        self._touched = False  # its gradients are to be reduced
        self._graph_is_spent = False

    @property
    def is_running(self) -> bool:
        """Whether backward is between the outputs and the inputs of one of its forwards."""
        return bool(self._begun)

    def new_call(self) -> Call:
        """Return a record of a forward that begins now. Local."""
        unit = self._unit
        call = Call(unit, [group.version for each in unit.together() for group in each.groups])
        if not in_backward():  # a checkpoint's forward again: its graph may never be run
            call.path = unit.schedule.path
            call.entered_at = call.path.enter(unit)
        return call

    def add_call(self, call: Call) -> None:
        """Note that autograd recorded a forward. Local."""
        if call.path is not None:
            call.left_at = call.path.leave(call.entered_at)

    def begin(self, call: Call) -> None:
        """Backward has reached the outputs of ``call``. Collective."""
        unit = self._unit
        unit.schedule.start_backward()
        if torch.is_grad_enabled():  # create_graph: the new graph holds full parameters
            self.remakes_graph = True
        in_time = call.path is None or unit.schedule.follow(call.path, call.left_at)
        self._touch()
        if not unit.settings.unshard_in_backward or call.begun:
            return
        self._check_unchanged(call)
        unit.expose(for_backward=True)  # a checkpoint inside may run parts of the forward again
        call.rewind()
        call.begun = True
        self._begun.append(call)
        if in_time:  # else the order has gone on, to where other ranks may not be
            unit.schedule.prefetch_backward(unit, call.path, call.left_at)

    def end(self, call: Call) -> None:
        """Backward has passed the inputs of ``call``. Collective."""
        call.rewind()
        self._begun.remove(call)
        if call.path is not None:
            self._unit.schedule.follow(call.path, call.entered_at - 1)
        else:
            self.pass_inputs(is_first=True)
        self._unit.hide()

    def pass_outputs(self, path: Path, left_at: int) -> None:
        """Do what ranks do whose backward reaches a forward's outputs; this one's does not.

        **Collective**: all ranks.
        """
        unit = self._unit
        self._touch()
        if unit.settings.unshard_in_backward:
            unit.unshard(for_backward=True)
            unit.schedule.prefetch_backward(unit, path, left_at)

    def pass_inputs(self, *, is_first: bool) -> None:
        """Free full parameters after a forward's backward; reduce after that of the first one.

        **Collective**: all ranks.
        """
        unit = self._unit
        if unit.settings.reshard_after_backward:
            unit.reshard()
        if is_first:
            for each in unit.together():
                each.backward.reduce_touched()

    def reduce_touched(self) -> None:
        """Reduce the gradients of the unit if this backward reached it, if told to. Collective."""
        unit = self._unit
        if self._touched and unit.settings.sync_gradients:
            for group in unit.trainable_groups():
                unit.schedule.reduce(unit, group)
        self._touched = False

    def end_step(self, *, remakes_graph: bool = False) -> None:
        """Be ready for the next forward. Local.

        Args:
            remakes_graph: the backward that ended made a graph of itself, so one more may come.
        """
        self._touched = self.is_reached = False
        begun, self._begun = self._begun, []
        for call in begun:
            call.rewind()
            self._unit.hide()
        self._unit.to_run.clear()
        self._graph_is_spent = self.remakes_graph and not remakes_graph
        if self._unit.settings.reshard_after_backward:
            self._unit.reshard()

    def begin_step(self) -> None:
        """Drop what only an earlier forward's graph needed. Local."""
        if self._graph_is_spent:
            self._graph_is_spent = self.remakes_graph = False
            if not self._unit.is_full:
                self._unit.reshard()

    def _touch(self) -> None:
        """Note that this backward came by, and whether gradients are to be reduced after it."""
        accumulates = self._unit.schedule.accumulates
        for each in self._unit.together():
            each.backward.is_reached = True
            each.backward._touched = each.backward._touched or accumulates

    def _check_unchanged(self, call: Call) -> None:
        comm = self._unit.comm
        groups = [group for each in self._unit.together() for group in each.groups]
        for group, version in zip(groups, call.versions, strict=True):
            if group.version != version:
                raise RuntimeError(
                    f"{group.sharded_params[0].spec.name}: its group of parameters changed between "
                    f"forward and backward (rank {comm.rank} of {comm.size}); run backward before "
                    f"the optimizer's step, or run the forward again"
                )
