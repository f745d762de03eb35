"""AdamW over flat runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, overload

import torch
from torch.optim import Optimizer

from shard_optim._grads import grad_piece
from shard_optim._groups import check_hyper, check_memory, check_params, name_in, names_of, unpack
from shard_optim._plan import Lane, StepPlan, make_plan
from shard_optim._slots import SLOTS, allocate_slots
from shard_optim._state import hyper_of, match_state, pack_groups


class AdamW(Optimizer):
    """Adam with decoupled weight decay, one fused call per parameter group.

    Parameters, gradients and moments that lie side by side in memory, as those of a sharded unit
    do, are updated as one flat tensor. Results are those of ``torch.optim.AdamW(fused=True)`` up
    to rounding, and have the same bits however the parameters are sharded. A group whose
    parameters are of several dtypes or on several devices takes one call for each.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: decoupled decay, at least 0.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point.

    **Collective**: local; nothing is ever sent.

    **Memory**: two moments of each parameter's piece, made at its first gradient. Parameters
    that never get one have no state.

    **Source**: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_hyper(defaults, "")
        if not isinstance(params, torch.Tensor):
            params = list(params)
            if not params:
                raise ValueError(
                    "expected at least one parameter, got none; a generator gives its parameters "
                    "only once"
                )
        self._plans: dict[int, StepPlan] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; what a step needs besides is made anew."""
        super().__setstate__(state)
        self._plans = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with hyper-parameters of its own where it names any. Local.

        Args:
            param_group: ``"params"`` as in the constructor, and hyper-parameters.

        Raises:
            TypeError: as for the constructor.
            ValueError: as for the constructor; nothing was added.
        """
        if not isinstance(param_group["params"], set):  # torch's own check refuses sets
            entries = param_group["params"]
            entries = [entries] if isinstance(entries, torch.Tensor) else list(entries)
            param_group["params"] = entries
            number = len(self.param_groups)
            params, names = unpack(entries, self.param_groups)
            first = f" ({names[0]}, ...)" if names else ""
            check_hyper({**self.defaults, **param_group}, f"group {number}{first}: ")
            check_params(params, names, self.param_groups)
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient. Local.

        Args:
            closure: computes the loss anew, with gradients.

        Returns:
            What ``closure`` returned.

        Raises:
            ValueError: a gradient is sparse, or its dtype, kind or range is not that of its
                parameter, or the parameter changed its shape or dtype under its state; nothing
                was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [self._collect(group) for group in self.param_groups]  # all checked, none changed
        for index, (members, grads) in enumerate(work):
            plan = self._plans.get(index)
            if plan is None or not plan.holds(members, grads, self.state):
                self._plans[index] = make_plan(members, grads, self.state, name_of=self._name_of)
        for index, (group, (_, grads)) in enumerate(zip(self.param_groups, work, strict=True)):
            plan = self._plans[index]
            plan.count()
            for lane in plan.lanes:
                _update(lane, grads, group)
            torch.autograd.graph.increment_version(plan.touched)
        return loss

    def state_dict(self, *, allocate: bool | Collection[str] = False) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name, sharing memory with the optimizer.

        Reading changes no result of training. What is written into the moments is seen by the
        optimizer at any time, what is written into a step counter until the next step.

        Args:
            allocate: make the state of parameters that have none yet (zeros, step 0), so that a
                checkpoint can be loaded into it. True: of those that are to be trained. Names,
                such as a checkpoint holds: also of frozen parameters that are so called.

        Returns:
            ``{"state": {name: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]}``, where
            each group lists names under ``"params"``. Moments of sharded parameters are
            ShardTensors.

        Raises:
            TypeError: ``allocate`` is one name.
            ValueError: two parameters have one name.

        **Collective**: local.
        """
        if isinstance(allocate, str):
            raise TypeError(f"allocate: expected a collection of names, got {allocate!r}")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        names = names_of(self.param_groups)
        self._plans.clear()
        if allocate is not False:
            named = () if allocate is True else allocate
            for group in self.param_groups:
                wanted = [p for p in group["params"] if p.requires_grad or names[p] in named]
                allocate_slots(wanted, self.state)
        result: dict[str, Any] = {
            "state": {n: dict(self.state[p]) for p, n in names.items() if self.state.get(p)},
            "param_groups": pack_groups(self.param_groups, names),
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, result)
            result = result if changed is None else changed
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and hyper-parameters in, by name, or by position where there are no names.

        Gradients stay as they are. Parameters without state in ``state_dict`` lose theirs.

        Args:
            state_dict: from ``state_dict()`` at any world size with the same pieces or with full
                tensors, or from ``torch.optim.AdamW.state_dict()`` with full tensors.

        Raises:
            ValueError: groups or names differ, a slot is missing, or a shape does not fit;
                nothing was changed.

        **Collective**: local.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, saved)
            saved = saved if changed is None else changed
        names = names_of(self.param_groups)
        sources = match_state(saved, self.param_groups, names)
        self._plans.clear()
        for param in names.keys() - sources.keys():
            self.state.pop(param, None)
        for group, theirs in zip(self.param_groups, saved["param_groups"], strict=True):
            allocate_slots([p for p in group["params"] if p in sources], self.state)
            group.update(deepcopy(hyper_of(theirs)))
        with torch.no_grad():
            for param, source in sources.items():
                own = self.state[param]
                own["step"] = torch.full_like(own["step"], float(source["step"]))
                for slot in SLOTS:
                    own[slot].copy_(source[slot])
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _collect(self, group: Mapping[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parameters of a group that have a gradient, and this rank's piece of each gradient."""
        found = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
        if len(found) < len(group["params"]):
            check_memory(group["params"], self._name_of)
        grads = [grad_piece(param, grad, self._name_of) for param, grad in found]
        return [param for param, _ in found], grads

    def _name_of(self, param: torch.Tensor) -> str:
        return name_in(self.param_groups, param)


def _update(lane: Lane, grads: Sequence[torch.Tensor], group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    device = lane.params.parts[0].device
    beta1, beta2 = group["betas"]
    changed = lane.changed()
    for cut in changed:
        cut.load()
    torch._fused_adamw_(
        lane.params.parts,
        lane.join_grads(grads),
        lane.slots["exp_avg"].parts,
        lane.slots["exp_avg_sq"].parts,
        [],
        lane.steps,
        lr=lr.to(device) if isinstance(lr, torch.Tensor) else lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )
    for cut in changed:
        cut.store()
