"""SOAP: Adam in the eigenbasis of a matrix's gradients, each matrix kept by one rank."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, ClassVar

import torch

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._flat import Job
from shard_optim._groups import Group, check_at_least_0, check_decay
from shard_optim._matrix import MatrixOptimizer, check_names, is_matrix
from shard_optim._owners import assign_owners
from shard_optim._runs import flat_piece, piece_of
from shard_optim._slots import OwnedSlot, Slot
from shard_optim._window import widened, windows
from shard_optim._workshop import Matrix

_SIDES = {"left": 0, "right": 1}


class SOAP(MatrixOptimizer):
    """Adam's step in the basis in which a matrix's gradients are least mixed; AdamW for the rest.

    The first gradient of a matrix only tells the basis, and moves nothing. The gradient of each
    matrix is brought whole to one rank, which keeps all state of the matrix,
    and pieces of the step come back. Owners are balanced by cost over the matrices of a group.
    Results have the same bits as on one rank.

    Parameters that do not have two dimensions, and all of a group with ``elementwise=True``, are
    updated as ``AdamW`` does, with the group's ``lr``, ``weight_decay``, ``betas`` and
    ``adam_eps``.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them. Plain matrices are worked on by every rank.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the first and second moment, each in [0, 1).
        weight_decay: decoupled decay, at least 0.
        precondition_every: steps between two refreshes of the basis, at least 1.
        max_size: a side of a matrix that is longer keeps its own basis, and no state.
        hyper: ``eps``, added to the denominator; ``shampoo_beta``, the decay of the averages that
            give the basis, the second of ``betas`` by default; ``elementwise`` and ``adam_eps``.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter has
            another name.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements, is not
            floating point, or its comm has no ``all_to_all``.

    **Collective**: a step takes one small all_reduce and two all_to_alls per round of matrices and
    comm, in float32. State dictionaries are local.

    **Memory**: for each matrix that a rank owns, in float32, two moments and two squares of each
    side.

    **Source**: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024.
    """

    _SENT: ClassVar[torch.dtype] = torch.float32

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 3e-3,
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        weight_decay: float = 0.01,
        precondition_every: int = 10,
        max_size: int = 8192,
        **hyper: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "precondition_every": precondition_every,
            "max_size": max_size,
            "eps": 1e-8,
            "shampoo_beta": None,
            "elementwise": False,
            "adam_eps": 1e-8,
        }
        check_names(hyper, defaults)
        self._owners: dict[torch.Tensor, int] = {}
        super().__init__(params, {**defaults, **hyper})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, with owners by the same rule."""
        super().__setstate__(state)
        self._owners = {}
        for group in self.param_groups:
            self._settle(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with hyper-parameters of its own where it names any. Local.

        Args:
            param_group: ``"params"`` as in the constructor, and hyper-parameters.

        Raises:
            TypeError: as for the constructor.
            ValueError: as for the constructor; nothing was added.
        """
        super().add_param_group(param_group)
        self._settle(self.param_groups[-1])

    def _settle(self, group: Group) -> None:
        """Choose owners for the matrices of a group; they keep them, as state is theirs."""
        by_comm: dict[Comm, list[ShardTensor]] = {}
        for param in group["params"]:
            if is_matrix(group, param) and isinstance(param, ShardTensor):
                assert isinstance(param.comm, Comm), "checked when the parameter was added"
                by_comm.setdefault(param.comm, []).append(param)
        for comm, params in by_comm.items():
            held = [
                [
                    (rank, stop - start)
                    for rank in range(comm.size)
                    for start, stop in [param.spec.range_of(rank)]
                    if stop > start
                ]
                for param in params
            ]
            owners = assign_owners([_cost(*param.shape) for param in params], held, comm.size)
            self._owners.update(zip(params, owners, strict=True))

    def _check_hyper(self, group: Group, where: str) -> None:
        check_at_least_0(group, ("lr", "weight_decay", "eps", "adam_eps", "max_size"), where)
        check_decay(group, "betas", where, count=2)
        if group["shampoo_beta"] is not None:
            check_decay({"shampoo_beta": (group["shampoo_beta"],)}, "shampoo_beta", where, count=1)
        if group["precondition_every"] < 1:
            raise ValueError(
                f"{where}expected precondition_every >= 1, got {group['precondition_every']}"
            )

    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        sides = tuple(s for s, dim in _SIDES.items() if param.shape[dim] <= group["max_size"])
        return _slots(self._owners.get(param, 0), sides)

    def _matrices(self, job: Job) -> list[Matrix]:
        return [
            Matrix(
                param=param,
                piece=job.grads[row].view(-1).float(),
                cost=_cost(*param.shape),
                solve=partial(_solve, job.group, tuple(param.shape), self.state[param]),
                apply=partial(_apply, job.group, param),
                owner=self._owners.get(param, 0),
            )
            for row, param in enumerate(job.members)
        ]


@cache
def _slots(owner: int, sides: tuple[str, ...]) -> tuple[Slot, ...]:
    wide = torch.float32
    moments = [OwnedSlot(name, wide, owner) for name in ("exp_avg", "exp_avg_sq")]
    squares = [
        OwnedSlot(f"{side}{what}", wide, owner, (_SIDES[side], _SIDES[side]))
        for side in sides
        for what in ("", "_basis")
    ]
    return (*moments, *squares)


def _solve(
    group: Group, shape: tuple[int, ...], own: dict[str, Any], whole: torch.Tensor
) -> torch.Tensor:
    """Update a matrix's state by its gradient, and return the step without its rate."""
    if not whole.numel():
        return whole
    step, grad = int(own["step"]), whole.view(shape)
    result = torch.zeros_like(grad) if step == 1 else _step(group, own, grad, step - 1)
    for side in _SIDES:
        if side in own:
            _learn(group, own, side, grad, step)
    return result.reshape(-1)


def _step(group: Group, own: dict[str, Any], grad: torch.Tensor, step: int) -> torch.Tensor:
    """Adam in the basis of earlier gradients; in that of this one its noise would be like it."""
    beta1, beta2 = group["betas"]
    first, second = (piece_of(own[name]).view(grad.shape) for name in ("exp_avg", "exp_avg_sq"))
    bases = [
        piece_of(own[f"{side}_basis"]).view(size, size) if side in own else None
        for side, size in zip(_SIDES, grad.shape, strict=True)
    ]
    first.mul_(beta1).add_(grad * (1 - beta1))
    turned = _turned(grad, *bases)
    second.mul_(beta2).add_(turned.mul_(turned).mul_(1 - beta2))
    scale = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    straight = _turned(first, *bases).div_(scale).div_(1 - beta1**step)
    return _turned(straight, *(None if basis is None else basis.t() for basis in bases))


def _learn(group: Group, own: dict[str, Any], side: str, grad: torch.Tensor, step: int) -> None:
    """Average the squares of one side, and refresh its basis where its time has come."""
    size = grad.shape[_SIDES[side]]
    average, basis = (piece_of(own[name]).view(size, size) for name in (side, f"{side}_basis"))
    beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    square = grad @ grad.t() if side == "left" else grad.t() @ grad
    average.mul_(beta).add_(square.mul_(1 - beta))
    if step == 1:
        basis.copy_(torch.linalg.eigh(average).eigenvectors)
    elif step % group["precondition_every"] == 0:
        # One step of power iteration leaves the vectors in their order, which moments rely on.
        basis.copy_(torch.linalg.qr(average @ basis).Q)


def _turned(
    matrix: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None
) -> torch.Tensor:
    """Return ``left.T @ matrix @ right`` in new memory; None stands for the identity."""
    turned = matrix.clone() if left is None else left.t() @ matrix
    return turned if right is None else turned @ right


def _apply(group: Group, param: torch.Tensor, result: torch.Tensor) -> None:
    decay = 1 - group["lr"] * group["weight_decay"]
    for part, step in windows([flat_piece(param), result]):
        part.copy_(widened(part).mul_(decay).sub_(widened(step).mul_(group["lr"])))


def _cost(rows: int, columns: int) -> float:
    """Multiplications of a step, about."""
    return float(6 * rows * columns * (rows + columns) + rows**3 + columns**3)
