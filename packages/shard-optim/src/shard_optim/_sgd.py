"""Stochastic gradient descent over flat runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shard_optim._flat import FlatOptimizer, Job
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_numbers
from shard_optim._offload import Offload
from shard_optim._plan import Lane
from shard_optim._slots import Slot
from shard_optim._state import Saved
from shard_optim._window import widened, windows

_PLAIN: tuple[Slot, ...] = ()
_WITH_MOMENTUM = (Slot("momentum_buffer"),)


class SGD(FlatOptimizer):
    """Gradient descent with momentum, one fused call per parameter group.

    Results are those of ``torch.optim.SGD(fused=True)`` up to rounding, and have the same bits
    however the parameters are sharded.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        momentum: decay of the sum of gradients, at least 0. The first gradient is the sum as it
            is.
        dampening: what is left off each further gradient of the sum; 0.1 adds nine tenths.
        weight_decay: times the parameter is added to the gradient, at least 0.
        nesterov: look ahead by one more step of momentum; needs momentum and no dampening.
        maximize: go up the gradient.
        offload: where state lives between steps: with the parameters by default, or
            ``"cpu"``, ``"disk"`` or an ``Offload``. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.

    **Collective**: local; nothing is ever sent.

    **Memory**: one buffer of each parameter's piece in its dtype where there is momentum, so 4
    bytes per float32 element of a rank's pieces, and 4 per parameter. A step takes nothing besides;
    for parameters of 16 bits on the CPU a few windows in float32.
    Offloaded, that is the same number of bytes elsewhere, and ``Offload.window_bytes``
    here from the first step on.

    **Source**: Sutskever et al., "On the importance of initialization and momentum in deep
    learning", 2013.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, hyper, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        check_at_least_0(group, ("lr", "momentum", "weight_decay"), where)
        check_numbers(group, ("dampening",), where)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            raise ValueError(
                f"{where}expected momentum > 0 and dampening 0 with nesterov, got "
                f"{group['momentum']} and {group['dampening']}"
            )

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return _WITH_MOMENTUM if group["momentum"] else _PLAIN

    def _adapt(self, source: Saved) -> Saved:
        """Add the step, which torch does not count; where there is a buffer, one has been made."""
        kept = {key: value for key, value in source.items() if value is not None}
        return {"step": 1.0, **kept} if kept else {}

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        group, lr = job.group, job.group["lr"]
        first = lane.fresh and job.plan.age == 1
        param = lane.params.parts[0]
        if param.itemsize == 2 and param.device.type == "cpu":
            _narrow_sgd(lane, grads, group, first=first)
            return
        sums = [lane.slots["momentum_buffer"].parts] if group["momentum"] else []
        for params, slopes, *buffers in job.copies.calls(lane, lane.join_grads(grads), *sums):
            torch._fused_sgd_(
                params,
                slopes,
                buffers[0] if buffers else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=lr.to(param.device) if isinstance(lr, torch.Tensor) else lr,
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                is_first_step=first,
            )


def _narrow_sgd(lane: Lane, grads: Sequence[torch.Tensor], group: Group, *, first: bool) -> None:
    """Update one lane of 16 bits on the CPU in float32, rounding once.

    The fused kernel of torch 2.13 leaves such parameters as they are, and takes the momentum of
    other elements.
    """
    momentum, lr = group["momentum"], group["lr"]
    columns = [lane.flats["param"], lane.flat_grads(grads)]
    if momentum:
        columns.append(lane.flats["momentum_buffer"])
    for flats in zip(*columns, strict=True):
        for param, grad, *sums in windows(flats):
            exact, step = widened(param), widened(grad)
            if group["maximize"]:
                step.neg_()
            step.add_(exact * group["weight_decay"])
            for kept in sums:
                total = step
                if not first:
                    total = widened(kept).mul_(momentum).add_(step * (1 - group["dampening"]))
                kept.copy_(total)
                step = step + total * momentum if group["nesterov"] else total
            param.copy_(exact.sub_(step.mul_(lr)))
