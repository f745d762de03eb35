"""State dictionaries: matching saved state to parameters, and checking it before it is copied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_flat import ShardTensor
from shard_optim._groups import Group, labels_of
from shard_optim._slots import Slot

Saved = Mapping[str, Any]

# What changes no result, and what a group says of its parameters.
_DROPPED = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


@dataclass(frozen=True)
class Rules:
    """What an optimizer expects of a state dictionary.

    Attributes:
        kind: the optimizer's name, for errors.
        fixed: switches of torch's own optimizer that change results, and the value that they must
            have.
        check: checks the hyper-parameters of a group; its second argument begins the message.
        slots: the state tensors of a parameter of a group.
        others: those of another optimizer, from which this one makes its own.
        adapt: makes what torch's optimizer saved for a parameter into what this one saves.
    """

    kind: str
    fixed: Mapping[str, Any]
    check: Callable[[Group, str], None]
    slots: Callable[[Group, torch.Tensor], Sequence[Slot]]
    others: Callable[[Group, torch.Tensor], Sequence[Slot]]
    adapt: Callable[[Saved], Saved]


def pack_groups(groups: Sequence[Group], names: Mapping[torch.Tensor, str]) -> list[dict[str, Any]]:
    """Return each group's hyper-parameters and the names of its parameters. Local."""
    return [{**hyper_of(group), "params": [names[p] for p in group["params"]]} for group in groups]


def hyper_of(group: Saved, fixed: Collection[str] = ()) -> dict[str, Any]:
    """Return what a group says besides its parameters and torch's switches. Local."""
    return {k: value for k, value in group.items() if k not in _DROPPED and k not in fixed}


def match_state(
    saved: Saved, groups: Sequence[Group], names: Mapping[torch.Tensor, str], *, rules: Rules
) -> dict[torch.Tensor, Saved]:
    """Find each parameter's saved state and check that it fits.

    Args:
        saved: a state dictionary.
        groups: the optimizer's.
        names: the optimizer's parameters.
        rules: what the optimizer expects.

    Returns:
        The saved state of every parameter that has one.

    Raises:
        ValueError: groups, names, slots or shapes differ.

    **Collective**: local.
    """
    missing = [key for key in ("state", "param_groups") if key not in saved]
    if missing:
        raise ValueError(f"expected a state dictionary with {missing}, got keys {sorted(saved)}")
    saved_groups = saved["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"expected {len(groups)} parameter groups, got {len(saved_groups)}; build the "
            f"optimizer with the groups of the one that was saved"
        )
    found: dict[torch.Tensor, Saved] = {}
    used = set()
    for number, (group, theirs) in enumerate(zip(groups, saved_groups, strict=True)):
        _check_switches(theirs, number, rules)
        hyper = {**group, **hyper_of(theirs, rules.fixed)}
        keys = keys_of(theirs, group, number)
        used.update(keys)
        for param, key in zip(group["params"], keys, strict=True):
            source = rules.adapt(saved["state"].get(key) or {})
            if source:
                other = rules.others(hyper, param)
                slots = other if _is_of(source, other, param) else rules.slots(hyper, param)
                _check_state(names[param], param, source, slots, rules.kind)
                found[param] = source
        rules.check(hyper, f"group {number}: ")  # another optimizer's state is named before
    unexpected = sorted(map(str, set(saved["state"]) - used))
    if unexpected:
        raise ValueError(f"state for {unexpected}, which no group lists")
    return found


def _check_switches(saved: Saved, number: int, rules: Rules) -> None:
    for key, wanted in rules.fixed.items():
        if key == "decoupled_weight_decay" and not saved.get("weight_decay"):
            continue
        if bool(saved.get(key, wanted)) != wanted:
            raise ValueError(
                f"group {number}: saved with {key}={saved[key]}, which this {rules.kind} does not "
                f"do; load it into torch's own optimizer"
            )


def keys_of(saved: Saved, group: Group, number: int) -> list[Any]:
    """Return the saved group's keys in the order of our parameters. Local.

    Raises:
        ValueError: it has other parameters.
    """
    keys = list(saved["params"])
    mine = labels_of(group, number)
    theirs = keys if all(isinstance(key, str) for key in keys) else saved.get("param_names")
    anonymous = group.get("param_names") is None and not any(
        isinstance(param, ShardTensor) for param in group["params"]
    )
    if theirs is None or (anonymous and theirs is not keys):
        if len(keys) != len(mine):
            raise ValueError(f"group {number}: expected {len(mine)} parameters, got {len(keys)}")
        return keys
    if set(mine) != set(theirs):
        raise ValueError(
            f"group {number}: missing {sorted(set(mine) - set(theirs))}, unexpected "
            f"{sorted(set(theirs) - set(mine))}"
        )
    by_name = dict(zip(theirs, keys, strict=True))
    return [by_name[name] for name in mine]


# Whose state it is that has these slots. SOAP and Shampoo add one or two for a side.
_OWNERS = {
    ("exp_avg", "exp_avg_sq"): "Adam or AdamW",
    ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"): "AdamW8bit",
    ("compensation", "exp_avg", "exp_avg_sq"): "AdamW with rounding='kahan'",
    ("exp_avg",): "Lion",
    ("momentum_buffer",): "SGD or Muon",
    ("col_var", "row_var"): "Adafactor",
    ("variance",): "Adafactor",
}


def owner_of(source: Saved) -> str:
    """Return the name of the optimizer that has state of these slots. Local."""
    return _OWNERS.get(tuple(sorted(source.keys() - {"step"})), "another optimizer")


def _is_of(source: Saved, slots: Sequence[Slot], param: torch.Tensor) -> bool:
    """Whether state has these slots, floating or not as they are."""
    return bool(slots) and all(
        slot.name in source
        and source[slot.name].is_floating_point() == slot.dtype_of(param).is_floating_point
        for slot in slots
    )


def _check_state(
    name: str, param: torch.Tensor, source: Saved, slots: Sequence[Slot], kind: str
) -> None:
    owner = owner_of(source)
    whose = "" if kind in owner.split() else f": it is that of {owner}, and this is {kind}"
    for key in ("step", *(slot.name for slot in slots)):
        if key not in source:
            raise ValueError(f"{name}: the state has no {key!r}, only {sorted(source)}{whose}")
    for slot in slots:
        value, wanted = source[slot.name], slot.shape_of(param)
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"{name}: expected {slot.name} of shape {wanted}, got {tuple(value.shape)}"
            )
        dtype = slot.dtype_of(param)
        if value.dtype.is_floating_point != dtype.is_floating_point:
            raise ValueError(f"{name}: expected {slot.name} of {dtype}, got {value.dtype}{whose}")
        if isinstance(value, ShardTensor) and not slot.is_cut_like(value, param):
            raise ValueError(
                f"{name}: {slot.name} is a piece [{value.spec.start}, {value.spec.stop}) of "
                f"another sharding; load it with shard_ckpt, which moves state between world sizes"
            )


def through_hooks(
    hooks: Mapping[int, Callable[..., Any]], optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """Hand a state dictionary to each hook, which may return another one. Local."""
    for hook in hooks.values():
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state
