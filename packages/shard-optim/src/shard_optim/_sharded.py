"""Sharding the state of any element-wise optimizer over replicated parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from typing import Any, overload

import torch
from torch.optim import Optimizer

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._flat import FlatOptimizer
from shard_optim._groups import (
    check_params,
    entries_of,
    labels_of,
    listed,
    name_in,
    names_of,
    unpack,
)
from shard_optim._hyper import check_comm
from shard_optim._shelf import Shelf
from shard_optim._state import hyper_of, keys_of, pack_groups, through_hooks

_SCALARS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers, for a whole parameter

# What is no element-wise optimizer, by class name, and the way out.
_SHARES = "{0} of shard_optim takes these parameters and comm= itself"
_CUT = (
    "shard the parameters with shard_tensor or shard-fsdp and give them to {0} of shard_optim, or "
    "give it these, with all state on every rank"
)
_WAYS = {
    **dict.fromkeys(("Muon", "SOAP", "Shampoo"), _SHARES),
    **dict.fromkeys(("Adafactor", "AdamW8bit"), _CUT),
    **dict.fromkeys(("LBFGS", "SparseAdam"), "shard_optim has none that does what {0} does"),
}


class ShardedOptimizer(Optimizer):
    """Any element-wise optimizer with its state cut over ranks that hold the same parameters.

    Each rank updates its share of all parameters and holds the state of that share alone; then
    the updated parameters are gathered, in one collective per dtype. Gradients must be the same on
    all ranks when ``step`` is called, as DistributedDataParallel leaves them.

    Parameters are moved into one buffer when the optimizer is made: the objects stay, what their
    ``data`` was before is no longer theirs. Make it after the model is on its device.

    Args:
        params: plain parameters, ``(name, parameter)`` pairs, or groups of either.
        optimizer_class: of ``torch.optim``, of this package, or of one's own; each element of a
            parameter must be updated from that element's gradient and state alone.
        comm: the ranks.
        hyper: what ``optimizer_class`` takes besides parameters.

    Raises:
        TypeError: a parameter is no tensor; ``comm`` is no communicator.
        ValueError: ``optimizer_class`` works on whole matrices or all parameters at once; a
            parameter is sharded already; there are no parameters; one is listed twice, shares
            memory with another, is no leaf, has holes between its elements or is not floating
            point.

    **Collective**: ``step``: one all_gather of the parameters per dtype; every rank must call.
    Everything else is local.

    **Memory**: the state of one rank's share, and one buffer that takes the place of the
    parameters' own memory.

    **Source**: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", 2020.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        comm: Comm,
        **hyper: Any,
    ) -> None:
        make: Callable[..., Optimizer] = optimizer_class
        names = [each.__name__ for each in getattr(optimizer_class, "__mro__", ())]
        whole = next((name for name in names if name in _WAYS), None)
        if whole is not None:
            raise ValueError(
                f"expected an element-wise optimizer, got {names[0]}; {_WAYS[whole].format(whole)}"
            )
        check_comm(comm)
        self._comm = comm
        self._shelves: list[Shelf] = []
        self._pieces: dict[torch.Tensor, ShardTensor] = {}
        self._inner: Optimizer | None = None
        super().__init__(listed(params), {})
        self._shelve(self.param_groups)
        groups = [self._inner_group(group) for group in self.param_groups]
        inner = make(groups, **hyper)
        self._inner = inner
        self.defaults = inner.defaults
        for group, other in zip(self.param_groups, inner.param_groups, strict=True):
            group.update({**hyper_of(other), **hyper_of(group)})

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError: the parameters' memory belongs to one optimizer."""
        raise TypeError(
            "a ShardedOptimizer holds its parameters' memory and its communicator and does not "
            "copy or pickle; save its state_dict()"
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with hyper-parameters of its own where it names any. Local.

        Args:
            param_group: ``"params"`` as in the constructor, and hyper-parameters.

        Raises:
            TypeError: as for the constructor.
            ValueError: as for the constructor; nothing was added.
        """
        if not isinstance(param_group["params"], set):  # torch's own check refuses sets
            entries = param_group["params"] = entries_of(param_group, len(self.param_groups))
            params, names = unpack(entries, self.param_groups)
            for param, name in zip(params, names, strict=True):
                if isinstance(param, ShardTensor):
                    raise ValueError(
                        f"{name}: expected a plain parameter, got a ShardTensor; give it to the "
                        f"optimizer itself, whose state is sharded with it"
                    )
            check_params(params, names, self.param_groups)
        super().add_param_group(param_group)
        if self._inner is not None:
            group = self.param_groups[-1]
            self._shelve([group])
            self._inner.add_param_group(self._inner_group(group))
            group.update({**hyper_of(self._inner.param_groups[-1]), **hyper_of(group)})

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update this rank's share of every parameter that has a gradient, and gather all.

        Args:
            closure: computes the loss anew, with gradients.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a gradient is sparse or of another dtype.
            RuntimeError: a parameter was moved to other memory.

        **Collective**: one all_gather per dtype.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for shelf in self._shelves:
            shelf.lend_grads()
        inner = self._synced()
        inner.step()
        for piece in self._pieces.values():
            piece.grad = None
        for shelf in self._shelves:
            shelf.gather()
        self._show(inner)
        return loss

    def state_dict(self, *, allocate: bool | Collection[str] = False) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name, sharing memory with the optimizer.

        Args:
            allocate: add state for parameters that have none yet, for a checkpoint to be read
                into and then to be given to ``load_state_dict``; the optimizer itself does not
                get it. True: for those that are to be trained. Names: also for frozen parameters
                that are so called.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [...]}``, where each group lists names under
            ``"params"``. State with the shape of its parameter is ShardTensors.

        Raises:
            TypeError: ``allocate`` is one name.
            ValueError: two parameters have one name.

        **Collective**: local.
        """
        if isinstance(allocate, str):
            raise TypeError(f"allocate: expected a collection of names, got {allocate!r}")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        inner, names = self._synced(), names_of(self.param_groups)
        if isinstance(inner, FlatOptimizer):
            inner.state_dict(allocate=allocate)
        named = () if isinstance(allocate, bool) else allocate
        state: dict[str, dict[str, Any]] = {}
        for group in self.param_groups:
            for param in group["params"]:
                name, own = names[param], inner.state.get(self._pieces[param])
                if not own and allocate is not False and (param.requires_grad or name in named):
                    own = _blank_state(type(inner), group, self._pieces[param])
                if own:
                    state[name] = dict(own)
        result: dict[str, Any] = {
            "state": state,
            "param_groups": pack_groups(self.param_groups, names),
        }
        return through_hooks(self._optimizer_state_dict_post_hooks, self, result)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and hyper-parameters in, by name, or by position where there are no names.

        Args:
            state_dict: from ``state_dict()`` at the same world size or with full tensors, or that
                of the optimizer by itself on the whole parameters.

        Raises:
            ValueError: groups or names differ, or a shape or a cut does not fit; nothing was
                changed.

        **Collective**: local.
        """
        saved = through_hooks(self._optimizer_load_state_dict_pre_hooks, self, dict(state_dict))
        theirs = saved["param_groups"]
        if len(theirs) != len(self.param_groups):
            raise ValueError(
                f"expected {len(self.param_groups)} parameter groups, got {len(theirs)}; build the "
                f"optimizer with the groups of the one that was saved"
            )
        inner = self._synced()
        copy = not isinstance(inner, FlatOptimizer)  # which copies into what it has
        found: dict[ShardTensor, dict[str, Any]] = {}
        for number, (group, other) in enumerate(zip(self.param_groups, theirs, strict=True)):
            names = labels_of(group, number)
            for param, name, key in zip(
                group["params"], names, keys_of(other, group, number), strict=True
            ):
                source = saved["state"].get(key)
                if source:
                    piece = self._pieces[param]
                    found[piece] = {
                        k: _cut(name, k, v, piece, copy=copy) for k, v in source.items()
                    }
        if isinstance(inner, FlatOptimizer):
            state = {piece.spec.name: own for piece, own in found.items()}
            named = [
                {**other, "params": [self._pieces[p].spec.name for p in group["params"]]}
                for group, other in zip(self.param_groups, theirs, strict=True)
            ]
            inner.load_state_dict({"state": state, "param_groups": named})
            theirs = inner.param_groups
        else:
            inner.state.clear()
            for piece, own in found.items():
                inner.state[piece] = own
        for group, other in zip(self.param_groups, theirs, strict=True):
            group.update(deepcopy(hyper_of(other)))
        self._show(inner)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _shelve(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Move the parameters of groups that have no place yet, one buffer per dtype and device."""
        names = {
            param: name
            for number, group in enumerate(self.param_groups)
            for param, name in zip(group["params"], labels_of(group, number), strict=True)
        }
        kinds: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
        for group in groups:
            for param in group["params"]:
                kinds.setdefault((param.dtype, param.device), []).append((names[param], param))
        with torch.no_grad():
            for named in kinds.values():
                shelf = Shelf.of(named, self._comm)
                self._shelves.append(shelf)
                self._pieces.update(zip(shelf.params, shelf.pieces, strict=True))

    def _inner_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        pieces = [self._pieces[param] for param in group["params"]]
        return {**hyper_of(group), "params": pieces}

    def _synced(self) -> Optimizer:
        """The optimizer of the pieces, with the hyper-parameters that the groups have now."""
        assert self._inner is not None
        for group, other in zip(self.param_groups, self._inner.param_groups, strict=True):
            other.update(hyper_of(group))
        for param, piece in self._pieces.items():
            piece.requires_grad_(param.requires_grad)
        return self._inner

    def _show(self, inner: Optimizer) -> None:
        """Show each parameter's state under the parameter itself."""
        self.state.clear()
        for param, piece in self._pieces.items():
            if inner.state.get(piece):
                self.state[param] = inner.state[piece]

    def _check(self) -> None:
        for shelf in self._shelves:
            moved = shelf.check_place()
            if moved is not None:
                raise RuntimeError(
                    f"{moved}: its memory was replaced after the optimizer was made; make the "
                    f"optimizer after the model has its device and dtype, and copy values in place"
                )
            for param in shelf.params:
                grad = param.grad
                if grad is None:
                    continue
                if grad.layout is not torch.strided or grad.dtype is not param.dtype:
                    raise ValueError(
                        f"{name_in(self.param_groups, param)}: expected a dense gradient of "
                        f"{param.dtype}, got {grad.layout} of {grad.dtype}"
                    )


def _cut(name: str, key: str, value: Any, piece: ShardTensor, *, copy: bool) -> Any:
    """This rank's share of one saved state tensor, in memory of its own if that is asked for."""
    if not isinstance(value, torch.Tensor):
        return deepcopy(value)
    if isinstance(value, ShardTensor):
        if not piece.spec.is_cut_like(value.spec, piece.comm.size):
            raise ValueError(
                f"{name}: {key} is a piece [{value.spec.start}, {value.spec.stop}) of another "
                f"sharding; load it with shard_ckpt, which moves state between world sizes"
            )
        return piece.like(value.local.clone() if copy else value.local)
    if key not in _SCALARS and value.shape == piece.shape:
        own = value.reshape(-1)[piece.spec.start : piece.spec.stop]
        return piece.like(own.to(piece.device, copy=copy))
    if value.numel() != 1:
        raise ValueError(
            f"{name}: expected {key} of shape {tuple(piece.shape)}, got {tuple(value.shape)}"
        )
    return value.clone()


@torch.no_grad()
def _blank_state(
    kind: Callable[..., Optimizer], group: Mapping[str, Any], piece: ShardTensor
) -> dict[str, Any]:
    """State as one step of zeros makes it: a template to be read into."""
    twin = torch.nn.Parameter(piece.like(torch.zeros_like(piece.local)))
    twin.grad = piece.like(torch.zeros_like(piece.local))
    optimizer = kind([{**{k: v for k, v in group.items() if k != "param_names"}, "params": [twin]}])
    optimizer.step()
    return dict(optimizer.state[twin])
