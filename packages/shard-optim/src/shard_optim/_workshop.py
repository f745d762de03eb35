"""Matrices of which each is worked on whole by one rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim._gather import Gathering
from shard_optim._homes import Home
from shard_optim._owners import Ledger
from shard_optim._routes import Round, split_rounds


@dataclass(frozen=True)
class Matrix:
    """What is to be done with one matrix.

    Attributes:
        param: the parameter.
        piece: ``[n]``, this rank's part of what its owner needs, in the dtype that travels. Of a
            plain parameter that several ranks hold, all of it, which only the owner needs.
        cost: of solving it, in any unit.
        solve: makes the whole, flattened, and ``state`` where it is at hand, into the result,
            flattened, of the same dtype; its owner calls it.
        apply: takes this rank's piece of the result ``[n]``.
        comm: the ranks that hold the parameter, None where it is this one alone.
        owner: who solves it, where that is settled.
        state: what its owner keeps of it, flattened.
    """

    param: torch.Tensor
    piece: torch.Tensor
    cost: float
    solve: Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
    apply: Callable[[torch.Tensor], None]
    comm: Comm | None
    owner: int | None = None
    state: Sequence[torch.Tensor] = ()


Solve = Callable[[Matrix, torch.Tensor], torch.Tensor]
"""Makes a whole matrix into its result; the next one in the order of ``Workshop``."""


class Workshop:
    """Brings matrices to their owners and results back, and remembers by which ways.

    Attributes:
        loads: what the matrices of each plan cost each rank.
    """

    def __init__(self) -> None:
        self.loads: dict[Hashable, list[float]] = {}
        self._plans: dict[Hashable, list[Any]] = {}

    def work_off(self, matrices: Sequence[Matrix], home: Home) -> None:
        """Solve and apply all matrices; those that no other rank has a piece of are solved here.

        Args:
            matrices: the same ones in the same order on every rank.
            home: where their state lives; that of one matrix after another is brought from there.

        **Collective**: per comm and dtype, two all_to_alls for each round of sharded matrices and
        one all_gather for each round of plain ones, over all ranks of it.
        """
        alone = [matrix for matrix in matrices if matrix.comm is None]
        cut, plain = (_by_kind(matrices, is_cut=is_cut) for is_cut in (True, False))
        rounds = [(self._rounds(*kind, members), members) for kind, members in cut.items()]
        gathers = [(self._gatherings(*kind, members), members) for kind, members in plain.items()]
        own = [m for each in rounds for m in _owned(*each)]
        own += [m for each in gathers for m in _owned(*each)]
        with home.streaming([(m.param.device, m.state) for m in (*alone, *own)]) as states:

            def solve(matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
                return matrix.solve(whole, next(states))

            for matrix in alone:
                matrix.apply(solve(matrix, matrix.piece.clone()))  # its own memory, as of an owner
            for exchanged, members in rounds:
                exchange(exchanged, members, solve)
            for gathered, members in gathers:
                gather(gathered, members, solve)

    def _rounds(self, comm: Comm, dtype: torch.dtype, members: Sequence[Matrix]) -> list[Round]:
        specs = [m.param.spec for m in members if isinstance(m.param, ShardTensor)]
        where = tuple((spec.origin, spec.shard_numel, spec.shape) for spec in specs)
        key = comm, dtype, where, _work_of(members)
        if key not in self._plans:
            ranges = [[spec.range_of(rank) for rank in range(comm.size)] for spec in specs]
            self._plans[key] = [
                Round(comm, {i: ranges[i] for i in owners}, owners, dtype)
                for owners in self._plan(key, comm, members, ranges)
            ]
        return self._plans[key]

    def _gatherings(
        self, comm: Comm, dtype: torch.dtype, members: Sequence[Matrix]
    ) -> list[Gathering]:
        numels = [m.param.numel() for m in members]
        key = comm, dtype, tuple(numels), _work_of(members)
        if key not in self._plans:
            self._plans[key] = [
                Gathering(comm, {i: numels[i] for i in owners}, owners, dtype)
                for owners in self._plan(key, comm, members, [[(0, n)] for n in numels])
            ]
        return self._plans[key]

    def _plan(
        self,
        key: Hashable,
        comm: Comm,
        members: Sequence[Matrix],
        ranges: Sequence[Sequence[tuple[int, int]]],
    ) -> list[dict[int, int]]:
        costs, settled = _work_of(members)
        rounds = plan_rounds(costs, settled, ranges=ranges, world_size=comm.size)
        loads = self.loads[key] = [0.0] * comm.size
        for owners in rounds:
            for index, owner in owners.items():
                loads[owner] += costs[index]
        return rounds


def _by_kind(
    matrices: Sequence[Matrix], *, is_cut: bool
) -> dict[tuple[Comm, torch.dtype], list[Matrix]]:
    """Matrices of several ranks, sharded or plain, that travel together."""
    kinds: dict[tuple[Comm, torch.dtype], list[Matrix]] = {}
    for matrix in matrices:
        if matrix.comm is not None and isinstance(matrix.param, ShardTensor) == is_cut:
            kinds.setdefault((matrix.comm, matrix.piece.dtype), []).append(matrix)
    return kinds


def _owned(
    rounds: Sequence[Round] | Sequence[Gathering], members: Sequence[Matrix]
) -> Iterator[Matrix]:
    """What this rank solves, in that order."""
    for each in rounds:
        for index, owner in each.owners.items():
            if owner == each.comm.rank:
                yield members[index]


def _work_of(members: Sequence[Matrix]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Costs, and owners where they are settled."""
    owners = tuple(m.owner for m in members if m.owner is not None)
    return tuple(m.cost for m in members), owners


def held_by(param: torch.Tensor, world_size: int) -> list[tuple[int, int]]:
    """Return which ranks have elements of a parameter to send, and how many. Local.

    Those of a plain one are sent by the owner alone: they count as if a rank -1 had them.
    """
    if not isinstance(param, ShardTensor):
        return [(-1, param.numel())]
    return _held([param.spec.range_of(rank) for rank in range(world_size)])


def _held(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(rank, stop - start) for rank, (start, stop) in enumerate(ranges) if stop > start]


def plan_rounds(
    costs: Sequence[float],
    owners: Sequence[int] = (),
    *,
    ranges: Sequence[Sequence[tuple[int, int]]],
    world_size: int,
) -> list[dict[int, int]]:
    """Say who works on what, and what travels together.

    Args:
        costs: of each matrix, in any unit.
        owners: those of all matrices, where they are settled.
        ranges: element range of each matrix on each rank.
        world_size: number of ranks.

    Returns:
        One dict per round: the owner of each of its matrices.

    **Collective**: local.
    """
    held = [_held(each) for each in ranges]
    owners = owners or Ledger(world_size).assign(costs, held)
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    numels = [sum(numel for _, numel in held[i]) for i in order]
    rounds = split_rounds(numels, [owners[i] for i in order])
    indices = [sorted(order[place] for place in each) for each in rounds]
    return [{i: owners[i] for i in each} for each in indices]


def exchange(rounds: Sequence[Round], members: Sequence[Matrix], solve: Solve) -> None:
    """Bring pieces to owners and back; one round travels while another one is worked on."""

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
        each.give_back({i: solve(members[i], whole) for i, whole in each.wholes().items()})
        finish(number - 1)
    finish(len(rounds) - 1)


def gather(rounds: Sequence[Gathering], members: Sequence[Matrix], solve: Solve) -> None:
    """Solve what is owned and fetch the rest; one round travels while the next is worked on."""

    def finish(number: int) -> None:
        if number >= 0:
            for i, result in rounds[number].results().items():
                members[i].apply(result)

    for number, each in enumerate(rounds):
        own = [i for i, owner in each.owners.items() if owner == each.comm.rank]
        each.send({i: solve(members[i], members[i].piece.clone()) for i in own})
        finish(number - 1)
    finish(len(rounds) - 1)
