"""AdamW over flat runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.optim import Optimizer

from shard_flat import ShardTensor
from shard_optim._plan import SLOTS, StepPlan, allocate_state, make_plan
from shard_optim._runs import piece_of


class AdamW(Optimizer):
    """Adam with decoupled weight decay, one fused call per parameter group.

    Parameters, gradients and moments that lie side by side in memory, as those of a sharded unit
    do, are updated as one flat tensor. Results are those of ``torch.optim.AdamW(fused=True)``.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: decoupled decay, at least 0.

    Raises:
        ValueError: a hyper-parameter is out of range.

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
        if not lr >= 0:
            raise ValueError(f"expected lr >= 0, got {lr}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"expected both betas in [0, 1), got {betas}")
        if not eps >= 0:
            raise ValueError(f"expected eps >= 0, got {eps}")
        if not weight_decay >= 0:
            raise ValueError(f"expected weight_decay >= 0, got {weight_decay}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._plans: dict[int, StepPlan] = {}
        super().__init__(params, defaults)

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
            ValueError: a gradient's dtype or kind is not that of its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            members = [p for p in group["params"] if p.grad is not None]
            if not members:
                continue
            grads = [_grad_piece(p) for p in members]
            plan = self._plans.get(index)
            if plan is None or not plan.holds(members, grads):
                for param in members:
                    _check_grad(param)
                plan = self._plans[index] = make_plan(members, grads, self.state)
            beta1, beta2 = group["betas"]
            torch._foreach_add_(plan.steps, 1)
            for cut in plan.cuts():
                cut.load()
            torch._fused_adamw_(
                plan.params.parts,
                plan.join_grads(grads),
                plan.slots["exp_avg"].parts,
                plan.slots["exp_avg_sq"].parts,
                [],
                plan.part_steps(),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            for cut in plan.cuts():
                cut.store()
            if plan.empty:
                # A rank whose piece is empty must see the same change of version as the others.
                torch.autograd.graph.increment_version(plan.empty)
        return loss

    def state_dict(self, *, allocate: bool = False) -> dict[str, Any]:
        """Return state and hyper-parameters by parameter name, sharing memory with the optimizer.

        Reading changes no result of training.

        Args:
            allocate: make the state of parameters that have none yet (zeros, step 0), so
                that a checkpoint can be loaded into it.

        Returns:
            ``{"state": {name: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [...]}``, where
            each group lists names under ``"params"``. Moments of sharded parameters are
            ShardTensors.

        Raises:
            ValueError: two parameters have one name.

        **Collective**: local.
        """
        names = self._names()
        if allocate:
            self._plans.clear()
            for param in names:
                if param.requires_grad:
                    allocate_state(param, self.state[param])
                    self.state[param]["step"] = self.state[param]["step"].clone()
        return {
            "state": {n: dict(self.state[p]) for p, n in names.items() if self.state.get(p)},
            "param_groups": [
                {
                    **{k: v for k, v in group.items() if k not in ("params", "param_names")},
                    "params": [names[p] for p in group["params"]],
                }
                for group in self.param_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and hyper-parameters in, by name, or by position from a torch optimizer.

        Gradients stay as they are. Parameters without state in ``state_dict`` lose theirs.

        Args:
            state_dict: from ``state_dict()`` at any world size with the same pieces or with full
                tensors, or from ``torch.optim.AdamW.state_dict()`` with full tensors.

        Raises:
            ValueError: groups or names differ, a slot is missing, or a shape does not fit;
                nothing was changed.

        **Collective**: local.
        """
        names = self._names()
        sources = self._match(state_dict, names)
        for param, source in sources.items():
            _check_state(names[param], param, source)
        self._plans.clear()
        with torch.no_grad():
            for param in names.keys() - sources.keys():
                self.state.pop(param, None)
            for param, source in sources.items():
                state = self.state[param]
                state.pop("step", None)
                allocate_state(param, state)
                state["step"].fill_(float(source["step"]))
                for slot in SLOTS:
                    state[slot].copy_(source[slot])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})

    def _names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = {}
        for number, group in enumerate(self.param_groups):
            given = group.get("param_names")
            for i, param in enumerate(group["params"]):
                if given is not None:
                    names[param] = given[i]
                elif isinstance(param, ShardTensor):
                    names[param] = param.spec.name
                else:
                    names[param] = f"{number}.{i}"
        if len(set(names.values())) != len(names):
            seen: set[str] = set()
            twice = next(n for n in names.values() if n in seen or seen.add(n))  # type: ignore[func-returns-value]
            raise ValueError(
                f"{twice}: two parameters have this name; pass (name, parameter) pairs"
            )
        return names

    def _match(
        self, state_dict: Mapping[str, Any], names: dict[torch.Tensor, str]
    ) -> dict[torch.Tensor, Mapping[str, Any]]:
        """The saved state of each parameter that has one, after checking groups and names."""
        saved_groups = state_dict["param_groups"]
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(
                f"expected {len(self.param_groups)} parameter groups, got {len(saved_groups)}"
            )
        found: dict[torch.Tensor, Mapping[str, Any]] = {}
        used = set()
        for number, (group, saved) in enumerate(zip(self.param_groups, saved_groups, strict=True)):
            keys = list(saved["params"])
            if keys and not isinstance(keys[0], str):
                if len(keys) != len(group["params"]):
                    raise ValueError(
                        f"group {number}: expected {len(group['params'])} parameters, got "
                        f"{len(keys)}"
                    )
            else:
                mine = [names[p] for p in group["params"]]
                if set(mine) != set(keys):
                    raise ValueError(
                        f"group {number}: missing {sorted(set(mine) - set(keys))}, unexpected "
                        f"{sorted(set(keys) - set(mine))}"
                    )
                keys = mine
            for param, key in zip(group["params"], keys, strict=True):
                used.add(key)
                if state_dict["state"].get(key):
                    found[param] = state_dict["state"][key]
        unexpected = sorted(map(str, set(state_dict["state"]) - used))
        if unexpected:
            raise ValueError(f"state for {unexpected}, which no group lists")
        return found


def _grad_piece(param: torch.Tensor) -> torch.Tensor:
    """This rank's gradient, laid out in memory like the parameter."""
    grad = piece_of(param.grad)  # type: ignore[arg-type]
    if isinstance(param, ShardTensor) or grad.stride() == param.stride():
        return grad
    return torch.empty_like(param).copy_(grad)


def _check_grad(param: torch.Tensor) -> None:
    grad = param.grad
    assert grad is not None
    name = param.spec.name if isinstance(param, ShardTensor) else "a parameter"
    if grad.layout is not torch.strided or grad.dtype != param.dtype:
        raise ValueError(
            f"{name}: expected a dense gradient of {param.dtype}, got {grad.layout} of {grad.dtype}"
        )
    if isinstance(grad, ShardTensor) != isinstance(param, ShardTensor):
        raise ValueError(
            f"{name}: expected a gradient of type {type(param).__name__}, got {type(grad).__name__}"
        )


def _check_state(name: str, param: torch.Tensor, source: Mapping[str, Any]) -> None:
    for key in ("step", *SLOTS):
        if key not in source:
            raise ValueError(f"{name}: the state has no {key!r}, only {sorted(source)}")
    for slot in SLOTS:
        value = source[slot]
        if tuple(value.shape) != tuple(param.shape):
            raise ValueError(
                f"{name}: expected {slot} of shape {tuple(param.shape)}, got {tuple(value.shape)}"
            )
        if isinstance(value, ShardTensor):
            mine = param.spec if isinstance(param, ShardTensor) else None
            if mine is None or (mine.start, mine.stop) != (value.spec.start, value.spec.stop):
                raise ValueError(
                    f"{name}: {slot} is a piece [{value.spec.start}, {value.spec.stop}) of another "
                    f"sharding; load it with shard_ckpt, which moves state between world sizes"
                )
