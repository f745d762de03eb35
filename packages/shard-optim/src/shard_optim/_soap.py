"""SOAP: Adam in the eigenbasis of a matrix's gradients, each matrix kept by one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shard_comm import Comm
from shard_optim._eigen import eigen
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_counts, check_decay
from shard_optim._matrix import OwnedOptimizer
from shard_optim._offload import Offload
from shard_optim._slots import OwnedSlot, Slot

_SIDES = {"left": 0, "right": 1}


class SOAP(OwnedOptimizer):
    """Adam's step in the basis in which a matrix's gradients are least mixed; AdamW for the rest.

    The first gradient of a matrix only tells the basis: nothing but decay moves it then. The
    gradient of each matrix is brought whole to one rank, which keeps all state of the matrix, and
    pieces of the step come back. Owners are balanced by cost over the whole model. Results have
    the same bits as on one rank.

    Parameters that do not have two dimensions, and all of a group with ``elementwise=True``, are
    updated as ``AdamW`` does, with the group's ``lr``, ``weight_decay``, ``betas`` and
    ``adam_eps``.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the first and second moment, each in [0, 1).
        weight_decay: decoupled decay, at least 0.
        precondition_frequency: steps between two refreshes of the basis, at least 1.
        comm: the ranks that hold the plain parameters, with the same values and gradients, as
            DistributedDataParallel leaves them. Each plain matrix is then worked on by one of
            them, by every rank else.
        offload: where state lives between steps: with the parameters by default, or ``"cpu"``,
            ``"disk"`` or an ``Offload``. That of one matrix after another is brought to its owner,
            the next one while one is worked on. Results have the same bits.
        hyper: ``max_preconditioner_dim``, a side of a matrix that is longer keeps its own basis,
            and no state; ``eps``, added to the denominator; ``shampoo_beta``, the decay of the
            averages that give the basis, the second of ``betas`` by default; ``elementwise`` and
            ``adam_eps``.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter has
            another name or is no number; ``comm`` is no communicator.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements, is not
            floating point, or its comm has no ``all_to_all``; there is no such place to offload to.

    **Collective**: a step takes one small all_reduce per comm, two where state is on disk, and two
    all_to_alls per round of sharded matrices or one all_gather per round of plain ones, in float32,
    or in the parameters' dtype where that has fewer bits. Of sharded matrices what is not with its
    owner is sent, once each way; of plain ones the owners' results, as much from each rank as from
    the one that has most. State dictionaries are local.

    **Memory**: for each matrix that a rank owns, in float32, two moments and two squares of each
    side. Offloaded, that is the same number of bytes elsewhere. Here are
    ``Offload.window_bytes`` and, where that is less than three times the largest matrix's state, so
    much besides: three matrices that are worked on one after another. For parameters on the CPU
    that is pages of files, up to 4 MiB more for each of the three, and a copy of what of one does
    not begin at a multiple of 64 bytes.

    **Source**: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        comm: Comm | None = None,
        offload: str | Offload | None = None,
        **hyper: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": 8192,
            "eps": 1e-8,
            "shampoo_beta": None,
        }
        super().__init__(params, defaults, hyper, comm=comm, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        super()._check_hyper(group, where)
        check_at_least_0(group, ("eps", "max_preconditioner_dim"), where)
        if group["shampoo_beta"] is not None:
            check_decay(group, "shampoo_beta", where)
        check_counts(group, ("precondition_frequency",), where)

    def _cost(self, group: Group, param: torch.Tensor) -> float:
        rows, columns = param.shape
        return float(6 * rows * columns * (rows + columns) + rows**3 + columns**3)

    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        most = group["max_preconditioner_dim"]
        sides = tuple(s for s, dim in _SIDES.items() if param.shape[dim] <= most)
        return self._owned_slots(param, _slots, sides)

    def _solve(
        self, group: Group, own: dict[str, torch.Tensor], grad: torch.Tensor, step: int
    ) -> torch.Tensor:
        result = torch.zeros_like(grad) if step == 1 else _step(group, own, grad, step - 1)
        for side in _SIDES:
            if side in own:
                _learn(group, own, side, grad, step)
        return result


def _slots(sides: tuple[str, ...], **home: Any) -> tuple[Slot, ...]:
    wide = torch.float32
    moments = [OwnedSlot(name, wide, **home) for name in ("exp_avg", "exp_avg_sq")]
    squares = [
        OwnedSlot(f"{side}{what}", wide, dims=(_SIDES[side], _SIDES[side]), **home)
        for side in sides
        for what in ("", "_basis")
    ]
    return (*moments, *squares)


def _step(
    group: Group, own: dict[str, torch.Tensor], grad: torch.Tensor, step: int
) -> torch.Tensor:
    """Adam in the basis of earlier gradients; in that of this one its noise would be like it."""
    beta1, beta2 = group["betas"]
    first, second = own["exp_avg"], own["exp_avg_sq"]
    bases = [own.get(f"{side}_basis") for side in _SIDES]
    first.mul_(beta1).add_(grad * (1 - beta1))
    turned = _turned(grad, *bases)
    second.mul_(beta2).add_(turned.mul_(turned).mul_(1 - beta2))
    scale = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    straight = _turned(first, *bases).div_(scale).div_(1 - beta1**step)
    return _turned(straight, *(None if basis is None else basis.t() for basis in bases))


def _learn(
    group: Group, own: dict[str, torch.Tensor], side: str, grad: torch.Tensor, step: int
) -> None:
    """Average the squares of one side, and refresh its basis where its time has come."""
    average, basis = own[side], own[f"{side}_basis"]
    beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    square = grad @ grad.t() if side == "left" else grad.t() @ grad
    average.mul_(beta).add_(square.mul_(1 - beta))
    if step == 1:
        basis.copy_(eigen(average)[1])
    elif step % group["precondition_frequency"] == 0:
        # One step of power iteration leaves the vectors in their order, which moments rely on.
        basis.copy_(torch.linalg.qr(average @ basis).Q)


def _turned(
    matrix: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None
) -> torch.Tensor:
    """Return ``left.T @ matrix @ right`` in new memory; None stands for the identity."""
    turned = matrix.clone() if left is None else left.t() @ matrix
    return turned if right is None else turned @ right
