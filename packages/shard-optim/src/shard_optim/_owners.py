"""Who works on which matrix."""

from __future__ import annotations

from collections.abc import Sequence

_CANDIDATES = 64  # looking at more of those that are equally free has not paid


class Ledger:
    """What each rank has to do so far.

    Args:
        world_size: number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._loads = [0.0] * world_size
        self._numels = [0] * world_size

    def assign(
        self, costs: Sequence[float], sizes: Sequence[Sequence[tuple[int, int]]]
    ) -> list[int]:
        """Give each matrix to a rank: the dearest first, each to the rank that has least to do.

        Where several ranks have equally little, the one takes it that holds most of it, so that
        little is sent, and among those the one that owns the fewest elements.

        Worked example: costs 5, 4, 3, 3, 3 over 2 ranks. 5 goes to the first and 4 to the second,
        3 to the second, 3 to the first and 3 to the second: 8 and 10.

        Args:
            costs: of each matrix, in any unit.
            sizes: for each matrix, the ranks that hold elements of it and how many they hold.

        Returns:
            The owner of each matrix; the same on every rank.

        **Collective**: local.

        **Source**: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: of what is assigned
        in one call, the largest load is at most 4/3 of the best possible one.
        """
        loads, numels = self._loads, self._numels
        owners = [0] * len(costs)
        for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
            least = min(loads)
            free = [rank for rank, load in enumerate(loads) if load <= least * (1 + 1e-9)]
            held = dict(sizes[index])

            def burden(rank: int, held: dict[int, int] = held) -> tuple[int, int]:
                return -held.get(rank, 0), numels[rank]

            owner = min(free[:_CANDIDATES], key=burden)
            owners[index] = owner
            loads[owner] += costs[index]
            numels[owner] += sum(held.values())
        return owners
