"""The entry point: shard a module, or a whole tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import Comm, comm_for
from shard_fsdp._module import FSDPModule, wrap_class
from shard_fsdp._params import ManagedParam, collect_params, mark_taken
from shard_fsdp._policy import MixedPrecisionPolicy, UnitSettings
from shard_fsdp._unit import Unit
from shard_wrap import Policy, plan_units


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | Comm | None = ...,
    reshard_after_forward: bool | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    policy: Policy | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | Comm | None = ...,
    reshard_after_forward: bool | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    ignored_params: Iterable[nn.Parameter] | None = ...,
    policy: None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | Comm | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    ignored_params: Iterable[nn.Parameter] | None = None,
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
        mesh: a 1-D mesh or a comm; by default all ranks.
        reshard_after_forward: free full parameters after forward and gather them again for
            backward. None means yes, except for the outermost unit.
        mp_policy: dtypes of parameters in compute, of reduction and of outputs.
        ignored_params: parameters to leave as they are.
        policy: how to cut the tree below ``module`` into units, from shard_wrap.

    Returns:
        ``module``.

    Raises:
        ValueError: a module is wrapped already, has no forward to surround, or a parameter is
            tied to one of another unit, is on the meta device, or is no plain tensor.
        TypeError: something other than a module was given.

    **Collective**: local. Every rank must hold the same values; each keeps its part of them.

    **Memory**: the unit's full parameters and their shard, until the call returns; then the shard.
    """
    modules = module if isinstance(module, list) else [module]
    _check_modules(modules)
    comm = comm_for(mesh)
    device_mesh = mesh if isinstance(mesh, DeviceMesh) else None
    ignored = set(ignored_params or ())

    def make(members: Sequence[nn.Module], params: Sequence[ManagedParam]) -> None:
        settings = UnitSettings(reshard_after_forward=reshard_after_forward)
        unit = Unit(
            members, params, comm=comm, mesh=device_mesh, mp_policy=mp_policy, settings=settings
        )
        mark_taken(params)
        _adopt_inner(members, unit)
        for member in members:
            wrap_class(member, unit)

    if policy is None:
        inner: set[nn.Module] = {
            m for root in modules for m in root.modules() if isinstance(m, FSDPModule)
        }
        make(modules, collect_params(modules, stop_at=inner, ignored=ignored))
    else:
        _wrap_tree(modules, policy, ignored, make)
    _move_buffers(modules, comm.device)
    return cast("FSDPModule | list[FSDPModule]", module)


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("expected at least one module, got an empty list")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{type(module).__name__}: the module is wrapped already; call fully_shard() once "
                f"per module, from the inside out"
            )
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{type(module).__name__} has no forward to gather parameters around; wrap the "
                f"modules inside it, or the one that contains it"
            )


def _wrap_tree(
    modules: Sequence[nn.Module],
    policy: Policy,
    ignored: set[nn.Parameter],
    make: Callable[[Sequence[nn.Module], Sequence[ManagedParam]], None],
) -> None:
    if len(modules) != 1:
        raise ValueError(f"policy= cuts one tree into units, got a list of {len(modules)} modules")
    (root,) = modules
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(f"{name}: wrapped already; policy= needs a tree without wrapped parts")
    plans = plan_units(root, policy)
    params = {p.name: p for p in collect_params([root], stop_at=set(), ignored=ignored)}
    for plan in plans:
        mine = [params.pop(name) for name in plan.params if name in params]
        make([root.get_submodule(plan.name)], mine)
        del mine  # the plain parameters are freed unit by unit


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
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)
