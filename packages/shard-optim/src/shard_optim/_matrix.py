"""What optimizers of whole matrices share: owners, and AdamW for everything else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from shard_comm import Comm
from shard_flat import GatherComm, ShardTensor
from shard_optim._adam import MOMENTS, fused_adam
from shard_optim._agree import CollectiveOptimizer
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._hyper import check_at_least_0, check_comm, check_decay
from shard_optim._offload import Offload
from shard_optim._owners import Ledger
from shard_optim._plan import Lane
from shard_optim._runs import flat_piece, piece_of
from shard_optim._slots import Slot
from shard_optim._stage import LINE_BYTES
from shard_optim._together import counted
from shard_optim._window import wide, widened, windows
from shard_optim._workshop import Matrix, Workshop, held_by


class MatrixOptimizer(CollectiveOptimizer, ABC):
    """An optimizer that needs a matrix whole, and updates other parameters as AdamW does.

    A subclass says which state a matrix has, what a step costs and what its owner is to do. Groups
    have ``elementwise``, which makes AdamW update their matrices as well, ``betas`` and
    ``adam_eps``.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either.
        defaults: hyper-parameters of groups that do not say otherwise.
        given: hyper-parameters that the caller gave by name; they take precedence.
        comm: the ranks that hold the plain parameters, with the same values and gradients.
        offload: where state lives.

    Raises:
        TypeError: one of ``given`` has another name; ``comm`` is no communicator.
    """

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        given: dict[str, Any],
        *,
        comm: Comm | None,
        offload: str | Offload | None,
    ) -> None:
        known = {"elementwise": False, "adam_eps": 1e-8, **defaults}
        strange = sorted(given.keys() - known.keys())
        if strange:
            raise TypeError(f"expected hyper-parameters among {sorted(known)}, got {strange}")
        if comm is not None:
            check_comm(comm)
        self._comm = comm if comm is not None and comm.size > 1 else None
        self._make_rooms()
        super().__init__(params, {**known, **given}, offload=offload)

    def __getstate__(self) -> dict[str, Any]:
        """Raise TypeError where there is a communicator, which belongs to one optimizer."""
        if self._comm is not None:
            raise TypeError(
                f"this {type(self).__name__} holds a communicator and does not copy or pickle; "
                f"save its state_dict()"
            )
        state: dict[str, Any] = super().__getstate__()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, with owners by the same rule; what a step needs besides is made anew."""
        super().__setstate__(state)
        self._comm = None
        self._make_rooms()
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

    @abstractmethod
    def _matrix_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        """Return the state tensors of a matrix."""

    @abstractmethod
    def _matrices(self, job: Job) -> list[Matrix]:
        """Say what is to be done with the members of a job, whose steps have been counted."""

    def _check_hyper(self, group: Group, where: str) -> None:
        check_at_least_0(group, ("lr", "weight_decay", "adam_eps"), where)
        check_decay(group, "betas", where, count=2)

    @abstractmethod
    def _cost(self, group: Group, param: torch.Tensor) -> float:
        """Return what a step of a matrix costs, in any unit."""

    def _is_settled(self, param: torch.Tensor) -> bool:
        """Whether state lives with a matrix's owner, who is then the same in all steps."""
        return True

    def _make_rooms(self) -> None:
        self._workshop = Workshop()
        self._owners: dict[torch.Tensor, int] = {}
        self._ledgers: dict[GatherComm, Ledger] = {}
        self._kinds: dict[Hashable, tuple[Slot, ...]] = {}

    def _owned_slots(
        self, param: torch.Tensor, make: Callable[..., tuple[Slot, ...]], *how: Hashable
    ) -> tuple[Slot, ...]:
        """What ``make`` makes for the owner of a matrix, the same object for the same arguments."""
        comm = None if isinstance(param, ShardTensor) else self._comm
        owner = self._owners.get(param, 0)
        key = make, owner, comm, how
        if key not in self._kinds:
            self._kinds[key] = make(*how, owner=owner, comm=comm)
        return self._kinds[key]

    def _settle(self, group: Group) -> None:
        """Choose owners for matrices of a group, who keep them."""
        by_comm: dict[Comm, list[torch.Tensor]] = {}
        for param in group["params"]:
            comm = self._ranks_of(group, param)
            if comm is not None and self._is_settled(param):
                by_comm.setdefault(comm, []).append(param)
        for comm, params in by_comm.items():
            ledger = self._ledgers.setdefault(comm, Ledger(comm.size))
            costs = [self._cost(group, param) for param in params]
            owners = ledger.assign(costs, [held_by(param, comm.size) for param in params])
            self._owners.update(zip(params, owners, strict=True))

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

    def _ranks_of(self, group: Group, param: torch.Tensor) -> Comm | None:
        if not is_matrix(group, param):
            return None
        if not isinstance(param, ShardTensor):
            return self._comm
        assert isinstance(param.comm, Comm), "checked when the parameter was added"
        return param.comm if param.comm.size > 1 else None

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        hyper = {**job.group, "eps": job.group["adam_eps"]}
        fused_adam(lane, grads, hyper, decoupled=True, copies=job.copies)

    def _advance(self, jobs: Sequence[Job]) -> None:
        whole = [job for job in jobs if job.slots is not MOMENTS]
        with counted(whole):
            matrices = [matrix for job in whole for matrix in self._matrices(job)]
            self._workshop.work_off(matrices, self._home)
        for job in jobs:
            if job.slots is MOMENTS:
                self._apply(job)


class OwnedOptimizer(MatrixOptimizer, ABC):
    """An optimizer of matrices whose owner keeps all state of a matrix and makes its step.

    A subclass has ``OwnedSlot``s and says how a gradient becomes a step.
    """

    def _matrices(self, job: Job) -> list[Matrix]:
        """Say what is to be done with the members of a job, whose steps have been counted."""
        return [
            Matrix(
                param=param,
                piece=as_sent(grad),
                cost=self._cost(job.group, param),
                solve=partial(self._solved, job, param),
                apply=step_of(job.group, param),
                comm=self._ranks_of(job.group, param),
                owner=self._owners.get(param, 0),
                state=[piece_of(self.state[param][slot.name]).view(-1) for slot in job.slots],
            )
            for param, grad in zip(job.members, job.grads, strict=True)
        ]

    def _solved(
        self, job: Job, param: torch.Tensor, whole: torch.Tensor, state: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Make a flat gradient, in the dtype that travels, into a step of the same kind."""
        if not whole.numel():
            return whole
        begun = [_on_a_line(flat) for flat in state]
        own = {
            slot.name: flat.view(slot.shape_of(param))
            for slot, flat in zip(job.slots, begun, strict=True)
        }
        grad = wide(whole).view(tuple(param.shape))
        result = self._solve(job.group, own, grad, int(self.state[param]["step"]))
        for flat, changed in zip(state, begun, strict=True):
            if changed is not flat:
                flat.copy_(changed)
        return result.reshape(-1).to(whole.dtype)

    @abstractmethod
    def _solve(
        self, group: Group, own: dict[str, torch.Tensor], grad: torch.Tensor, step: int
    ) -> torch.Tensor:
        """Update a matrix's state by its gradient, and return the step without its rate.

        Args:
            group: hyper-parameters.
            own: the state, each tensor in its slot's shape, where it is at hand.
            grad: ``[rows, columns]``, float32 or wider.
            step: how many steps there have been, with this one.
        """


def is_matrix(group: Group, param: torch.Tensor) -> bool:
    """Whether a parameter of a group is worked on whole. Local."""
    return param.ndim == 2 and not group["elementwise"]


def _on_a_line(flat: torch.Tensor) -> torch.Tensor:
    """Return state that begins at a whole line, or a copy: products of what does not differ."""
    return flat if flat.data_ptr() % LINE_BYTES == 0 else flat.clone()


def as_sent(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient ``[n]`` in at most 32 bits, as it travels; a view where it can. Local."""
    flat = grad.view(-1)
    return flat.float() if flat.dtype == torch.float64 else flat


def step_of(group: Group, param: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return what takes a step ``[n]`` without its rate and moves this rank's piece. Local."""

    def apply(result: torch.Tensor) -> None:
        decay = 1 - group["lr"] * group["weight_decay"]
        for part, step in windows([flat_piece(param), result]):
            part.copy_(widened(part).mul_(decay).sub_(widened(step).mul_(group["lr"])))

    return apply
