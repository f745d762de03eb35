"""Lion over flat runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shard_optim._flat import FlatOptimizer, Job
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_decay
from shard_optim._offload import Offload
from shard_optim._plan import Lane
from shard_optim._slots import Slot
from shard_optim._state import Saved
from shard_optim._window import Scratch

_SLOTS = (Slot("exp_avg"),)


class Lion(FlatOptimizer):
    """Steps of one size along the sign of an average of gradients.

    Runs of neighbours are updated as one flat tensor, a window at a time. Every operation is
    rounded by itself, in float32 or wider, so results have the same bits however the parameters
    are sharded.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: how much of the average there is in the direction, and how much of it is kept, each
            in [0, 1).
        weight_decay: decoupled decay, at least 0.
        offload: where state lives between steps: with the parameters by default, or
            ``"cpu"``, ``"disk"`` or an ``Offload``. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.

    **Collective**: local; nothing is ever sent.

    **Memory**: one moment of each parameter's piece in its dtype, so 4 bytes per float32 element of
    a rank's pieces, and 4 per parameter; a few windows during a step. Offloaded, that is the same
    number of bytes elsewhere, and ``Offload.window_bytes`` here from the first step on.

    **Source**: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, hyper, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        check_at_least_0(group, ("lr", "weight_decay"), where)
        check_decay(group, "betas", where, count=2)

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return _SLOTS

    def _adapt(self, source: Saved) -> Saved:
        """Other implementations count no steps, and none are needed."""
        return {"step": 1.0, **source} if source else {}

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        beta1, beta2 = job.group["betas"]
        lr, decay = job.group["lr"], job.group["weight_decay"]
        flats = zip(lane.flats["param"], lane.flats["exp_avg"], lane.flat_grads(grads), strict=True)
        room = Scratch()
        for whole in flats:
            for param, moment, grad in job.copies.windows(whole):
                value, old = room.wide("param", param), room.wide("moment", moment)
                new = room.wide("grad", grad)
                change, direction = (room.take(n, new, new.dtype) for n in ("change", "direction"))
                torch.sub(new, old, out=change)
                torch.mul(change, 1 - beta1, out=direction).add_(old).sign_().mul_(lr)
                old.add_(change.mul_(1 - beta2))
                if decay:
                    value.mul_(1 - lr * decay)
                value.sub_(direction)
                if value is not param:
                    param.copy_(value)
                    moment.copy_(old)
