"""Finding the parameters of a unit, with every place that refers to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from shard_flat import ShardTensor
from shard_fsdp._tensor_parallel import ParallelSpec, local_part

# Original parameter -> its FQN in the unit that took it. Outer modules that still refer to the
# original are tied to that unit; nothing else could tell them apart from a fresh parameter.
_taken: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass
class ManagedParam:
    """One parameter that is about to be sharded.

    Attributes:
        name: FQN as seen from the module being wrapped.
        original: the plain parameter, or the DTensor, that it was made from.
        slots: every ``(module, attribute)`` that refers to it.
        block: run of elements that no rank boundary may cut.
        parallel: how a forward sees it, where it is a DTensor.
    """

    name: str
    original: nn.Parameter
    slots: list[tuple[nn.Module, str]] = field(default_factory=list)
    block: int = 1
    parallel: ParallelSpec | None = None

    @property
    def local(self) -> torch.Tensor:
        """What is cut into pieces: the parameter, or a DTensor's local part; detached."""
        return local_part(self.original)


def collect_params(
    modules: Sequence[nn.Module], *, stop_at: set[nn.Module], ignored: set[nn.Parameter]
) -> list[ManagedParam]:
    """Return the parameters below ``modules`` that no other unit owns, ties merged.

    Args:
        modules: the unit's modules, in order.
        stop_at: modules of other units; neither they nor what is below them is entered.
        ignored: parameters to leave alone.

    Raises:
        ValueError: a parameter is tied to one that another unit owns, or is sharded by torch.

    **Collective**: local.
    """
    found: dict[int, ManagedParam] = {}
    for i, root in enumerate(modules):
        prefix = str(i) if len(modules) > 1 else ""
        for path, module in _walk(root, stop_at, prefix):
            for attribute, param in module._parameters.items():
                if param is None or param in ignored:
                    continue
                name = f"{path}.{attribute}" if path else attribute
                _check_free(name, param)
                managed = found.setdefault(id(param), ManagedParam(name, param))
                managed.slots.append((module, attribute))
    return list(found.values())


def mark_taken(params: Sequence[ManagedParam]) -> None:
    """Remember which originals a unit owns. Local."""
    for managed in params:
        _taken[managed.original] = managed.name


def _walk(root: nn.Module, stop_at: set[nn.Module], prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, module)`` from ``root`` down, each module once, skipping ``stop_at``."""
    seen: set[nn.Module] = set()
    stack = [(prefix, root)]
    while stack:
        name, module = stack.pop()
        if module in seen or (module in stop_at and module is not root):
            continue
        seen.add(module)
        yield name, module
        children = [
            (f"{name}.{child}" if name else child, sub)
            for child, sub in module._modules.items()
            if sub is not None
        ]
        stack.extend(reversed(children))


def _check_free(name: str, param: nn.Parameter) -> None:
    owner = _taken.get(param)
    if owner is not None:
        raise ValueError(
            f"{name}: tied to {owner}, which another unit shards already; put both modules into "
            f"one unit, as in fully_shard([a, b]), or pass policy= and let ties be planned"
        )
    if isinstance(param, ShardTensor):
        raise ValueError(
            f"{name}: the parameter is sharded already (as {param.spec.name}); wrap each module "
            f"once, from the inside out, and tie parameters before that"
        )
    if is_lazy(param):
        raise ValueError(
            f"{name}: the parameter has no shape yet ({type(param).__name__}); run the model once, "
            f"as lazy modules need, before fully_shard()"
        )
    local = param.data._local_tensor if type(param.data) is DTensor else param.data
    if type(local) is not torch.Tensor:
        raise ValueError(
            f"{name}: expected a plain tensor or a DTensor around one, got "
            f"{type(param.data).__name__}; list it in ignored_params= to leave it alone"
        )
