"""Bringing pieces of matrices whole to their owners, and results back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from shard_comm import Comm, Slices, Work

_ROUND_NUMEL = 1 << 22  # elements that an owner has of matrices at a time

Ranges = Sequence[tuple[int, int]]  # of a matrix's elements, on each rank


class Round:
    """One exchange of some matrices: pieces to owners, then results back by the same ways.

    What a rank sends to an owner lies in one slice, in the order of the matrices, and slices are
    as long as that asks. A piece that is with its owner already is not sent.

    Args:
        comm: the ranks.
        ranges: element range of each matrix on each rank, by a key of the caller's.
        owners: the owner of each matrix.
        dtype: of what is sent.
    """

    def __init__(
        self,
        comm: Comm,
        ranges: Mapping[int, Ranges],
        owners: Mapping[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.comm = comm
        self.owners = owners
        self._ranges = ranges
        self._dtype = dtype
        self._offsets: dict[tuple[int, int], int] = {}  # within a slice, by matrix and holder
        filled: defaultdict[tuple[int, int], int] = defaultdict(int)
        for key, each in ranges.items():
            for rank, (start, stop) in enumerate(each):
                pair = rank, owners[key]
                if rank != owners[key] and stop > start:
                    self._offsets[key, rank] = filled[pair]
                    filled[pair] += stop - start
        everyone, me = range(comm.size), comm.rank
        self.slices = Slices(
            sent=tuple(filled[me, other] for other in everyone),
            received=tuple(filled[other, me] for other in everyone),
            longest=max(filled.values(), default=0),
        )
        # Where slices begin in what is sent to owners, and in what comes from holders.
        self._to_owners = list(accumulate(self.slices.sent, initial=0))
        self._from_holders = list(accumulate(self.slices.received, initial=0))
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None  # received, sent
        self._work = Work()
        self._own: dict[int, torch.Tensor] = {}

    def send(self, pieces: Mapping[int, torch.Tensor]) -> None:
        """Start sending this rank's piece of each matrix to its owner.

        Args:
            pieces: ``[stop - start]`` each; they may change once this has returned.

        **Collective**: all ranks. **Memory**: what is sent and received, until ``wholes``.
        """
        rank = self.comm.rank
        out = self.comm.empty(sum(self.slices.sent), self._dtype)
        for key, owner in self.owners.items():
            if owner == rank:
                self._own[key] = pieces[key].clone()
            elif (key, rank) in self._offsets:
                self._slice(out, self._to_owners, owner, key, rank).copy_(pieces[key])
        self._exchange(out, self.slices)

    def wholes(self) -> dict[int, torch.Tensor]:
        """Return the matrices that this rank owns, flattened, each in memory of its own. Local.

        Raises:
            RuntimeError: the exchange failed or timed out.
        """
        received, rank = self._wait(), self.comm.rank
        found = {}
        for key, owner in self.owners.items():
            if owner != rank:
                continue
            each = self._ranges[key]
            whole = torch.empty(each[-1][1], dtype=self._dtype, device=received.device)
            start, stop = each[rank]
            whole[start:stop].copy_(self._own.pop(key))
            for source, (start, stop) in enumerate(each):
                if (key, source) in self._offsets:
                    part = self._slice(received, self._from_holders, source, key, source)
                    whole[start:stop].copy_(part)
            found[key] = whole
        return found

    def give_back(self, results: Mapping[int, torch.Tensor]) -> None:
        """Start sending each rank its piece of the results.

        Args:
            results: one for each matrix that this rank owns, flattened.

        **Collective**: all ranks. **Memory**: what is sent and received, until ``pieces``.
        """
        back, rank = self.slices.back, self.comm.rank
        out = self.comm.empty(sum(back.sent), self._dtype)
        for key, result in results.items():
            for target, (start, stop) in enumerate(self._ranges[key]):
                if target == rank:
                    self._own[key] = result[start:stop]
                elif (key, target) in self._offsets:
                    self._slice(out, self._from_holders, target, key, target).copy_(
                        result[start:stop]
                    )
        self._exchange(out, back)

    def pieces(self) -> dict[int, torch.Tensor]:
        """Return this rank's piece of each result. Local.

        Raises:
            RuntimeError: the exchange failed or timed out.
        """
        received, rank = self._wait(), self.comm.rank
        nothing = received[:0]
        return {
            key: self._own.pop(key)
            if owner == rank
            else self._slice(received, self._to_owners, owner, key, rank)
            if (key, rank) in self._offsets
            else nothing
            for key, owner in self.owners.items()
        }

    def _slice(
        self, flat: torch.Tensor, begins: Sequence[int], other: int, key: int, holder: int
    ) -> torch.Tensor:
        """Where, in the slice of rank ``other``, the piece of ``holder`` lies."""
        begin = begins[other] + self._offsets[key, holder]
        start, stop = self._ranges[key][holder]
        return flat[begin : begin + stop - start]

    def _exchange(self, out: torch.Tensor, slices: Slices) -> None:
        received = self.comm.empty(sum(slices.received), self._dtype)
        if slices.longest:
            self._work = self.comm.all_to_all(received, out, slices=slices, async_op=True)
        self._buffers = received, out

    def _wait(self) -> torch.Tensor:
        assert self._buffers is not None, "nothing was sent"
        work, self._work = self._work, Work()
        work.wait()
        received, self._buffers = self._buffers[0], None
        return received


def split_rounds(numels: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Cut matrices into rounds in which no owner has much more than 4M elements. Local.

    Args:
        numels: elements of each matrix, in the order in which they are to be worked on.
        owners: the owner of each.

    Returns:
        Indices; while one round is worked on, the next one travels.
    """
    had: defaultdict[int, int] = defaultdict(int)
    rounds: defaultdict[int, list[int]] = defaultdict(list)
    for index, (numel, owner) in enumerate(zip(numels, owners, strict=True)):
        rounds[had[owner] // _ROUND_NUMEL].append(index)
        had[owner] += numel
    return [rounds[number] for number in sorted(rounds)]
