"""What optimizers of whole matrices share: owners, and AdamW for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._adam import MOMENTS, fused_adam
from shard_optim._agree import CollectiveOptimizer
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._plan import Lane
from shard_optim._slots import Slot
from shard_optim._workshop import Matrix, Workshop


class MatrixOptimizer(CollectiveOptimizer, ABC):
    """An optimizer that needs a matrix whole, and updates other parameters as AdamW does.

    A subclass says which state a matrix has and what its owner is to do with it. Groups have
    ``elementwise``, which makes AdamW update their matrices as well, ``betas`` and ``adam_eps``.
    """

    _SENT: ClassVar[torch.dtype]
    """Of what travels to owners and back."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._workshop = Workshop(self._SENT)
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; what a step needs besides is made anew."""
        super().__setstate__(state)
        self._workshop = Workshop(self._SENT)

    @abstractmethod
    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        """Return the state tensors of a matrix."""

    @abstractmethod
    def _matrices(self, job: Job) -> list[Matrix]:
        """Say what is to be done with the members of a job, whose steps have been counted."""

    def _check_member(self, param: torch.Tensor, name: str, group: Group) -> None:
        if not is_matrix(group, param):
            return
        if isinstance(param, ShardTensor) and not isinstance(param.comm, Comm):
            raise ValueError(
                f"{name}: expected a comm of shard_comm, which has all_to_all, got "
                f"{type(param.comm).__name__}; put the parameter into a group with "
                f"elementwise=True"
            )
        if not param.is_contiguous():
            raise ValueError(
                f"{name}: expected rows side by side in memory, got strides {param.stride()}; make "
                f"the parameter from contiguous()"
            )

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return self._matrix_slots(group, param) if is_matrix(group, param) else MOMENTS

    def _is_shared(self, group: Group, param: ShardTensor) -> bool:
        return is_matrix(group, param)

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        hyper = {**job.group, "eps": job.group["adam_eps"]}
        fused_adam(lane, grads, hyper, decoupled=True)

    def _advance(self, jobs: Sequence[Job]) -> None:
        matrices: list[Matrix] = []
        for job in jobs:
            if job.slots is MOMENTS:
                self._apply(job)
            else:
                job.plan.count()
                matrices += self._matrices(job)
        self._workshop.work_off(matrices)
        for job in jobs:
            if job.slots is not MOMENTS:
                torch.autograd.graph.increment_version(job.plan.touched)


def is_matrix(group: Group, param: torch.Tensor) -> bool:
    """Whether a parameter of a group is worked on whole. Local."""
    return param.ndim == 2 and not group["elementwise"]


def check_names(hyper: Iterable[str], known: Iterable[str]) -> None:
    """Check the names of hyper-parameters. Local.

    Raises:
        TypeError: one is unknown.
    """
    strange = sorted(set(hyper) - set(known))
    if strange:
        raise TypeError(f"expected hyper-parameters among {sorted(known)}, got {strange}")
