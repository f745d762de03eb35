"""Matrices of which each is worked on whole by one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._owners import assign_owners
from shard_optim._routes import Round, split_rounds


@dataclass(frozen=True)
class Matrix:
    """What is to be done with one matrix.

    Attributes:
        param: the parameter.
        piece: ``[n]``, this rank's part of what its owner needs.
        cost: of solving it, in any unit.
        solve: makes the whole, flattened, into the result, flattened; its owner calls it.
        apply: takes this rank's piece of the result ``[n]``.
        owner: who solves it, where that is settled.
    """

    param: torch.Tensor
    piece: torch.Tensor
    cost: float
    solve: Callable[[torch.Tensor], torch.Tensor]
    apply: Callable[[torch.Tensor], None]
    owner: int | None = None


class Workshop:
    """Brings matrices to their owners and results back, and remembers by which ways.

    Args:
        dtype: of what travels.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._plans: dict[Any, list[Round]] = {}

    def work_off(self, matrices: Sequence[Matrix]) -> None:
        """Solve and apply all matrices; those that no other rank has a piece of are solved here.

        Args:
            matrices: the same ones in the same order on every rank.

        **Collective**: two all_to_alls per round and comm, over all ranks of it.
        """
        by_comm: dict[Comm, list[Matrix]] = {}
        for matrix in matrices:
            param = matrix.param
            if isinstance(param, ShardTensor) and param.comm.size > 1:
                assert isinstance(param.comm, Comm), "checked when the parameter was added"
                by_comm.setdefault(param.comm, []).append(matrix)
            else:
                matrix.apply(matrix.solve(matrix.piece.clone()))  # its own memory, as of an owner
        for comm, members in by_comm.items():
            _work_off(self._rounds(comm, members), members)

    def _rounds(self, comm: Comm, members: Sequence[Matrix]) -> list[Round]:
        specs = [m.param.spec for m in members if isinstance(m.param, ShardTensor)]
        costs = [m.cost for m in members]
        settled = [m.owner for m in members if m.owner is not None]
        where = tuple((spec.origin, spec.shard_numel, spec.shape) for spec in specs)
        key = comm, where, tuple(costs), tuple(settled)
        if key not in self._plans:
            ranges = [[spec.range_of(rank) for rank in range(comm.size)] for spec in specs]
            self._plans[key] = [
                Round(comm, {i: ranges[i] for i in owners}, owners, self._dtype)
                for owners in plan_rounds(costs, ranges, comm.size, settled)
            ]
        return self._plans[key]


def plan_rounds(
    costs: Sequence[float],
    ranges: Sequence[Sequence[tuple[int, int]]],
    world_size: int,
    owners: Sequence[int] = (),
) -> list[dict[int, int]]:
    """Say who works on what, and what travels together.

    Args:
        costs: of each matrix, in any unit.
        ranges: element range of each matrix on each rank.
        world_size: number of ranks.
        owners: those of all matrices, where they are settled.

    Returns:
        One dict per round: the owner of each of its matrices.

    **Collective**: local.
    """
    held = [
        [(rank, stop - start) for rank, (start, stop) in enumerate(each) if stop > start]
        for each in ranges
    ]
    owners = owners or assign_owners(costs, held, world_size)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    numels = [sum(numel for _, numel in held[i]) for i in order]
    rounds = split_rounds(numels, [owners[i] for i in order])
    indices = [sorted(order[place] for place in each) for each in rounds]
    return [{i: owners[i] for i in each} for each in indices]


def _work_off(rounds: Sequence[Round], members: Sequence[Matrix]) -> None:
    """Exchange and solve; one round travels while another one is worked on."""

    def start(number: int) -> None:
        if number < len(rounds):
            each = rounds[number]
            each.send({i: members[i].piece for i in each.owners})

    def finish(number: int) -> None:
        if number >= 0:
            for i, piece in rounds[number].pieces().items():
                members[i].apply(piece)

    start(0)
    for number, each in enumerate(rounds):
        start(number + 1)
        each.give_back({i: members[i].solve(whole) for i, whole in each.wholes().items()})
        finish(number - 1)
    finish(len(rounds) - 1)
