"""One unit: the modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import Comm, Work
from shard_fsdp._boundary import Call
from shard_fsdp._group import ParamGroup
from shard_fsdp._params import ManagedParam
from shard_fsdp._policy import MixedPrecisionPolicy, UnitSettings
from shard_fsdp._schedule import Schedule


class Unit:
    """The state of one unit between, in and after its forwards.

    Args:
        modules: the modules whose forwards the gathering surrounds.
        params: the parameters, in order.
        comm: the ranks to shard over.
        mesh: the mesh that sharded parameters report, if any.
        mp_policy: dtypes.
        settings: switches.

    Attributes:
        groups: one per dtype and trainability.
        schedule: shared with all units of the same root.
        active: forwards of its modules that are running now.
        to_run: modules that have not run yet since the unit was last gathered for a forward.
        keeps_full: its last forward returned an object that may hide tensors, so nothing would
            gather again before their backward; full parameters stay until the next forward.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Sequence[ManagedParam],
        *,
        comm: Comm,
        mesh: DeviceMesh | None,
        mp_policy: MixedPrecisionPolicy,
        settings: UnitSettings,
    ) -> None:
        self.modules = list(modules)
        self.comm = comm
        self.mp_policy = mp_policy
        self.settings = settings
        by_kind: dict[tuple[torch.dtype, bool], list[ManagedParam]] = {}
        for managed in params:
            kind = (managed.original.dtype, managed.original.requires_grad)
            by_kind.setdefault(kind, []).append(managed)
        self.groups = [
            ParamGroup(
                members,
                comm=comm,
                mesh=mesh,
                mp_policy=mp_policy,
                settings=settings,
                on_arrival=lambda: self.schedule.start_backward(),
            )
            for members in by_kind.values()
        ]
        self.schedule = Schedule(self)
        self.active = 0
        self.to_run: set[nn.Module] = set()
        self.keeps_full = False
        self._gathering: list[Work] = []
        self._is_full = False
        self._calls: WeakSet[Call] = WeakSet()
        self._open_calls = 0
        self._touched = False
        self._exposed = 0
        for group in self.groups:
            group.register_sharded()

    @property
    def reshards_after_forward(self) -> bool:
        """The setting, or its default: yes, except for the root."""
        setting = self.settings.reshard_after_forward
        return self.schedule.root is not self if setting is None else setting

    @property
    def in_backward(self) -> bool:
        """Whether backward is between the outputs and the inputs of one of its forwards."""
        return self._open_calls > 0

    def trainable_groups(self) -> list[ParamGroup]:
        """Return the groups with at least one parameter that requires a gradient. Local."""
        return [g for g in self.groups if any(p.requires_grad for p in g.sharded_params)]

    # --- gathering ---

    def unshard(self) -> None:
        """Start gathering, unless that was done and the shards have not changed. Collective."""
        if self._is_full and not any(group.is_stale() for group in self.groups):
            return
        self.wait_for_unshard()
        self._gathering = [group.unshard() for group in self.groups]
        self._is_full = True

    def wait_for_unshard(self) -> None:
        """Wait until the full parameters are there."""
        gathering, self._gathering = self._gathering, []
        try:
            for work in gathering:
                work.wait()
        except BaseException:
            self._is_full = False
            raise

    def reshard(self) -> None:
        """Free the full buffers. Local, except that a gather under way is waited for."""
        self.wait_for_unshard()
        if self._is_full:
            self._is_full = False
            for group in self.groups:
                group.reshard()

    def expose(self) -> None:
        """Gather, and let the modules see full parameters until as many calls of ``hide``.

        **Collective**: all ranks.
        """
        self._exposed += 1
        self.unshard()
        self.wait_for_unshard()
        if self._exposed == 1:
            for group in self.groups:
                group.register_full()

    def hide(self) -> None:
        """Undo one ``expose``: the last one lets the modules see sharded parameters. Local."""
        self._exposed -= 1
        if self._exposed == 0:
            for group in self.groups:
                group.register_sharded()

    # --- backward ---

    def add_call(self, call: Call) -> None:
        """Note a forward that autograd recorded. Local."""
        self._calls.add(call)
        self.schedule.record(call)

    def begin_backward(self, call: Call) -> None:
        """Backward has reached the outputs of ``call``. Collective."""
        self.schedule.start_backward()
        self._touched = True
        self._check_unchanged(call)
        if not call.begun:
            call.rewind()
            call.begun = True
            self._open_calls += 1
            self.expose()  # a checkpoint inside may run parts of the forward again
        self.schedule.prefetch_before(call)

    def end_backward(self, call: Call) -> None:
        """Backward has passed the inputs of ``call``. Collective."""
        call.begun = False
        call.done = True
        self._open_calls -= 1
        self.hide()
        if self._open_calls == 0 and self.settings.reshard_after_backward and not self.keeps_full:
            self.reshard()
        if all(each.done for each in self._calls):
            self.reduce_touched()

    def reduce_touched(self) -> None:
        """Reduce the gradients of a unit that this backward reached, if told to. Collective."""
        if self._touched and self.settings.sync_gradients:
            for group in self.trainable_groups():
                self.schedule.reduce(group)
        self._touched = False

    def end_step(self) -> None:
        """Be ready for the next forward. Local."""
        self._touched = False
        while self._open_calls:
            self._open_calls -= 1
            self.hide()
        self.to_run.clear()
        for call in self._calls:
            call.rewind()
        if self.settings.reshard_after_backward and not self.keeps_full:
            self.reshard()

    def _check_unchanged(self, call: Call) -> None:
        for group, version in zip(self.groups, call.versions, strict=True):
            if group.shard._version != version:
                raise RuntimeError(
                    f"{group.sharded_params[0].spec.name}: its group of parameters changed between "
                    f"forward and backward (rank {self.comm.rank} of {self.comm.size}); run "
                    f"backward before the optimizer's step, or run the forward again"
                )
