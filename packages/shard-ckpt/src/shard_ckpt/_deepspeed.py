"""DeepSpeed's flat partitions as parameters and optimizer state under their names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shard_ckpt._deepspeed_files import ZeroFiles, find_zero, flat_tensors
from shard_ckpt._deepspeed_flat import Param, Slot
from shard_ckpt._errors import CheckpointError
from shard_ckpt._lazy import LazyTensors
from shard_ckpt._torch_file import Inert

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size", "ds_version")
_THEIRS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
    *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
    *("sparse_tensor_module_names", "mp_world_size", "ds_config", "autotp_uc_info"),
    *_COUNTERS,
}


def read_zero(path: Path, lazy: LazyTensors) -> dict[str, Any]:
    """Return a ZeRO checkpoint of stage 1, 2 or 3 as a state with stand-ins. Local.

    The section ``model`` holds the float32 parameters that the optimizer works on, frozen
    parameters and buffers; ``optim`` the optimizer's slots by name and its groups; ``deepspeed``
    counters, the scheduler and what the user stored.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: files are missing, damaged or not understood.
    """
    files = find_zero(path)
    try:
        return _read(files, lazy)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{files.folder}: not laid out as DeepSpeed does ({exc!r})") from exc


def _read(files: ZeroFiles, lazy: LazyTensors) -> dict[str, Any]:
    label = str(files.folder)
    params = _params_of(files)
    master = _master(files)
    model: dict[str, Any] = {
        param.name: lazy.add(master.dtype_of(param), param.shape, master.reader(param, label))
        for param in params
    }
    _check_used(files, params, master, label)
    model |= _frozen(files, lazy)
    first = files.models[0]
    for name in first.get("buffer_names") or ():
        if name in first["module"]:  # others are not persistent
            model[name] = first["module"][name]
    for name, shared in (first.get("shared_params") or {}).items():
        if shared in model:
            model[name] = model[shared]
    return {
        "model": model,
        "optim": _optimizer(files, params, lazy, label),
        "deepspeed": _rest(first),
    }


def _params_of(files: ZeroFiles) -> list[Param]:
    """Lay parameters out as DeepSpeed does.

    Stages 1 and 2 lay a group's parameters end to end and cut the whole over ranks. Stage 3 cuts
    each parameter over ranks and lays the parts of all groups end to end on each. Parameters of
    5 and 4 elements on 2 ranks begin at 0 and 5 there, at 0 and 3 here.
    """
    shapes = files.models[0].get("param_shapes")
    groups = shapes if isinstance(shapes, list) else [shapes]
    if not all(isinstance(group, Mapping) for group in groups):
        raise CheckpointError(f"{files.folder}: the model file has no param_shapes")
    params = []
    at = 0
    for number, group in enumerate(groups):
        at = 0 if files.stage < 3 else at
        for name, shape in group.items():
            param = Param(name, tuple(shape), number, at)
            params.append(param)
            at += param.numel if files.stage < 3 else -(-param.numel // files.world_size)
    return params


def _master(files: ZeroFiles) -> Slot:
    key = "single_partition_of_fp32_groups" if files.stage < 3 else "fp32_flat_groups"
    held = [
        flat_tensors(optim.get(key), label=f"{files.folder}: rank {rank}'s {key}")
        for rank, optim in enumerate(files.optims)
    ]
    return _slot(files, held)


def _slot(files: ZeroFiles, held: Sequence[Sequence[torch.Tensor]]) -> Slot:
    """Arrange what each rank holds of each group."""
    if files.stage == 3:
        return Slot(3, files.world_size, held)
    counts = {len(groups) for groups in held}
    if len(counts) != 1:
        raise CheckpointError(f"{files.folder}: ranks have different numbers of groups: {counts}")
    return Slot(files.stage, files.world_size, list(zip(*held, strict=True)))


def _check_used(files: ZeroFiles, params: Sequence[Param], master: Slot, label: str) -> None:
    """Check that partitions hold the parameters and padding, nothing else."""
    for number, vector in enumerate(master.vectors):
        held = sum(tensor.numel() for tensor in vector)
        if files.stage < 3:
            used = sum(param.numel for param in params if param.group == number)
            padding = 2 * files.world_size
        else:
            used = sum(-(-param.numel // files.world_size) for param in params)
            padding = 1
        if not used <= held < used + padding:
            raise CheckpointError(
                f"{label}: partition {number} has {held} elements, its parameters {used}"
            )


def _frozen(files: ZeroFiles, lazy: LazyTensors) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, shape in (files.models[0].get("frozen_param_shapes") or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in files.models]
        numel = math.prod(shape)
        if sum(part.numel() for part in parts) < numel:
            raise CheckpointError(f"{files.folder}: frozen {name}: elements are missing")

        def read(
            parts: Sequence[torch.Tensor] = parts, shape: Sequence[int] = tuple(shape)
        ) -> torch.Tensor:
            whole = torch.cat([part.reshape(-1) for part in parts])
            return whole[: math.prod(shape)].view(tuple(shape))

        result[name] = lazy.add(parts[0].dtype, tuple(shape), read)
    return result


def _optimizer(
    files: ZeroFiles, params: Sequence[Param], lazy: LazyTensors, label: str
) -> dict[str, Any]:
    states, groups = _base_states(files)
    state: dict[str, dict[str, Any]] = {param.name: {} for param in params}
    for name in sorted({name for entries in states for entry in entries for name in entry}):
        held = [[entry.get(name) for entry in entries] for entries in states]
        flat = any(isinstance(item, torch.Tensor) and item.ndim == 1 for item in held[0])
        if flat:
            slot = _slot(files, [_flat_row(row, f"{label}: {name}", files.stage) for row in held])
        for param in params:
            value = held[0][param.group if files.stage < 3 else 0]
            if value is None:  # a group that has not stepped
                continue
            if flat:
                reader = slot.reader(param, f"{label}: {name}")
                state[param.name][name] = lazy.add(slot.dtype_of(param), param.shape, reader)
            else:
                state[param.name][name] = _scalar(name, value)
    for param in params:
        step = groups[param.group].get("step", files.optims[0].get("base_optimizer_state_step"))
        if "step" not in state[param.name] and step is not None:
            state[param.name]["step"] = _scalar("step", step)
    members = [[p.name for p in params if p.group == number] for number in range(len(groups))]
    named = [{**group, "params": names} for group, names in zip(groups, members, strict=True)]
    return {"state": state, "param_groups": named}


def _flat_row(row: Sequence[Any], label: str, stage: int) -> list[torch.Tensor]:
    """Return what one rank holds of a slot; nothing for groups that have not stepped."""
    if stage == 3 and any(item is None for item in row):
        raise CheckpointError(f"{label}: some of the groups have no such values")
    held = [torch.empty(0) if item is None else item for item in row]
    return flat_tensors(held, label=label)


def _base_states(
    files: ZeroFiles,
) -> tuple[list[list[Mapping[str, Any]]], list[Mapping[str, Any]]]:
    """Return each rank's slots per flat group, and the parameter groups."""
    count = len(_shapes(files))
    key = "base_optimizer_state" if files.stage < 3 else "optimizer_state_dict"
    states: list[list[Mapping[str, Any]]] = []
    groups: list[Mapping[str, Any]] = [{} for _ in range(count)]
    for optim in files.optims:
        base = optim.get(key)
        if isinstance(base, Mapping):
            slots = base["state"]
            groups = base["param_groups"]
            numbers = [number for group in groups for number in group["params"]]
            states.append([slots.get(number, {}) for number in numbers])
        elif isinstance(base, list):  # elastic checkpoints have no groups
            states.append(base)
        else:
            raise CheckpointError(f"{files.folder}: the optimizer's files have no {key}")
    if len(groups) != count:
        raise CheckpointError(
            f"{files.folder}: {count} groups of parameters, {len(groups)} of the optimizer's"
        )
    return states, groups


def _shapes(files: ZeroFiles) -> Sequence[Any]:
    shapes = files.models[0]["param_shapes"]
    return shapes if isinstance(shapes, list) else [shapes]


def _scalar(name: str, value: Any) -> Any:
    if name == "step" and isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float32)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _rest(model: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: model[key] for key in _COUNTERS if model.get(key) is not None}
    scheduler = model.get("lr_scheduler")
    if scheduler is not None and not isinstance(scheduler, Inert):
        kept["lr_scheduler"] = scheduler
    return kept | {key: item for key, item in model.items() if key not in _THEIRS}
