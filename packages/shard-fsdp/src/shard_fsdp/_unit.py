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
from shard_fsdp._backward import UnitBackward
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
        is_full: all ranks gathered it and have not resharded it since.
        gathered_in: the schedule's count of pauses when it was gathered.
        has_storage: its full buffers hold something, gathered or on the way.
        is_exposed: its modules see full parameters.
        is_compared: its ranks were found to have the same units.
        backward: what the backward that runs does with it.
        keeps_full: its last forward returned an object that may hide tensors, so nothing would
            gather again before their backward, or that shows full parameters; the storage stays
            until the next forward, though the unit counts as resharded, as it may on other ranks.
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
        self.is_full = False
        self.is_compared = False
        self.gathered_in = 0
        self.has_storage = False
        self._gathering: list[Work] = []
        self._own_modules: list[nn.Module] | None = None
        self._users = 0
        self.is_exposed = False
        self.backward = UnitBackward(self)

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
    def has_buffers(self) -> bool:
        """Whether full parameters live in buffers that are freed, and not in the shards."""
        return not all(group.aliased for group in self.groups)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a full buffer that will be freed. Local."""
        return any(group.lends(tensor) for group in self.groups)

    def own_modules(self) -> list[nn.Module]:
        """Return the modules inside that a user wrote, without those of units inside. Local."""
        if self._own_modules is None:
            others = {id(m) for u in self.schedule.units if u is not self for m in u.modules}
            self._own_modules, pending = [], list(self.modules)
            while pending:
                module = pending.pop()
                if not type(module).__module__.startswith("torch.nn.modules."):
                    self._own_modules.append(module)
                pending += [c for c in module.children() if id(c) not in others]
        return self._own_modules

    def trainable_groups(self) -> list[ParamGroup]:
        """Return the groups with at least one parameter that requires a gradient. Local."""
        return [g for g in self.groups if any(p.requires_grad for p in g.sharded_params)]

    def _on_arrival(self) -> None:
        self.schedule.start_backward()
        missing = self._gathering or not self.has_storage
        if not self.backward.is_reached and missing and self.has_buffers:
            raise RuntimeError(
                f"{self.name}: a gradient came back that did not pass through the outputs of its "
                f"forward (rank {self.comm.rank} of {self.comm.size}), so the parameters may have "
                f"been read before they were gathered; return what the loss depends on from "
                f"forward, or call set_reshard_after_forward(False)"
            )

    @property
    def name(self) -> str:
        """The name of its first parameter, for messages; a unit without any has none."""
        return self.groups[0].sharded_params[0].spec.name

    # --- gathering ---

    def unshard(self, *, for_backward: bool = False) -> bool:
        """Start gathering, unless that was done.

        Args:
            for_backward: gather from the smaller group that forward resharded to, if any.

        Returns:
            Whether a gather was started.

        **Collective**: all ranks.
        """
        if self.is_full:
            return False
        if not self.is_exposed:
            self.settle()
        self.wait_for_unshard()
        if not self.is_compared:
            self.schedule.compare(self)
        if self.groups:
            self.schedule.trail_of(self).append(f"gather {self.name}")
        with self.comm.coalesced():
            self._gathering = [group.unshard(use_part=for_backward) for group in self.groups]
        self.is_full = self.has_storage = True
        self.gathered_in = self.schedule.pauses
        return True

    @property
    def is_stale(self) -> bool:
        """Whether a shard changed since it was gathered, as far as this rank knows."""
        return any(group.is_stale for group in self.groups)

    @property
    def may_be_stale(self) -> bool:
        """Whether a shard changed since it was gathered, or may have changed unseen."""
        return any(group.may_be_stale for group in self.groups)

    def settle(self) -> None:
        """Take in parameters that were assigned, cast or moved from outside. Local."""
        for group in self.groups:
            group.settle()

    def wait_for_unshard(self) -> None:
        """Wait until the full parameters are there."""
        gathering, self._gathering = self._gathering, []
        try:
            for work in gathering:
                work.wait()
        except BaseException:
            self.is_full = False
            raise

    def reshard(self, part: Comm | None = None) -> None:
        """Free the full buffers, once no forward and no backward is using them.

        Args:
            part: keep what gathering over these ranks alone needs.

        **Collective**: local, except that a gather under way is waited for.
        """
        self.wait_for_unshard()
        if part is not None and self.is_full:
            for group in self.groups:
                group.keep_part(part)
        self.is_full = False
        is_used = self._users or self.keeps_full or self.backward.remakes_graph
        if self.has_storage and not is_used:
            self.has_storage = False
            for group in self.groups:
                group.release()

    def spoil(self) -> None:
        """Say that the shards may have changed unseen since they were gathered. Local."""
        if not self.has_storage:
            for group in self.groups:
                group.spoil()

    def end_forward(self) -> None:
        """Free what the settings say, once none of its forwards is running. Local."""
        self.to_run.clear()
        if self.active or in_backward():
            return
        if self.reshards_after_forward:
            self.reshard(self.config.part_comm if torch.is_grad_enabled() else None)

    @property
    def is_free(self) -> bool:
        """Whether its forwards need nothing but the full parameters, and those are the shards.

        Hooks that wait for its gradients want them when its backward ends, and not later.
        """
        policy = self.config.mp_policy
        casts = policy.output_dtype is not None or (
            policy.param_dtype is not None and policy.cast_forward_inputs
        )
        if casts or self.has_buffers:
            return False
        params = (p for group in self.groups for p in group.sharded_params)
        return not any(p._post_accumulate_grad_hooks for p in params)

    def expose(self, *, for_backward: bool = False) -> None:
        """Gather, and let the modules see full parameters until as many calls of ``hide``.

        Where nothing is ever gathered, all units of the root go together.

        **Collective**: all ranks.
        """
        begun: list[Unit] = []
        try:
            for unit in self.together():
                begun.append(unit)
                unit._expose(for_backward)
        except BaseException:
            for unit in begun:
                unit._hide()
            raise

    def hide(self) -> None:
        """Undo one ``expose``: the last one lets the modules see sharded parameters. Local."""
        for unit in self.together():
            unit._hide()

    def together(self) -> list[Unit]:
        """Return the units that are exposed and hidden at once with this one. Local."""
        return self.schedule.units if self.schedule.is_free else [self]

    def _expose(self, for_backward: bool) -> None:
        self._users += 1
        with torch._C._DisableFuncTorch():  # a transform around would wrap what is gathered
            has_settled = self.unshard(for_backward=for_backward)
            self.wait_for_unshard()
        if not self.is_exposed:
            has_settled = has_settled or all(group.is_settled for group in self.groups)
            if self.is_stale or not has_settled:
                raise RuntimeError(
                    f"{self.name}: its group of parameters changed after it was gathered (rank "
                    f"{self.comm.rank} of {self.comm.size}); call reshard() before changing them"
                )
            self.is_exposed = True
            for group in self.groups:
                group.register_full()

    def _hide(self) -> None:
        self._users -= 1
        if self._users == 0 and self.is_exposed:
            self.is_exposed = False
            for group in self.groups:
                group.register_sharded()
            if not self.is_full:
                self.reshard()

    def lost_change(self) -> str | None:
        """Say which full parameter its modules changed, a change that would be lost. Local."""
        for unit in self.together():
            for group in unit.groups if unit.is_exposed else ():
                complaint = group.lost_change()
                if complaint is not None:
                    unit.is_full = False  # all ranks raise alike
                    for each in unit.groups:
                        each.spoil()
                    return complaint
        return None

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
