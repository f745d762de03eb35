"""What optimizers hold that is not quite ours: state that torch cut, parameters of before."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shard_flat import ShardTensor, adopt_cut


@cache
def watch_optimizers() -> None:
    """Before each optimizer's step, adopt state that ``set_optimizer_state_dict`` cut for it.

    torch's helper makes plain DTensors by our placement, which torch's operators take for sums
    still to be added up. A step of parameters as they were before they were sharded raises
    RuntimeError. The hook is torch's public one for all optimizers; those without sharded
    parameters, and those whose state is ours, cost it one look.

    **Collective**: local; done once per process.
    """
    register_optimizer_step_pre_hook(_adopt_state)


_replaced = WeakIdKeyDictionary()  # parameters whose place sharded ones took, and their names


def note_replaced(name: str, param: nn.Parameter) -> None:
    """Note that the model no longer has ``param``; optimizers that step it are told. Local."""
    _replaced[param] = name


def _check_current(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in _replaced and param.grad is None:
                raise RuntimeError(
                    f"{_replaced[param]}: {type(optimizer).__name__} holds the parameter as it was "
                    f"before fully_shard() and would train nothing; build the optimizer after it, "
                    f"from the model's parameters()"
                )


def _adopt_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _replaced:
        _check_current(optimizer)
    if not any(_is_foreign(optimizer, group) for group in optimizer.param_groups):
        return
    for param, state in optimizer.state.items():
        if isinstance(param, ShardTensor):
            for value in state.values():
                if type(value) is DTensor:
                    adopt_cut(value, param)


def _is_foreign(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the first state of a group is a DTensor; it is loaded for all or for none."""
    for param in group["params"]:
        if not isinstance(param, ShardTensor):
            return False
        if param in optimizer.state:
            return any(type(value) is DTensor for value in optimizer.state[param].values())
    return False
