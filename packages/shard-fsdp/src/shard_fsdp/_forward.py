"""What surrounds one forward of a unit's module."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo  # torch._dynamo.disable without importing it yet
from torch.autograd.graph import Node

from shard_fsdp._boundary import Call, is_made_since, watch_inputs, watch_outputs
from shard_fsdp._unit import Unit
from shard_fsdp._walk import find_attributes, find_tensors, map_tensors

logger = logging.getLogger("shard_fsdp")


class ForwardRun:
    """One forward, from gathered parameters to resharded ones.

    Call ``enter``, then the forward, then ``leave``; ``fail`` after an exception in any of them.

    Args:
        unit: the unit.
        module: which of its modules runs.
        method: which of the module's methods.
    """

    @staticmethod
    def is_needed(unit: Unit) -> bool:
        """Whether a forward has to be surrounded at all: not inside of one where all is free."""
        return not (unit.is_exposed and unit.schedule.is_free)

    def __init__(self, unit: Unit, module: nn.Module, method: str) -> None:
        self._unit = unit
        self._module = module
        self._method = method
        self._call: Call | None = None
        self._inputs: list[Node] = []
        self._containers: list[Any] = []  # arguments that the forward may put tensors into
        self._first_stray = len(unit.schedule.strays)
        self._is_entered = self._is_open = False  # in the schedule, in the unit

    @_disable_dynamo
    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Gather, let the modules see full parameters, cast the inputs.

        Returns:
            ``(args, kwargs)`` for the forward.

        **Collective**: all ranks of the unit's comm.
        """
        unit = self._unit
        self._is_entered = True
        try:
            unit.schedule.enter_forward(unit, self._method)
            unit.expose()
            unit.active += 1
            self._is_open = True
            unit.schedule.prefetch_forward(unit)
        except BaseException:
            unit.schedule.is_in_step = False
            raise
        if not unit.to_run:
            unit.to_run.update(unit.modules)
        dtype = unit.config.mp_policy.param_dtype
        if dtype is not None and unit.config.mp_policy.cast_forward_inputs:
            args, kwargs = map_tensors(_caster(dtype), args), map_tensors(_caster(dtype), kwargs)
        # A forward that recomputes for a checkpoint feeds saved tensors to a graph that is
        # watched already.
        if torch.is_grad_enabled() and not unit.backward.is_running:
            self._call = unit.backward.new_call()
            args, kwargs = map_tensors(_view_of_leaf, args), map_tensors(_view_of_leaf, kwargs)
            tensors: list[torch.Tensor] = []
            find_tensors((args, kwargs), tensors)
            self._inputs = watch_inputs(self._call, tensors)
            values = (*args, *kwargs.values())
            self._containers = [v for v in values if not isinstance(v, torch.Tensor)]
        return args, kwargs

    @_disable_dynamo
    def leave(self, output: Any) -> Any:
        """Let the modules see sharded parameters, watch the outputs, free what may be freed.

        Returns:
            The output, cast where the policy says so.

        **Collective**: local.
        """
        unit = self._unit
        complaint = self._close()
        if complaint is not None:
            unit.reshard()
            raise RuntimeError(complaint)
        if unit.config.mp_policy.output_dtype is not None:
            output = map_tensors(_caster(unit.config.mp_policy.output_dtype), output)
        if unit.has_buffers:
            output = map_tensors(self._own_memory, output)
        tensors: list[torch.Tensor] = []
        all_seen = find_tensors(output, tensors)
        unit.keeps_full = any(unit.lends(t) for t in tensors)
        if self._call is not None:
            unit.keeps_full = unit.keeps_full or not all_seen
            if watch_outputs(self._call, tensors + self._find_strays(self._call)):
                unit.backward.add_call(self._call)
        self._end()
        return output

    @_disable_dynamo
    def fail(self, error: BaseException) -> None:
        """Undo ``enter`` after an exception; the module stays usable.

        What stays gathered is what stays so after a forward that ends well, as it may have on
        other ranks.

        **Collective**: as ``leave``, for ranks may be there, unless a collective raised.
        """
        unit = self._unit
        if not isinstance(error, Exception):  # nobody who interrupts wants to wait
            unit.schedule.is_in_step = False
        if self._is_open:
            _note_dtypes(unit, error)
            self._close()
        if self._is_entered:
            try:
                self._end(failed=True)
            except Exception:
                logger.exception("ranks parted after a forward raised %r", error)

    def _find_strays(self, call: Call) -> list[torch.Tensor]:
        """Tensors that this forward made and put elsewhere than into its output.

        They are looked for in the attributes of the unit's modules and in its arguments; those
        of units inside were found when these ended.
        """
        strays = self._unit.schedule.strays
        found: list[torch.Tensor] = []
        for module in self._unit.own_modules():
            find_attributes(module, found)
        if self._containers:
            find_tensors(self._containers, found)
        strays += [t for t in found if is_made_since(t, call.began_at)]
        return strays[self._first_stray :]

    def _own_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """An output that is a parameter, or a view of one, must outlive the full buffer."""
        return tensor.clone() if self._unit.lends(tensor) else tensor

    def _end(self, *, failed: bool = False) -> None:
        unit = self._unit
        unit.to_run.discard(self._module)
        if not unit.to_run:
            unit.end_forward()
        self._is_entered = False
        unit.schedule.leave_forward(unit, self._method, failed=failed)

    def _close(self) -> str | None:
        unit = self._unit
        self._is_open = False
        unit.active -= 1
        self._inputs = []
        complaint = unit.lost_change()
        unit.hide()
        return complaint


def _note_dtypes(unit: Unit, error: BaseException) -> None:
    """Name the innermost unit and its policy where torch says no more than that types differ.

    Errors have notes from Python 3.11 on. Which ones these are is told by a word of their text.
    """
    if sys.version_info < (3, 11) or not isinstance(error, RuntimeError):
        return
    if not unit.groups or "type" not in str(error) or hasattr(error, "__notes__"):
        return
    policy = unit.config.mp_policy
    groups = [group for each in unit.together() for group in each.groups]
    dtypes = {str(g.context.mp_policy.compute_dtype(g.layout.dtype)) for g in groups}
    error.add_note(
        f"{unit.name}: raised in a forward of its unit, with parameters of "
        f"{' and '.join(sorted(dtypes))} (rank {unit.comm.rank} of {unit.comm.size}) under "
        f"{policy}; buffers, and inputs that it does not cast, keep their dtype"
    )


def _view_of_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad and tensor.is_leaf else tensor


def _caster(dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return cast
