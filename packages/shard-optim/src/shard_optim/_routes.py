"""Bringing pieces of matrices whole to their owners, and results back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from shard_comm import Comm, Work

_ROUND_NUMEL = 1 << 24  # elements that an owner has of matrices at a time

Ranges = Sequence[tuple[int, int]]  # of a matrix's elements, on each rank


class Round:
    """One exchange of some matrices: pieces to owners, then results back by the same ways.

    What a rank sends to an owner lies in one slice, in the order of the matrices; slices are as
    long as the longest. A piece that is with its owner already is not sent.

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
        self._offsets: dict[tuple[int, int], int] = {}
        filled: defaultdict[tuple[int, int], int] = defaultdict(int)
        for key, each in ranges.items():
            for rank, (start, stop) in enumerate(each):
                pair = rank, owners[key]
                if rank != owners[key] and stop > start:
                    self._offsets[key, rank] = filled[pair]
                    filled[pair] += stop - start
        self.slice_numel = max(filled.values(), default=0)
        self._received: torch.Tensor | None = None
        self._work = Work()
        self._own: dict[int, torch.Tensor] = {}

    def send(self, pieces: Mapping[int, torch.Tensor]) -> None:
        """Start sending this rank's piece of each matrix to its owner.

        Args:
            pieces: ``[stop - start]`` each; they may change once this has returned.

        **Collective**: all ranks. **Memory**: twice all slices, until ``wholes``.
        """
        rank = self.comm.rank
        out = self._blank()
        for key, owner in self.owners.items():
            if owner == rank:
                self._own[key] = pieces[key].clone()
            elif (key, rank) in self._offsets:
                self._slice(out, owner, key, rank).copy_(pieces[key])
        self._exchange(out)

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
                    whole[start:stop].copy_(self._slice(received, source, key, source))
            found[key] = whole
        return found

    def give_back(self, results: Mapping[int, torch.Tensor]) -> None:
        """Start sending each rank its piece of the results.

        Args:
            results: one for each matrix that this rank owns, flattened.

        **Collective**: all ranks. **Memory**: twice all slices, until ``pieces``.
        """
        out, rank = self._blank(), self.comm.rank
        for key, result in results.items():
            for target, (start, stop) in enumerate(self._ranges[key]):
                if target == rank:
                    self._own[key] = result[start:stop]
                elif (key, target) in self._offsets:
                    self._slice(out, target, key, target).copy_(result[start:stop])
        self._exchange(out)

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
            else self._slice(received, owner, key, rank)
            if (key, rank) in self._offsets
            else nothing
            for key, owner in self.owners.items()
        }

    def _blank(self) -> torch.Tensor:
        return self.comm.empty(self.comm.size * self.slice_numel, self._dtype).zero_()

    def _slice(self, flat: torch.Tensor, other: int, key: int, holder: int) -> torch.Tensor:
        """Where, beside rank ``other``, the piece of ``holder`` lies."""
        begin = other * self.slice_numel + self._offsets[key, holder]
        start, stop = self._ranges[key][holder]
        return flat[begin : begin + stop - start]

    def _exchange(self, out: torch.Tensor) -> None:
        self._received = torch.empty_like(out)
        if self.slice_numel:
            self._work = self.comm.all_to_all(self._received, out, async_op=True)

    def _wait(self) -> torch.Tensor:
        received, self._received = self._received, None
        assert received is not None, "nothing was sent"
        work, self._work = self._work, Work()
        work.wait()
        return received


def split_rounds(numels: Sequence[int], owners: Sequence[int]) -> list[list[int]]:
    """Cut matrices into rounds in which no owner has much more than 16M elements. Local.

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
