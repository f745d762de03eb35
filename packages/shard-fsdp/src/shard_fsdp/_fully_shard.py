"""The entry point: shard a module, or a whole tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shard_comm import Comm
from shard_fsdp._bridge import note_replaced, watch_optimizers
from shard_fsdp._mesh import DataParallelMeshDims, Mesh, Ranks, ranks_of
from shard_fsdp._module import FSDPModule, wrap_class
from shard_fsdp._params import ManagedParam, collect_params, mark_taken
from shard_fsdp._policy import (
    MixedPrecisionPolicy,
    OffloadPolicy,
    as_mixed_precision,
    as_offload,
)
from shard_fsdp._tensor_parallel import parallel_spec
from shard_fsdp._unit import Unit, UnitConfig
from shard_wrap import Policy, plan_units

PlacementFn: TypeAlias = "Callable[[nn.Parameter], Shard | int | None]"

_ONE_DTYPE = MixedPrecisionPolicy()
_NO_OFFLOAD = OffloadPolicy()


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: Mesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    policy: Policy | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: Mesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: PlacementFn | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    policy: None = ...,
) -> list[FSDPModule]: ...


def fully_shard(  # noqa: PLR0913  # torch's arguments and one of ours
    module: nn.Module | list[nn.Module],
    *,
    mesh: Mesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: PlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = _ONE_DTYPE,
    offload_policy: OffloadPolicy = _NO_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    policy: Policy | None = None,
) -> FSDPModule | list[FSDPModule]:
    """Shard a module's parameters, gradients and optimizer state over ranks.

    Each call makes one unit of the parameters below ``module`` that no earlier call took: wrap
    from the inside out. With ``policy`` one call wraps the whole tree. Afterwards
    ``module.parameters()`` yields ShardTensors, always the same objects; forward and backward
    gather full parameters unit by unit and free them again, and gradients arrive sharded, as
    means over ranks.

    Args:
        module: the module, changed in place (its class becomes ``FSDP<Name>``), or a list of
            modules that make one unit together.
        mesh: a 1-D mesh or a comm to shard over, or a 2-D mesh or a pair of comms to replicate
            and to shard over; by default all ranks, whose group is initialised where a launcher
            started several and nobody has.
        reshard_after_forward: free full parameters after forward and gather them again for
            backward. None means yes, except for the outermost unit. A number that divides the
            number of ranks keeps one part in that many, gathered again among as many neighbours.
        shard_placement_fn: for a parameter, a block length in elements that no rank boundary may
            cut, ``Shard(0)`` to keep rows whole, or None. Other ``Shard(d)`` need no care here:
            boundaries may fall anywhere.
        mp_policy: dtypes of parameters in compute, of reduction and of outputs; with ``policy``
            only the outputs of ``module`` itself are cast.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and so the optimizer's
            state in host memory.
        ignored_params: parameters to leave as they are.
        dp_mesh_dims: the dimensions of ``mesh`` to shard and to replicate over, where all
            parameters are DTensors of that mesh, replicated over these.
        policy: how to cut the tree below ``module`` into units, from shard_wrap.

    Returns:
        ``module``.

    Raises:
        ValueError: a module is wrapped already or has no forward to surround, a parameter is
            tied to one of another unit or is of a kind that cannot be sharded, or an argument is
            out of range.
        TypeError: something other than a module was given.

    Parameters that are DTensors of another mesh, as ``parallelize_module`` makes them, are sharded
    by their local parts; a forward sees DTensors of that mesh again.

    **Collective**: local, but for a number in ``reshard_after_forward`` and for several dimensions
    taken as one, which all ranks set up together. Every rank must hold the same values; each keeps
    its part of them. Parameters on the meta device are sharded without values; see
    ``materialize``.

    **Memory**: the unit's full parameters and their shard, until the call returns; then the shard.

    The first call registers one of torch's pre-step hooks for optimizers, which adopts state that
    ``set_optimizer_state_dict`` has cut; it does nothing to optimizers of other parameters.
    """
    modules = module if isinstance(module, list) else [module]
    _check_modules(modules)
    if mesh is None:
        _initialise_group()
    watch_optimizers()
    ranks = ranks_of(mesh, dp_mesh_dims, device=_device_of(modules))
    reshard, part_comm = _reshard_setting(reshard_after_forward, ranks.comm)
    config = UnitConfig(
        comm=ranks.comm,
        replicas=ranks.replicas,
        part_comm=part_comm,
        mesh=ranks.mesh,
        dp_dims=ranks.dp_dims,
        mp_policy=as_mixed_precision(mp_policy),
        offload_policy=as_offload(offload_policy),
        reshard_after_forward=reshard,
    )
    wrapper = _Wrapper(config, ranks, shard_placement_fn, set(ignored_params or ()))
    if policy is None:
        wrapper.wrap(modules)
    else:
        wrapper.wrap_tree(modules, policy)
    _move_buffers(modules, ranks.comm.device)
    return cast("FSDPModule | list[FSDPModule]", module)


@dataclass(frozen=True)
class _Wrapper:
    """Makes units with one configuration."""

    config: UnitConfig
    ranks: Ranks
    placement: PlacementFn | None
    ignored: set[nn.Parameter]

    def wrap(self, modules: Sequence[nn.Module]) -> None:
        inner: set[nn.Module] = {
            m for root in modules for m in root.modules() if isinstance(m, FSDPModule)
        }
        self._make(modules, self._find(modules, inner), self.config)

    def wrap_tree(self, modules: Sequence[nn.Module], policy: Policy) -> None:
        if len(modules) != 1:
            raise ValueError(
                f"policy= cuts one tree into units, got a list of {len(modules)} modules"
            )
        (root,) = modules
        for name, module in root.named_modules():
            if isinstance(module, FSDPModule):
                raise ValueError(
                    f"{name}: wrapped already; policy= needs a tree without wrapped parts"
                )
        plans = plan_units(root, policy)
        params = {p.name: p for p in self._find([root], set())}
        within = replace(self.config, mp_policy=replace(self.config.mp_policy, output_dtype=None))
        for plan in plans:
            module = root.get_submodule(plan.name)
            mine = [params.pop(name) for name in plan.params if name in params]
            self._make([module], mine, self.config if module is root else within)
            del mine  # the plain parameters are freed unit by unit

    def _find(self, modules: Sequence[nn.Module], inner: set[nn.Module]) -> list[ManagedParam]:
        found = collect_params(modules, stop_at=inner, ignored=self.ignored)
        for managed in found:
            if isinstance(managed.original, DTensor):
                managed.parallel = parallel_spec(managed.name, managed.original, self.ranks)
            elif self.ranks.spmd is not None:
                raise ValueError(
                    f"{managed.name}: expected a DTensor of {self.ranks.spmd}, as dp_mesh_dims= "
                    f"says, got a plain tensor; make it one with distribute_module()"
                )
        return found

    def _make(
        self, modules: Sequence[nn.Module], params: Sequence[ManagedParam], config: UnitConfig
    ) -> None:
        if self.placement is not None:
            for managed in params:
                managed.block = _block_of(managed, self.placement(managed.original))
        unit = Unit(modules, params, config)
        mark_taken(params)
        for managed in params:
            note_replaced(managed.name, managed.original)
        _adopt_inner(modules, unit)
        for module in modules:
            wrap_class(module, unit)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("expected at least one module, got an empty list")
    if len({id(module) for module in modules}) < len(modules):
        raise ValueError("expected different modules, got one of them twice")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{type(module).__name__}: the module is wrapped already; call fully_shard() once "
                f"per module, from the inside out"
            )
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ValueError(
                f"{type(module).__name__} has no forward to gather parameters around; wrap the "
                f"modules inside it, or the one that contains it"
            )


def _initialise_group() -> None:
    """Join the ranks of a launched job, as torch's FSDP2 does where nobody has."""
    if (
        dist.is_available()
        and not dist.is_initialized()
        and int(os.environ.get("WORLD_SIZE", 1)) > 1
    ):
        dist.init_process_group()


def _device_of(modules: Sequence[nn.Module]) -> torch.device | None:
    """The accelerator that parameters are on already, if any."""
    for module in modules:
        for param in module.parameters():
            if param.device.type not in ("cpu", "meta"):
                return param.device
    return None


def _reshard_setting(setting: bool | int | None, comm: Comm) -> tuple[bool | None, Comm | None]:
    """What to do after forward, and the ranks to reshard to where those are not all."""
    if setting is None or isinstance(setting, bool):
        return setting, None
    if setting < 1 or comm.size % setting:
        raise ValueError(
            f"expected reshard_after_forward to divide the {comm.size} ranks, got {setting}"
        )
    if setting in (1, comm.size):
        return setting != 1, None
    return True, comm.split(comm.rank // setting)


def _block_of(managed: ManagedParam, placement: Any) -> int:
    placement = getattr(placement, "placement", placement)  # torch's ShardPlacementResult
    if placement is None:
        return 1
    shape = managed.local.shape
    if isinstance(placement, Shard):
        dim = placement.dim + (len(shape) if placement.dim < 0 else 0)
        if not 0 <= dim < max(len(shape), 1):
            raise ValueError(f"{managed.name}: got {placement} for shape {tuple(shape)}")
        rows = shape[0] if dim == 0 and len(shape) > 0 else 0
        return max(managed.local.numel() // rows, 1) if rows else 1
    if isinstance(placement, bool) or not isinstance(placement, int) or placement < 1:
        raise ValueError(
            f"{managed.name}: expected Shard, a block length above 0 or None from "
            f"shard_placement_fn, got {placement!r}"
        )
    return placement


def _adopt_inner(members: Sequence[nn.Module], unit: Unit) -> None:
    """Join the schedules of all units inside, and name every parameter as seen from here."""
    names: dict[nn.Module, str] = {}
    for i, member in enumerate(members):
        prefix = str(i) if len(members) > 1 else ""
        for name, module in member.named_modules(prefix=prefix):
            names.setdefault(module, name)
            if isinstance(module, FSDPModule) and module._shard_unit.schedule is not unit.schedule:
                unit.schedule.adopt(module._shard_unit.schedule)
    for each in unit.schedule.units:
        for group in each.groups:
            group.rename(names)


def _move_buffers(modules: Sequence[nn.Module], device: torch.device) -> None:
    for root in modules:
        for module in root.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device not in (device, torch.device("meta")):
                    module._buffers[name] = buffer.to(device)
