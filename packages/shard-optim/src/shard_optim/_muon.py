"""Muon: steps along orthogonalized momentum, each matrix worked on by one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_counts, check_decay, check_several
from shard_optim._matrix import MatrixOptimizer
from shard_optim._newton import cost_of, orthogonalized
from shard_optim._offload import Offload
from shard_optim._runs import flat_piece
from shard_optim._slots import OwnedSlot, Slot
from shard_optim._state import Saved
from shard_optim._window import widened, windows
from shard_optim._workshop import Matrix

_MATRIX = (Slot("momentum_buffer"),)
_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_SENT = torch.bfloat16  # what iterations are done in


class Muon(MatrixOptimizer):
    """Momentum whose singular values are all brought to 1, for matrices; AdamW for the rest.

    Momentum is kept and averaged where parameters are. The average of each matrix is brought whole
    to one rank in bfloat16, orthogonalized there, and pieces of the result come back. Owners are
    balanced by cost over the whole model, and matrices travel while others are worked on. Results
    have the same bits as on one rank.

    Parameters that do not have two dimensions, and all of a group with ``elementwise=True``, are
    updated as ``AdamW`` does, with the group's ``lr``, ``weight_decay``, ``betas`` and
    ``adam_eps``. Embeddings and output layers are better put into such a group.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        weight_decay: decoupled decay, at least 0.
        momentum: how much of the average is kept, in [0, 1).
        nesterov: look ahead by one more step of momentum.
        comm: the ranks that hold the plain parameters, with the same values and gradients, as
            DistributedDataParallel leaves them. Each plain matrix is then averaged and worked on
            by one of them, by every rank else.
        offload: where state lives between steps: with the parameters by default, or ``"cpu"``,
            ``"disk"`` or an ``Offload``. Results have the same bits.
        hyper: ``adjust_lr_fn``, how the rate depends on the shape: None or ``"original"`` by the
            root of rows over columns where that is above 1, ``"match_rms_adamw"`` so that AdamW's
            rates fit; ``ns_coefficients`` (three numbers), ``ns_steps`` and ``eps`` of the
            iterations; ``elementwise``, ``betas`` and ``adam_eps`` of what is updated as AdamW
            does.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter has
            another name or is no number; ``comm`` is no communicator.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements, is not
            floating point, or its comm has no ``all_to_all``; there is no such place to offload to.

    **Collective**: a step takes one small all_reduce per comm, two where state is on disk, and two
    all_to_alls per round of sharded matrices or one all_gather per round of plain ones. Of sharded
    matrices 2 bytes per element that is not with its owner are sent, once each way; of plain ones
    the owners' results, as much from each rank as from the one that has most. State dictionaries
    are local.

    **Memory**: one buffer of each matrix's piece; of plain matrices of several ranks, the buffers
    of those that a rank owns. During a step 2 bytes per element of the pieces and of twice what a
    round sends, and the matrix at hand. Offloaded, buffers are elsewhere, and
    ``Offload.window_bytes`` here from the first step on; of plain matrices of several ranks, where
    that is less, three of the largest besides.

    **Source**: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        comm: Comm | None = None,
        offload: str | Offload | None = None,
        **hyper: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "adjust_lr_fn": None,
            "ns_coefficients": (3.4445, -4.7750, 2.0315),
            "ns_steps": 5,
            "eps": 1e-7,
            "betas": (0.9, 0.999),
        }
        super().__init__(params, defaults, hyper, comm=comm, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        super()._check_hyper(group, where)
        check_at_least_0(group, ("eps",), where)
        check_decay(group, "momentum", where)
        check_several(group, "ns_coefficients", where, count=3)
        check_counts(group, ("ns_steps",), where)
        if group["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(
                f"{where}expected adjust_lr_fn to be one of {_ADJUSTMENTS}, got "
                f"{group['adjust_lr_fn']!r}"
            )

    def _is_settled(self, param: torch.Tensor) -> bool:
        return not isinstance(param, ShardTensor)

    def _cost(self, group: Group, param: torch.Tensor) -> float:
        rows, columns = param.shape
        return float(group["ns_steps"] * cost_of(rows, columns))

    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return self._owned_slots(param, _owned) if param in self._owners else _MATRIX

    def _adapt(self, source: Saved) -> Saved:
        """Add the step of momentum, which torch does not count, and none is needed."""
        return {"step": 1.0, **source} if source else {}

    def _matrices(self, job: Job) -> list[Matrix]:
        average = self._averages if job.slots is _MATRIX else self._owned_averages
        return [
            Matrix(
                param=param,
                piece=piece,
                cost=self._cost(job.group, param),
                solve=partial(_solve, job.group, tuple(param.shape)),
                apply=partial(_apply, job.group, param),
                comm=self._ranks_of(job.group, param),
                owner=self._owners.get(param),
            )
            for param, piece in zip(job.members, average(job), strict=True)
        ]

    def _averages(self, job: Job) -> list[torch.Tensor]:
        """Average gradients into the momentum, run by run; pieces of what is to be worked on."""
        pieces = [torch.empty(0, dtype=_SENT, device=param.device) for param in job.members]
        wholes: dict[int, torch.Tensor] = {}  # by the first row of a run, of which lanes have parts
        for run in (run for lane in job.plan.lanes for run in lane.runs):
            head = run.rows[0]
            if head not in wholes:
                sizes = [job.grads[row].numel() for row in run.rows]
                wholes[head] = torch.empty(sum(sizes), dtype=_SENT, device=pieces[head].device)
                for row, piece in zip(run.rows, wholes[head].split(sizes), strict=True):
                    pieces[row] = piece
        with self._home.keeping(), closing(self._home.each(job.plan.lanes)) as lanes:
            for lane in lanes:
                flats = zip(lane.flats["momentum_buffer"], lane.flat_grads(job.grads), strict=True)
                for run, (buffer, grad) in zip(lane.runs, flats, strict=True):
                    _average(job.group, buffer, grad, wholes[run.rows[0]][run.span or slice(None)])
        if self._home.lost is not None:  # the others wait for this rank's pieces
            for whole in wholes.values():
                whole.fill_(math.nan)
        return pieces

    def _owned_averages(self, job: Job) -> list[torch.Tensor]:
        """Average whole gradients where momentum is; nothing comes back on other ranks."""
        buffers = [flat_piece(self.state[p]["momentum_buffer"]).view(-1) for p in job.members]
        units = [(p.device, [each]) for p, each in zip(job.members, buffers, strict=True)]
        pieces = []
        with self._home.streaming(units) as states:
            for grad in job.grads:
                (buffer,) = next(states)
                pieces.append(torch.empty(buffer.numel(), dtype=_SENT, device=grad.device))
                _average(job.group, buffer, grad.view(-1)[: buffer.numel()], pieces[-1])
        return pieces


def _owned(**home: Any) -> tuple[Slot, ...]:
    return (OwnedSlot("momentum_buffer", **home),)


def _average(group: Group, buffer: torch.Tensor, grad: torch.Tensor, out: torch.Tensor) -> None:
    """Average a flat gradient into a flat buffer, and write what is to be worked on."""
    momentum = group["momentum"]
    for average, slope, part in windows([buffer, grad, out]):
        new, mean = widened(slope).mul_(1 - momentum), widened(average)
        average.copy_(mean.mul_(momentum).add_(new))
        if group["nesterov"]:
            mean.mul_(momentum).add_(new)
        part.copy_(mean)


def _solve(
    group: Group, shape: tuple[int, ...], whole: torch.Tensor, state: Sequence[torch.Tensor]
) -> torch.Tensor:
    if not whole.numel():
        return whole
    solved = orthogonalized(
        whole.view(shape),
        coefficients=group["ns_coefficients"],
        steps=group["ns_steps"],
        eps=group["eps"],
    )
    return solved.view(-1)


def _apply(group: Group, param: torch.Tensor, result: torch.Tensor) -> None:
    rate = group["lr"] * _adjustment(group["adjust_lr_fn"], *param.shape)
    decay = 1 - group["lr"] * group["weight_decay"]
    for part, step in windows([flat_piece(param), result]):
        part.copy_(widened(part).mul_(decay).sub_(widened(step).mul_(rate)))


def _adjustment(kind: str | None, rows: int, columns: int) -> float:
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(columns, 1)))
