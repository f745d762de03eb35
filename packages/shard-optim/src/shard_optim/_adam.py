"""Adam and AdamW over flat runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from shard_optim._blocks import CODES
from shard_optim._codec import decode_moments
from shard_optim._copies import Copies
from shard_optim._flat import FlatOptimizer, Job
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_decay
from shard_optim._offload import Offload
from shard_optim._plan import Lane
from shard_optim._slots import Slot
from shard_optim._state import Saved
from shard_optim._wide import kahan_adamw, stochastic_adamw

_ROUNDINGS = ("nearest", "stochastic", "kahan")
_NARROW = (torch.bfloat16, torch.float16)

MOMENTS = (Slot("exp_avg"), Slot("exp_avg_sq"))
_COMPENSATED = (*MOMENTS, Slot("compensation"))


class Adam(FlatOptimizer):
    """Adam, one fused call per parameter group.

    Parameters, gradients and moments that lie side by side in memory, as those of a sharded unit
    do, are updated as one flat tensor. Results are those of ``torch.optim.Adam(fused=True)`` up
    to rounding, and have the same bits however the parameters are sharded.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: times the parameter is added to the gradient, at least 0.
        offload: where state lives between steps: with the parameters by default, or
            ``"cpu"``, ``"disk"`` or an ``Offload``. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.

    **Collective**: local; nothing is ever sent.

    **Memory**: two moments of each parameter's piece in its dtype, made at its first gradient, so
    8 bytes per float32 element of a rank's pieces, and 4 per parameter. Parameters that never get
    a gradient have no state. A step takes nothing besides.
    Offloaded, that is the same number of bytes elsewhere, and ``Offload.window_bytes``
    here from the first step on.

    **Source**: Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015.
    """

    _DECOUPLED: ClassVar[bool] = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, hyper, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        check_adam(group, where)

    def _switches(self) -> Mapping[str, Any]:
        return {
            "amsgrad": False,
            "maximize": False,
            "decoupled_weight_decay": self._DECOUPLED,
        }

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return MOMENTS

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        fused_adam(lane, grads, job.group, decoupled=self._DECOUPLED, copies=job.copies)


class AdamW(Adam):
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
        rounding: what becomes of parameters that are kept in 16 bits alone, where small steps
            would round to nothing. ``"nearest"`` leaves it at that. ``"stochastic"`` rounds
            parameters and moments of bfloat16 up or down at random, right on average; the bits
            drawn depend on name, step and element, not on the number of ranks. ``"kahan"`` keeps
            what was lost in a state tensor of its own; moments stay rounded, so a second beta
            above 0.99 would not let the second moment fall. Wider parameters are updated as ever.
        offload: where state lives between steps: with the parameters by default, or
            ``"cpu"``, ``"disk"`` or an ``Offload``. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.

    **Collective**: local; but for loading what AdamW8bit holds in pieces, one all_reduce for each
    parameter of which a boundary between ranks cuts a block.

    **Memory**: two moments of each parameter's piece in its dtype, made at its first gradient, and
    a third tensor with ``rounding="kahan"``, so 8 bytes per float32 element of a rank's pieces, and
    4 per parameter. Parameters that never get a gradient have no state. A step takes nothing
    besides; with another ``rounding`` at most nine windows in float32.
    Offloaded, that is the same number of bytes elsewhere, and ``Offload.window_bytes``
    here from the first step on.

    **Source**: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    _DECOUPLED: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rounding: str = "nearest",
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "rounding": rounding,
        }
        FlatOptimizer.__init__(self, params, hyper, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        super()._check_hyper(group, where)
        if group["rounding"] not in _ROUNDINGS:
            raise ValueError(
                f"{where}expected rounding to be one of {_ROUNDINGS}, got {group['rounding']!r}"
            )

    def _check_member(self, param: torch.Tensor, name: str, group: Group) -> None:
        if group["rounding"] == "stochastic" and param.dtype == torch.float16:
            raise ValueError(
                f"{name}: expected bfloat16 or a wider dtype with rounding='stochastic', got "
                f"{param.dtype}; use rounding='kahan'"
            )

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        kahan = group["rounding"] == "kahan" and param.dtype in _NARROW
        return _COMPENSATED if kahan else MOMENTS

    def _other_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return () if self._slots_of(group, param) is _COMPENSATED else CODES

    def _fill(self, param: torch.Tensor, source: Saved, slots: tuple[Slot, ...]) -> None:
        if source["exp_avg"].is_floating_point():
            super()._fill(param, source, slots)
        else:
            self._fill_step(param, source)
            decode_moments(param, self.state[param], source)

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        age = job.plan.age
        if job.slots is _COMPENSATED:
            kahan_adamw(lane, grads, job.group, age)
        elif job.group["rounding"] == "stochastic" and lane.params.parts[0].dtype in _NARROW:
            stochastic_adamw(lane, grads, job.group, age, self._names())
        else:
            super()._update(lane, grads, job)


def check_adam(group: Group, where: str) -> None:
    """Check the hyper-parameters of Adam and its kin. Local.

    Raises:
        TypeError: one is no number; the message begins with ``where``.
        ValueError: one is out of range.
    """
    check_at_least_0(group, ("lr", "eps", "weight_decay"), where)
    check_decay(group, "betas", where, count=2)


def fused_adam(
    lane: Lane,
    grads: Sequence[torch.Tensor],
    group: Group,
    *,
    decoupled: bool,
    copies: Copies,
) -> None:
    """Update one lane by torch's fused kernel.

    Args:
        lane: with slots ``exp_avg`` and ``exp_avg_sq``.
        grads: the members' gradients.
        group: hyper-parameters.
        decoupled: whether weight decay acts on the parameter instead of the gradient.
        copies: what is written besides.

    **Collective**: local.
    """
    lr = group["lr"]
    device = lane.params.parts[0].device
    beta1, beta2 = group["betas"]
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for params, slopes, first, second, steps in copies.calls(
        lane,
        lane.join_grads(grads),
        lane.slots["exp_avg"].parts,
        lane.slots["exp_avg_sq"].parts,
        lane.steps,
    ):
        kernel(
            params,
            slopes,
            first,
            second,
            [],
            steps,
            lr=lr.to(device) if isinstance(lr, torch.Tensor) else lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )
