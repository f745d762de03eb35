"""Bringing the results of owners to ranks that all hold the whole parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from shard_comm import Comm, Work


class Gathering:
    """One all_gather of some results, each of which its owner has.

    What a rank owns lies in one slice, in the order of the matrices; slices are as long as the
    longest.

    Args:
        comm: the ranks.
        numels: elements of each result, by a key of the caller's.
        owners: the owner of each, by the same keys.
        dtype: of what is sent.
    """

    def __init__(
        self,
        comm: Comm,
        numels: Mapping[int, int],
        owners: Mapping[int, int],
        dtype: torch.dtype,
    ) -> None:
        self.comm = comm
        self.owners = owners
        self._numels = numels
        self._dtype = dtype
        self._offsets: dict[int, int] = {}
        filled: defaultdict[int, int] = defaultdict(int)
        for key, owner in owners.items():
            self._offsets[key] = filled[owner]
            filled[owner] += numels[key]
        self.slice_numel = max(filled.values(), default=0)
        self._received: torch.Tensor | None = None
        self._work = Work()

    def send(self, results: Mapping[int, torch.Tensor]) -> None:
        """Start sending the results that this rank has to all others.

        Args:
            results: one for each matrix that this rank owns, flattened; they may change once
                this has returned.

        **Collective**: all ranks. **Memory**: all slices, until the results are dropped.
        """
        size, rank = self.comm.size, self.comm.rank
        received = self.comm.empty(size * self.slice_numel, self._dtype)
        own = received[rank * self.slice_numel : (rank + 1) * self.slice_numel].zero_()
        for key, result in results.items():
            start = self._offsets[key]
            own[start : start + self._numels[key]].copy_(result)
        if self.slice_numel:
            self._work = self.comm.all_gather(received, own, async_op=True)
        self._received = received

    def results(self) -> dict[int, torch.Tensor]:
        """Return all results, flattened, in memory that they share. Local.

        Raises:
            RuntimeError: the exchange failed or timed out.
        """
        received, self._received = self._received, None
        assert received is not None, "nothing was sent"
        work, self._work = self._work, Work()
        work.wait()
        found = {}
        for key, owner in self.owners.items():
            start = owner * self.slice_numel + self._offsets[key]
            found[key] = received[start : start + self._numels[key]]
        return found
