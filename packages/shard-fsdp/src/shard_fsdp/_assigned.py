"""What somebody put in the place of a unit's sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import nn

from shard_flat import ShardTensor

if TYPE_CHECKING:
    from shard_fsdp._group import ParamGroup

# By the id of a sharded parameter. Entries may be stale; a weak reference to the parameter itself
# would keep torch from swapping it when a module is cast.
_owners: WeakValueDictionary[int, ParamGroup] = WeakValueDictionary()


def note_owner(group: ParamGroup, params: Iterable[ShardTensor]) -> None:
    """Remember whose sharded parameters these are. Local."""
    for param in params:
        _owners[id(param)] = group


def find_assigned(slots: Sequence[tuple[nn.Module, str]], old: ShardTensor) -> Any:
    """Return the parameter that modules have in the place of ``old``. Local.

    Args:
        slots: every ``(module, attribute)`` where ``old`` was.
        old: the sharded parameter that they should have.

    Raises:
        ValueError: there is none, it does not fit, or it is tied to another one.
        RuntimeError: it is no parameter.
    """
    name = old.spec.name
    rank = f"(rank {old.comm.rank} of {old.comm.size})"
    for module, attribute in slots:
        if attribute not in module._parameters:
            raise ValueError(
                f"{name}: {type(module).__name__} has no parameter {attribute!r} any more {rank}; "
                f"delete or replace parameters by others before fully_shard()"
            )
    module, attribute = slots[0]
    found: Any = module._parameters[attribute]
    if found is old:
        raise ValueError(
            f"{name}: tied, and one of its {len(slots)} places got another parameter {rank}; "
            f"assign the same to all of them, or untie them before fully_shard()"
        )
    if found is not None and not isinstance(found, nn.Parameter):
        raise RuntimeError(
            f"{name}: expected a parameter, got a {type(found).__name__} in its place {rank}; "
            f"torch.func.functional_call and the like cannot replace the parameters of a sharded "
            f"module"
        )
    if isinstance(found, ShardTensor) and _is_owned(found):
        raise ValueError(
            f"{name}: the same parameter as {found.spec.name} {rank}, which is sharded on its own; "
            f"tie parameters before fully_shard(), so that both places share one"
        )
    if found is None or found.shape != old.shape:
        raise ValueError(
            f"{name}: expected a parameter of shape {tuple(old.shape)}, got "
            f"{None if found is None else tuple(found.shape)} {rank}; a sharded module's "
            f"parameters keep their shapes"
        )
    return found


def _is_owned(param: ShardTensor) -> bool:
    group = _owners.get(id(param))
    return group is not None and any(p is param for p in group.sharded_params)
