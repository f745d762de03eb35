"""Who works on which matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

_CANDIDATES = 64  # looking at more of those that are equally free has not paid


class Ledger:
    """What each rank has to do so far, and what ranks send each other for it.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._loads = [0.0] * world_size
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)

    def assign(
        self, costs: Sequence[float], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> list[int]:
        """Give each matrix to a rank: the dearest first, each to the rank that has least to do.

        Where several ranks have equally little, the one is taken with which the fullest pair of
        sender and owner stays least full: what ranks send each other is padded to that.

        Worked example: costs 5, 4, 3, 3, 3 over 2 ranks. 5 goes to the first and 4 to the second,
        3 to the second, 3 to the first and 3 to the second: 8 and 10.

        Args:
            costs: of each matrix, in any unit.
            sizes: for each matrix, the ranks that hold elements of it and how many they hold.

        Returns:
            The owner of each matrix; the same on every rank.

        **Collective**: local.

        **Source**: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: the largest load is
        at most 4/3 of the best possible one.
        """
        loads, sent = self._loads, self._sent
        owners = [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            least = min(loads)
            free = [rank for rank, load in enumerate(loads) if load <= least * (1 + 1e-9)]

            def fullest(owner: int, held: Sequence[tuple[int, int]] = sizes[index]) -> int:
                return max((sent[rank, owner] + n for rank, n in held if rank != owner), default=0)

            owner = min(free[:_CANDIDATES], key=fullest)
            owners[index] = owner
            loads[owner] += costs[index]
            for rank, numel in sizes[index]:
                if rank != owner:
                    sent[rank, owner] += numel
        return owners
