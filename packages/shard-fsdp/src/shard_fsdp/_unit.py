"""One unit: the modules whose parameters are gathered together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import Comm, Work
from shard_fsdp._boundary import Call
from shard_fsdp._group import GroupContext, ParamGroup
from shard_fsdp._params import ManagedParam
from shard_fsdp._policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnitSettings
from shard_fsdp._schedule import Schedule, in_backward


@dataclass(frozen=True)
class UnitConfig:
    """What one call of ``fully_shard`` fixes for its units.

    Attributes:
        comm: the ranks to shard over.
        replicas: the ranks that hold the same pieces, in hybrid sharding.
        part_comm: the ranks to reshard to after forward, where those are not all.
        mesh: the mesh that sharded parameters report, if any.
        dp_dims: dimensions of DTensor parameters' meshes that are data-parallel.
        mp_policy: dtypes.
        offload_policy: where shards live.
        reshard_after_forward: the setting to begin with.
    """

    comm: Comm
    replicas: Comm | None
    part_comm: Comm | None
    mesh: DeviceMesh | None
    dp_dims: tuple[str, ...]
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool | None


class Unit:
    """The state of one unit between, in and after its forwards.

    Args:
        modules: the modules whose forwards the gathering surrounds.
        params: the parameters, in order.
        config: comms, dtypes and where shards live.

    Attributes:
        groups: one per dtype and trainability.
        settings: switches that may change between steps.
        schedule: shared with all units of the same root.
        active: forwards of its modules that are running now.
        to_run: modules that have not run yet since the unit was last gathered for a forward.
        keeps_full: its last forward returned an object that may hide tensors, so nothing would
            gather again before their backward, or that shows full parameters; they stay until the
            next forward.
    """

    def __init__(
        self, modules: Sequence[nn.Module], params: Sequence[ManagedParam], config: UnitConfig
    ) -> None:
        self.modules = list(modules)
        self.config = config
        self.settings = UnitSettings(reshard_after_forward=config.reshard_after_forward)
        self.schedule = Schedule()
        self.schedule.add(self)
        offload = config.offload_policy
        offloaded = isinstance(offload, CPUOffloadPolicy)
        context = GroupContext(
            comm=config.comm,
            replicas=config.replicas,
            mesh=config.mesh,
            dp_dims=config.dp_dims,
            device=torch.device("cpu") if offloaded else config.comm.device,
            pin_memory=isinstance(offload, CPUOffloadPolicy)
            and offload.pin_memory
            and config.comm.device.type == "cuda",
            mp_policy=config.mp_policy,
            settings=self.settings,
            on_arrival=self._on_arrival,
        )
        by_kind: dict[tuple[torch.dtype, bool, bool], list[ManagedParam]] = {}
        for managed in params:
            param = managed.original
            kind = (param.dtype, param.requires_grad, param.device.type == "meta")
            by_kind.setdefault(kind, []).append(managed)
        self.groups = [ParamGroup(members, context) for members in by_kind.values()]
        self._be_idle()
        for group in self.groups:
            group.register_sharded()

    def _be_idle(self) -> None:
        self.active = 0
        self.to_run: set[nn.Module] = set()
        self.keeps_full = False
        self._gathering: list[Work] = []
        self._is_full = False
        self._begun: list[Call] = []
        self._recorded = (0, 0)  # a generation, and how many of its calls have not ended
        self._touched = False
        self._remakes_graph = False
        self._users = 0
        self._is_exposed = False

    @property
    def comm(self) -> Comm:
        """The ranks that the unit is sharded over."""
        return self.config.comm

    @property
    def reshards_after_forward(self) -> bool:
        """The setting, or its default: yes, except for the root."""
        setting = self.settings.reshard_after_forward
        return self.schedule.root is not self if setting is None else setting

    @property
    def in_backward(self) -> bool:
        """Whether backward is between the outputs and the inputs of one of its forwards."""
        return bool(self._begun)

    @property
    def is_needed(self) -> bool:
        """Whether somebody outside may still read full parameters."""
        return self.keeps_full or self._remakes_graph

    @property
    def has_buffers(self) -> bool:
        """Whether full parameters live in buffers that are freed, and not in the shards."""
        return not all(group.aliased for group in self.groups)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a full buffer that will be freed. Local."""
        return any(group.lends(tensor) for group in self.groups)

    def trainable_groups(self) -> list[ParamGroup]:
        """Return the groups with at least one parameter that requires a gradient. Local."""
        return [g for g in self.groups if any(p.requires_grad for p in g.sharded_params)]

    def _on_arrival(self) -> None:
        self.schedule.start_backward()

    # --- gathering ---

    def unshard(self) -> bool:
        """Start gathering, unless that was done and the shards have not changed.

        Returns:
            Whether a gather was started.

        **Collective**: all ranks.
        """
        if not self._is_exposed:
            for group in self.groups:
                group.settle()
        if self._is_full and not any(group.is_stale for group in self.groups):
            return False
        self.wait_for_unshard()
        self._gathering = [group.unshard() for group in self.groups]
        self._is_full = True
        return True

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
        """Free the full buffers, unless a forward or a backward is using them.

        **Collective**: local, except that a gather under way is waited for.
        """
        self.wait_for_unshard()
        if self._is_full and not self._users:
            self._is_full = False
            for group in self.groups:
                group.reshard()

    def reshard_after_forward(self) -> None:
        """Free the full buffers, or all but a part of them. Local."""
        part = self.config.part_comm
        if part is None or not torch.is_grad_enabled():
            self.reshard()
            return
        self.wait_for_unshard()
        if self._is_full:
            self._is_full = False
            for group in self.groups:
                group.reshard_partly(part)

    def expose(self) -> None:
        """Gather, and let the modules see full parameters until as many calls of ``hide``.

        **Collective**: all ranks.
        """
        self._users += 1
        self.unshard()
        self.wait_for_unshard()
        if not self._is_exposed:
            self._is_exposed = True
            for group in self.groups:
                group.register_full()

    def hide(self) -> str | None:
        """Undo one ``expose``: the last one lets the modules see sharded parameters.

        Returns:
            What is wrong if the modules changed a full parameter, a change that is lost.

        **Collective**: local.
        """
        self._users -= 1
        complaint = None
        if self._users == 0 and self._is_exposed:
            self._is_exposed = False
            for group in self.groups:
                complaint = complaint or group.lost_change()
                group.register_sharded()
        return complaint

    # --- backward ---

    def add_call(self, call: Call) -> None:
        """Note a forward that autograd recorded. Local."""
        self.schedule.record(call)
        if in_backward():
            return  # a checkpoint's forward again, whose graph may never be run
        self._recorded = (call.generation, self._unended(call.generation) + 1)

    def _unended(self, generation: int) -> int:
        """How many forwards of this generation have not ended.

        They are counted, since which of them are still alive may differ between ranks.
        """
        return self._recorded[1] if self._recorded[0] == generation else 0

    def begin_backward(self, call: Call) -> None:
        """Backward has reached the outputs of ``call``. Collective."""
        self.schedule.start_backward()
        self._touched = True
        self._remakes_graph = torch.is_grad_enabled()  # create_graph: it holds full parameters
        if not self.settings.unshard_in_backward or call.begun:
            return
        self._check_unchanged(call)
        call.rewind()
        call.begun = True
        self._begun.append(call)
        self.expose()  # a checkpoint inside may run parts of the forward again
        self.schedule.prefetch_backward(call)

    def end_backward(self, call: Call) -> None:
        """Backward has passed the inputs of ``call``. Collective."""
        call.rewind()
        self._begun.remove(call)
        self.hide()
        if not self._begun and self._reshards_after_backward:
            self.reshard()
        generation = self.schedule.generation
        if call.generation == generation and call.position >= 0:
            self._recorded = (generation, self._unended(generation) - 1)
        if self._unended(generation) == 0:
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
        begun, self._begun = self._begun, []
        for call in begun:
            call.rewind()
            self.hide()
        self.to_run.clear()
        if self._reshards_after_backward:
            self.reshard()

    @property
    def _reshards_after_backward(self) -> bool:
        return self.settings.reshard_after_backward and not self.is_needed

    def _check_unchanged(self, call: Call) -> None:
        for group, version in zip(self.groups, call.versions, strict=True):
            if group.version != version:
                raise RuntimeError(
                    f"{group.sharded_params[0].spec.name}: its group of parameters changed between "
                    f"forward and backward (rank {self.comm.rank} of {self.comm.size}); run "
                    f"backward before the optimizer's step, or run the forward again"
                )

    # --- copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> Unit:
        """Copy shards and settings; share comms; leave graphs and gathered buffers behind."""
        if id(self) in memo:
            known: Unit = memo[id(self)]
            return known
        new = object.__new__(Unit)
        memo[id(self)] = new
        new.config = self.config
        new.settings = replace(self.settings, forward_prefetch=None, backward_prefetch=None)
        new.schedule = self.schedule.copy_for(new, self, memo)
        new.modules = [copy.deepcopy(m, memo) for m in self.modules]
        context = (
            replace(self.groups[0].context, settings=new.settings, on_arrival=new._on_arrival)
            if self.groups
            else None
        )
        new.groups = [g.copy(context, memo) for g in self.groups if context is not None]
        new._be_idle()
        return new
