"""The methods that a wrapped module gains; names and meaning are those of torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from shard_fsdp._comm_methods import CommMethods
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


class FSDPModule(CommMethods, nn.Module):
    """A module whose parameters are sharded; ``fully_shard`` mixes it into the module's class.

    Methods act on this module's unit, those with ``recurse`` by default also on all units
    inside. All are local unless they say otherwise.
    """

    _shard_unit: Unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on gathered parameters. Collective."""
        return _run(self, "forward", super().__call__, args, kwargs)

    # --- gathering ---

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
        """Free this unit's full parameters; the next gather reads all shards anew.

        A shard that something wrote without torch's knowledge, say through a numpy array, looks
        unchanged, and what was gathered from it stays in use until then.
        """
        self._shard_unit.reshard()
        self._shard_unit.spoil()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free full parameters after forward, or keep them for backward."""
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"expected a bool, got {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Free full parameters after backward, or keep them for the next microbatch."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these as soon as this module's forward begins, instead of the recorded next."""
        self._shard_unit.settings.forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather these as soon as this module's backward begins, instead of the one before."""
        self._shard_unit.settings.backward_prefetch = _units_of(modules)

    def set_prefetch_depth(self, forward: int = 1, backward: int = 1) -> None:
        """Gather that many units ahead, in the recorded order, below the outermost module.

        Explicit lists of modules to prefetch come first.

        Args:
            forward: units ahead in forward; 0 gathers each when it runs.
            backward: the same in backward.

        Raises:
            TypeError: a depth is not a whole number.
            ValueError: a depth is below 0.

        **Memory**: the full parameters of that many units and of the one that runs.
        """
        for depth in (forward, backward):
            if isinstance(depth, bool) or not isinstance(depth, int):
                raise TypeError(f"expected a number of units, got {depth!r}")
            if depth < 0:
                raise ValueError(f"expected a depth of at least 0, got {depth}")
        schedule = self._shard_unit.schedule
        schedule.forward_depth, schedule.backward_depth = forward, backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Skip gathering for backward where it needs no parameters, as for an embedding."""
        self._shard_unit.settings.unshard_in_backward = unshard_in_backward

    # --- reducing ---

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Switch the reduction of gradients on or off, for accumulation over microbatches.

        While it is off, gradients add up unreduced in the reduction dtype, one full gradient
        buffer per group. Switch it on before the last microbatch. This module's ``zero_grad()``
        drops them; an optimizer's does not, since it sees sharded parameters alone.

        Args:
            requires_gradient_sync: whether backward reduces.
            recurse: also for the units inside this module.
        """
        for unit in self._units(recurse):
            unit.settings.sync_gradients = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """In hybrid sharding, switch the sum over replicas on or off.

        While it is off, gradients are reduced over the ranks of one replica and add up there, a
        share of a gradient buffer each.
        """
        for unit in self._units(recurse):
            unit.settings.all_reduce_gradients = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether another backward follows before gradients are read.

        If one does, the last reduction stays in flight and the recorded order is kept.
        """
        self._shard_unit.schedule.is_last_backward = is_last_backward

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Give parameters without a gradient a zero one, so that ranks may use different ones.

        Args:
            reduce_scatter_unused_params: whether to; by default ranks that differ raise an error.
            recurse: also for the units inside this module.
        """
        for unit in self._units(recurse):
            unit.settings.zero_fill_unused = reduce_scatter_unused_params

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients by ``factor`` instead of the number of ranks.

        Raises:
            ValueError: the factor is not above 0.
        """
        if not factor > 0:
            raise ValueError(f"expected a divide factor above 0, got {factor}")
        self._shard_unit.settings.divide_factor = float(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with each reduced flat gradient of this unit, before it is handed out.

        On one rank nothing is reduced and the hook is not called.

        Args:
            hook: may change its argument ``[shard_numel]`` in place.
            stream: where to run it on an accelerator; None is the current stream.
        """

        def on_stream(reduced: torch.Tensor) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                hook(reduced)
            torch.cuda.current_stream().wait_stream(stream)

        self._shard_unit.settings.all_reduce_hook = hook if stream is None else on_stream

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Let that many reductions be in flight at once, each with a buffer of its own.

        Raises:
            TypeError: the count is not a whole number.
            ValueError: the count is below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"expected a number of buffers, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"expected at least 1 buffer, got {max_input_buffers}")
        self._shard_unit.schedule.max_flying = max_input_buffers

    def reset_iter_state(self) -> None:
        """Drop what a step left behind that an exception cut short, gradients in flight too.

        The next forward does so by itself.
        """
        self._shard_unit.schedule.reset()

    # --- inside ---

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
        """Cast, move or empty parameters and buffers, as ``nn.Module`` does.

        Pieces land in memory of their own and become part of one flat shard again.
        """
        self._shard_unit.reshard()
        result = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for group in self._shard_unit.groups:
            group.settle()
        return result

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and sharded parameters, also after a backward that raised."""
        self._shard_unit.schedule.recover()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state as ``nn.Module`` does, with ShardTensors that share memory."""
        self._shard_unit.schedule.recover()
        return super().state_dict(*args, **kwargs)

    def __copy__(self) -> FSDPModule:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy as any module is copied; the copy has shards of its own and shares comms."""
        own: Any = getattr(super(), "__deepcopy__", None)
        if own is not None:
            return own(memo)
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__setstate__(copy.deepcopy(_state_of(self), memo))  # type: ignore[no-untyped-call]
        return new

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"{type(self).__name__}: a sharded module holds communicators and does not pickle; "
            f"save its state_dict() with shard_ckpt or torch.distributed.checkpoint, or what "
            f"get_model_state_dict(full_state_dict=True) returns"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, those of microbatches that were not reduced yet too."""
        super().zero_grad(set_to_none)
        for unit in self._units(True):
            for group in unit.groups:
                group.reducer.discard()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as ``nn.Module`` does; ``assign=True`` takes pieces and full tensors alike."""
        result = super().load_state_dict(*args, **kwargs)
        for unit in self._units(True):
            for group in unit.groups:
                group.settle()
        return result


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make another method of a wrapped module gather parameters as its forward does.

    Args:
        module: the module; nothing happens where it is not wrapped.
        method_name: a method such as ``"generate"`` or ``"encode"``.

    Raises:
        ValueError: the module has no such method.

    **Collective**: local; calls of the method are collective afterwards.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")
    if not isinstance(module, FSDPModule):
        return
    function = getattr(type(module), method_name)

    def gathered(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        return _run(self, method_name, functools.partial(function, self), args, kwargs)

    functools.update_wrapper(gathered, function)
    object.__setattr__(module, method_name, types.MethodType(gathered, module))


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted for pipeline programs: modules on one mesh share their comm here in any case.

    Raises:
        ValueError: something other than a wrapped module was given.
    """
    _units_of(modules)


def wrap_class(module: nn.Module, unit: Unit) -> None:
    """Give ``module`` the methods of FSDPModule and its unit. Local."""
    cls = type(module)
    wrapped = _wrapped_classes.get(cls)
    if wrapped is None:
        members = {"__getitem__": _getitem} if hasattr(cls, "__getitem__") else {}
        wrapped = cast("type[nn.Module]", type(f"FSDP{cls.__name__}", (FSDPModule, cls), members))
        _wrapped_classes[cls] = wrapped
    module.__class__ = wrapped
    object.__setattr__(module, "_shard_unit", unit)


def _state_of(module: FSDPModule) -> Any:
    """What a copy is made from: as classes say, else all attributes."""
    own = getattr(module, "__getstate__", None)
    if own is None:  # every object has one from Python 3.11 on
        return module.__dict__
    return own()


def _getitem(self: Any, index: Any) -> Any:
    """Index as the module does; a slice is a module of the plain class, as it is no unit."""
    part = super(FSDPModule, self).__getitem__(index)
    if type(part) is type(self) and "_shard_unit" not in part.__dict__:
        part.__class__ = type(self).__bases__[1]
    return part


def _run(
    module: FSDPModule,
    method: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not ForwardRun.is_needed(module._shard_unit):
        return function(*args, **kwargs)
    run = ForwardRun(module._shard_unit, module, method)
    try:
        args, kwargs = run.enter(args, kwargs)
        return run.leave(function(*args, **kwargs))
    except BaseException as error:
        run.fail(error)
        raise


def _units_of(modules: Sequence[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected modules that fully_shard wrapped, got {type(module)}")
    return [module._shard_unit for module in modules]
