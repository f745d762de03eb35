"""Which ranks of a group share a host, and who carries what between hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shard_comm._tree import subtrees


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group's ranks.

    Between hosts every rank has a counterpart on each other host, the rank that stands at the
    same place there; where that host has fewer ranks, one of them stands in for several. What all
    ranks of a host need of a rank elsewhere comes through that rank's counterpart, and so does
    what they have for it: once per host, and spread over its ranks.

    Three ranks beside two::

        rank                         0    1    2 |  3       4
        its counterpart elsewhere    3    4    3 |  0       1
        ranks it is counterpart of   3    4    - |  0, 2    1

    Args:
        of: the host of each rank, in rank order; hosts are numbered as they first appear.

    **Collective**: local.
    """

    of: tuple[int, ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> Hosts:
        """Return the hosts with these names, one for each rank."""
        numbers: dict[str, int] = {}
        return cls(tuple(numbers.setdefault(name, len(numbers)) for name in names))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.of)

    @cached_property
    def members(self) -> list[list[int]]:
        """The ranks of each host, ascending."""
        found: list[list[int]] = [[] for _ in range(max(self.of) + 1)]
        for rank, host in enumerate(self.of):
            found[host].append(rank)
        return found

    @cached_property
    def places(self) -> list[int]:
        """Where each rank stands among those of its host."""
        places = [0] * self.size
        for ranks in self.members:
            for place, rank in enumerate(ranks):
                places[rank] = place
        return places

    def counterpart(self, rank: int, host: int) -> int:
        """Return who stands for ``rank`` on a host."""
        ranks = self.members[host]
        return ranks[self.places[rank] % len(ranks)]

    def counterparts(self, rank: int) -> list[int]:
        """Return the counterparts of ``rank`` on all other hosts, ascending."""
        others = (host for host in range(len(self.members)) if host != self.of[rank])
        return sorted(self.counterpart(rank, host) for host in others)

    def charges(self, rank: int) -> list[int]:
        """Return the ranks elsewhere whose counterpart ``rank`` is, ascending."""
        host = self.of[rank]
        return [
            other
            for other in range(self.size)
            if self.of[other] != host and self.counterpart(other, host) == rank
        ]

    @cached_property
    def subtrees(self) -> list[list[tuple[int, int]]]:
        """For each host the parts of the tree of sums that it can add up by itself.

        The more ranks of a host are neighbours, the fewer there are: one where each host has an
        aligned run of a power of two, one for each rank where hosts take turns.
        """
        found: list[list[tuple[int, int]]] = [[] for _ in self.members]
        for start, stop in subtrees(self.of):
            found[self.of[start]].append((start, stop))
        return found
