"""Shampoo: gradients straightened by roots of their squares, each matrix kept by one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shard_comm import Comm
from shard_optim._factors import Block, FactorSlot, blocks_of, inverse_root
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_counts, check_numbers
from shard_optim._matrix import OwnedOptimizer
from shard_optim._offload import Offload
from shard_optim._slots import OwnedSlot, Slot

_GRAFTINGS = ("adam", "sgd", None)


class Shampoo(OwnedOptimizer):
    """Gradients times inverse roots of their squares on both sides; AdamW for what is no matrix.

    For a matrix with gradients ``G``, the averages ``L`` of ``G @ G.T`` and ``R`` of ``G.T @ G``
    are kept, and the direction of a step is ``L ** -1/4 @ G @ R ** -1/4``, with ``G`` averaged. Its
    length is that of another optimizer's step. Large matrices are cut into blocks that are
    treated as matrices of their own.

    Worked example: ``diag(2, 3)`` is the first gradient, averages are sums and nothing is grafted.
    ``L`` and ``R`` are ``diag(4, 9)``, their roots ``diag(4, 9) ** -1/4``, and the direction is
    ``diag(1, 1)``. The same gradient once more doubles ``L`` and ``R``, and the direction is
    ``diag(1, 1) / sqrt(2)``.

    The gradient of each matrix is brought whole to one rank, which keeps all state of the matrix,
    and pieces of the step come back. Owners are balanced by cost over the whole model. Results
    have the same bits as on one rank.

    Parameters that do not have two dimensions, and all of a group with ``elementwise=True``, are
    updated as ``AdamW`` does, with the group's ``lr``, ``weight_decay``, ``betas`` and
    ``adam_eps``.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the average of gradients and of their squares, each in [0, 1).
        weight_decay: decoupled decay, at least 0.
        precondition_frequency: steps between two computations of the roots, at least 1. The first
            step computes them, too.
        comm: the ranks that hold the plain parameters, with the same values and gradients, as
            DistributedDataParallel leaves them. Each plain matrix is then worked on by one of
            them, by every rank else.
        offload: where state lives between steps: with the parameters by default, or ``"cpu"``,
            ``"disk"`` or an ``Offload``. That of one matrix after another is brought to its owner,
            the next one while one is worked on. Results have the same bits.
        hyper: ``max_preconditioner_dim``, rows and columns of a block, at most; at least 1, and
            blocks of a matrix are as equal as can be; ``grafting``, whose step gives each block's
            step its length: ``"adam"``, ``"sgd"``, or None for the direction's own;
            ``shampoo_beta``, the decay of ``L`` and ``R``, the second of ``betas`` by default, 1
            for sums; ``ridge``, how much of the largest eigenvalue is added to all; ``elementwise``
            and ``adam_eps``.

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

    **Memory**: for each matrix that a rank owns, in float32, one moment, two with ``"adam"``, and
    for each block two squares of each side. Offloaded, that is the same number of bytes elsewhere.
    Here are ``Offload.window_bytes`` and, where that is less than three times the largest matrix's
    state, so much besides: three matrices that are worked on one after another. For parameters on
    the CPU that is pages of files, up to 4 MiB more for each of the three, and a copy of what of
    one does not begin at a multiple of 64 bytes.

    **Source**: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic Tensor Optimization",
    2018; blocks, grafting and rare roots: Anil et al., "Scalable Second Order Optimization for Deep
    Learning", 2020; owners: Shi et al., "A Distributed Data-Parallel PyTorch Implementation of the
    Distributed Shampoo Optimizer for Training Neural Networks At-Scale", 2023.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
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
            "max_preconditioner_dim": 1024,
            "grafting": "adam",
            "shampoo_beta": None,
            "ridge": 1e-6,
        }
        super().__init__(params, defaults, hyper, comm=comm, offload=offload)

    def _check_hyper(self, group: Group, where: str) -> None:
        super()._check_hyper(group, where)
        check_at_least_0(group, ("ridge",), where)
        beta = group["shampoo_beta"]
        if beta is not None:
            check_numbers(group, ("shampoo_beta",), where)
            if not 0 <= beta <= 1:
                raise ValueError(f"{where}expected shampoo_beta in [0, 1], or None, got {beta}")
        check_counts(group, ("precondition_frequency", "max_preconditioner_dim"), where)
        if group["grafting"] not in _GRAFTINGS:
            raise ValueError(
                f"{where}expected grafting to be one of {_GRAFTINGS}, got {group['grafting']!r}"
            )

    def _cost(self, group: Group, param: torch.Tensor) -> float:
        """Multiplications of a step, about; roots take some ten times a product of matrices."""
        total = 0.0
        for block in blocks_of(param.shape, group["max_preconditioner_dim"]):
            rows, columns = block.shape
            total += 2 * rows * columns * (rows + columns)
            total += 10 * (rows**3 + columns**3) / group["precondition_frequency"]
        return total

    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        how = group["max_preconditioner_dim"], group["grafting"] == "adam"
        return self._owned_slots(param, _slots, *how)

    def _solve(
        self, group: Group, own: dict[str, torch.Tensor], grad: torch.Tensor, step: int
    ) -> torch.Tensor:
        straight = _averaged(own["exp_avg"], grad, group["betas"][0], step)
        model = straight
        if group["grafting"] == "adam":
            squares = _averaged(own["exp_avg_sq"], grad * grad, group["betas"][1], step)
            model = straight / squares.sqrt_().add_(group["adam_eps"])
        result = torch.empty_like(grad)
        for block in blocks_of(grad.shape, group["max_preconditioner_dim"]):
            _learn(group, own, block, block.of(grad), step)
            direction = block.left(own["left_root"]) @ block.of(straight).contiguous()
            direction = direction @ block.right(own["right_root"])
            if group["grafting"] is not None:
                length, wanted = (torch.linalg.vector_norm(m) for m in (direction, block.of(model)))
                direction.mul_(torch.where(length > 0, wanted / length, 0.0))
            block.of(result).copy_(direction)
        return result


def _slots(most: int, has_squares: bool, **home: Any) -> tuple[Slot, ...]:
    moments = ("exp_avg", "exp_avg_sq") if has_squares else ("exp_avg",)
    factors = [
        FactorSlot(f"{name}{what}", torch.float32, side=side, most=most, **home)
        for side, name in enumerate(("left", "right"))
        for what in ("", "_root")
    ]
    return (*(OwnedSlot(name, torch.float32, **home) for name in moments), *factors)


def _averaged(moment: torch.Tensor, new: torch.Tensor, beta: float, step: int) -> torch.Tensor:
    """Average into a moment, and return what it would be had it not begun at zero."""
    moment.mul_(beta).add_(new * (1 - beta))
    return moment / (1 - beta**step)


def _learn(
    group: Group, own: dict[str, torch.Tensor], block: Block, grad: torch.Tensor, step: int
) -> None:
    """Average the squares of a block, and compute their roots where the time has come."""
    grad = grad.contiguous()
    beta = group["betas"][1] if group["shampoo_beta"] is None else group["shampoo_beta"]
    seen = 1.0 if beta == 1 else 1 - beta**step
    for side, square, view in (
        ("left", grad @ grad.t(), block.left),
        ("right", grad.t() @ grad, block.right),
    ):
        average = view(own[side])
        average.mul_(beta).add_(square.mul_(1 if beta == 1 else 1 - beta))
        if step == 1 or step % group["precondition_frequency"] == 0:
            root = inverse_root(average / seen, root=4, ridge=group["ridge"])
            view(own[f"{side}_root"]).copy_(root)
