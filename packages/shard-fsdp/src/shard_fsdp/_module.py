"""The methods that a wrapped module gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from shard_fsdp._forward import ForwardRun
from shard_fsdp._unit import Unit

_wrapped_classes: dict[type[nn.Module], type[nn.Module]] = {}


class UnshardHandle:
    """A gather under way, from ``FSDPModule.unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the full parameters are there."""
        self._unit.wait_for_unshard()


class FSDPModule(nn.Module):
    """A module whose parameters are sharded; ``fully_shard`` mixes it into the module's class."""

    _shard_unit: Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on gathered parameters. Collective."""
        run = ForwardRun(self._shard_unit, self)
        try:
            args, kwargs = run.enter(args, kwargs)
            output = super().__call__(*args, **kwargs)
        except BaseException:
            run.fail()
            raise
        return run.leave(output)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters ahead of their use.

        ``parameters()`` still yields the sharded ones; a forward that follows finds the full ones
        ready.

        Args:
            async_op: return a handle to wait with, instead of waiting.

        **Collective**: all ranks. **Memory**: the unit's full parameters until ``reshard``.
        """
        self._shard_unit.unshard()
        if async_op:
            return UnshardHandle(self._shard_unit)
        self._shard_unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's full parameters. Local."""
        self._shard_unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Switch the reduction of gradients on or off, for accumulation over microbatches.

        While it is off, gradients add up unreduced in the reduction dtype, one full gradient
        buffer per group. Switch it on before the last microbatch.

        Args:
            requires_gradient_sync: whether backward reduces.
            recurse: also for the units inside this module.
        """
        for unit in self._units(recurse):
            unit.settings.sync_gradients = requires_gradient_sync

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, *, recurse: bool = True
    ) -> None:
        """Switch the freeing of full parameters after forward. ``recurse``: also inside."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Switch the freeing of full parameters after backward. ``recurse``: also inside."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_reduce_scatter_unused_params(self, enabled: bool, *, recurse: bool = True) -> None:
        """Give parameters without a gradient a zero one, so that ranks may use different ones.

        Args:
            enabled: whether to; by default ranks that differ raise an error.
            recurse: also for the units inside this module.
        """
        for unit in self._units(recurse):
            unit.settings.zero_fill_unused = enabled

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: the factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"expected a divide factor above 0, got {factor}")
        self._shard_unit.settings.divide_factor = float(factor)

    def _units(self, recurse: bool) -> Iterator[Unit]:
        if not recurse:
            yield self._shard_unit
            return
        seen: set[Unit] = set()
        for module in self.modules():
            if isinstance(module, FSDPModule) and module._shard_unit not in seen:
                seen.add(module._shard_unit)
                yield module._shard_unit

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move or cast buffers; sharded parameters only where nothing changes."""
        for group in self._shard_unit.groups:
            probe = fn(group.shard[:0])
            if (probe.dtype, probe.device) != (group.shard.dtype, group.shard.device):
                raise RuntimeError(
                    f"{group.sharded_params[0].spec.name}: cannot turn sharded parameters from "
                    f"{group.shard.dtype} on {group.shard.device} into {probe.dtype} on "
                    f"{probe.device}; move and cast the module before fully_shard()"
                )
        sharded = {
            id(p) for unit in self._units(True) for g in unit.groups for p in g.sharded_params
        }

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if id(tensor) in sharded else fn(tensor)

        return super()._apply(keep, recurse)  # type: ignore[no-untyped-call]


def wrap_class(module: nn.Module, unit: Unit) -> None:
    """Give ``module`` the methods of FSDPModule and its unit. Local."""
    cls = type(module)
    wrapped = _wrapped_classes.get(cls)
    if wrapped is None:
        wrapped = cast("type[nn.Module]", type(f"FSDP{cls.__name__}", (FSDPModule, cls), {}))
        _wrapped_classes[cls] = wrapped
    module.__class__ = wrapped
    object.__setattr__(module, "_shard_unit", unit)
