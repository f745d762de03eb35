"""The methods of a wrapped module that say how its collectives run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shard_comm import Comm, GroupComm
from shard_fsdp._collectives import (
    AllGather,
    GroupMemoryAllGather,
    GroupMemoryReduceScatter,
    ReduceScatter,
    allocates_tensors,
    group_of,
)

if TYPE_CHECKING:
    from shard_fsdp._unit import Unit

logger = logging.getLogger("shard_fsdp")


class CommMethods:
    """Mixed into ``FSDPModule``; names and meaning are those of torch's FSDP2."""

    _shard_unit: Unit

    if TYPE_CHECKING:

        def _units(self, recurse: bool) -> Iterator[Unit]: ...

        def set_gradient_divide_factor(self, factor: float) -> None: ...

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Gather this unit's parameters by ``comm`` from now on. Collective: on all ranks alike.

        On one rank nothing is gathered and ``comm`` is not called.

        Args:
            comm: ``allocate(size, dtype=, device=)`` gives memory for one call, whose result is
                copied into the full buffer; ``comm(output_tensor, input_tensor, group, async_op)``
                gathers and returns a work to wait for, or None where it has waited.

        Raises:
            ValueError: the unit's comm has no process group to hand over.
            TypeError: ``comm`` has no ``allocate``, or cannot be called.

        **Memory**: a second full buffer of a group's while a gather is under way.
        """
        self._check_custom("set_custom_all_gather", comm)
        self._shard_unit.settings.all_gather = comm
        for group in self._shard_unit.groups:
            group.unmap()

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Reduce this unit's gradients by ``comm`` from now on. Collective: on all ranks alike.

        On one rank nothing is reduced and ``comm`` is not called.

        Args:
            comm: as for ``set_custom_all_gather``, with the argument ``op``, which is always a
                sum.

        Raises:
            ValueError: the unit's comm has no process group to hand over.
            TypeError: ``comm`` has no ``allocate``, or cannot be called.

        **Memory**: a second buffer of a group's gradients while its reduction is under way.
        """
        self._check_custom("set_custom_reduce_scatter", comm)
        self._shard_unit.settings.reduce_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Run this unit's collectives in memory that the process group allocates, or stop doing so.

        Where the group's backend has no allocator of its own (Gloo) it changes nothing.

        Raises:
            ValueError: custom collectives are set; they bring their own memory.

        **Memory**: as for custom collectives.
        """
        settings, comm = self._shard_unit.settings, self._shard_unit.comm
        ours = (GroupMemoryAllGather, GroupMemoryReduceScatter, type(None))
        if not isinstance(settings.all_gather, ours) or not isinstance(
            settings.reduce_scatter, ours
        ):
            raise ValueError(
                "set_allocate_memory_from_process_group_for_comm: custom collectives are set and "
                "bring their own memory; use one or the other"
            )
        settings.all_gather = settings.reduce_scatter = None
        if not enable or comm.size == 1:
            return
        if not allocates_tensors(comm):
            logger.info("%r has no allocator of its own; its collectives stay as they are", comm)
            return
        assert isinstance(comm, GroupComm)
        settings.all_gather = GroupMemoryAllGather(comm)
        settings.reduce_scatter = GroupMemoryReduceScatter(comm)

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Raise RuntimeError: full buffers are freed and refilled, symmetric memory has to stay."""
        raise RuntimeError(
            f"set_symm_mem_for_comm({backend!r}): full buffers here are freed and refilled and "
            f"cannot be symmetric memory; pass set_custom_all_gather() an object whose allocate() "
            f"returns such memory, and the result is copied out of it"
        )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Reduce gradients on a process group of their own, beside gathers, or stop doing so.

        Args:
            enable: whether to.
            recurse: also for the units inside this module; units on the same ranks share a group.

        **Collective**: all ranks, where groups are made.
        """
        made: dict[Comm, Comm] = {}
        for unit in self._units(recurse):
            settings = unit.settings
            if not enable:
                settings.reduce_comm = None
            elif settings.reduce_comm is None:
                if unit.comm not in made:
                    made[unit.comm] = unit.comm.split(0)
                settings.reduce_comm = made[unit.comm]

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted for programs that call it: reductions are sums here in any case."""

    def set_post_optim_event(self, event: Any) -> None:
        """Make the current stream, and so all gathers, wait for ``event``.

        Args:
            event: a ``torch.Event`` recorded after the optimizer's step.
        """
        event.wait()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Warn, and call ``set_gradient_divide_factor``, which took this name's place."""
        warnings.warn("use set_gradient_divide_factor instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def _check_custom(self, method: str, custom: Any) -> None:
        if not callable(custom) or not callable(getattr(custom, "allocate", None)):
            raise TypeError(
                f"{method}: expected a callable with a method allocate(), got {custom!r}"
            )
        if self._shard_unit.comm.size > 1:
            group_of(self._shard_unit.comm)
