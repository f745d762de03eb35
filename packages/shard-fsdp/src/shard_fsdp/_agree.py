"""What ranks tell each other: which gradients each has, and whether all launched the same."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shard_comm import Comm

if TYPE_CHECKING:
    from shard_fsdp._group import ParamGroup
    from shard_fsdp._unit import Unit

# What errors call the exchanges, as in "all_reduce sum of 5 int64 for the end of a backward".
_FIRST_FORWARD = "the start of the first forward"
_END_OF_FORWARD = "the end of a forward without gradients"
_END_OF_BACKWARD = "the end of a backward"


class Trail:
    """What a set of ranks launched, in order.

    Attributes:
        count: how many collectives.
        checksum: 24 bits over all their names.
        last: the names of the last few.
        begun_at: how many there were when the forward that runs began.
    """

    def __init__(self) -> None:
        self.count = self.begun_at = 0
        self.checksum = 0
        self.last: deque[str] = deque(maxlen=64)

    def append(self, what: str) -> None:
        """Note one collective. Local."""
        self.count += 1
        self.checksum = _checksum(what, self.checksum)
        self.last.append(what)


@dataclass(frozen=True)
class Arrivals:
    """One group's gradients on this rank in one backward.

    Attributes:
        unit: the group's unit.
        group: the group.
        seen: per parameter, whether a gradient arrived.
        waiting: whether some of them were not reduced yet.
        may_differ: whether ranks may have different ones.
    """

    unit: Unit
    group: ParamGroup
    seen: list[bool]
    waiting: bool
    may_differ: bool


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on.

    Attributes:
        waiting: arrivals of which some rank holds gradients that were not reduced yet.
        complaint: what to raise on every rank once those are reduced, if anything.
    """

    waiting: list[Arrivals]
    complaint: str | None


def agree_on_any(
    flags: Sequence[bool], comm: Comm, replicas: Comm | None, *, name: str
) -> list[bool]:
    """Return for each flag whether any rank sets it. One small all_reduce.

    Args:
        flags: of this rank.
        comm: the ranks.
        replicas: the ranks that hold the same.
        name: where a step stands when its ranks call this, for errors about ranks that do not.

    **Collective**: all ranks of ``comm`` and of ``replicas``.
    """
    counts = _sum_over_ranks(list(flags), comm, replicas, name=name)
    return [count > 0 for count in counts]


def agree_on_arrivals(
    arrivals: Sequence[Arrivals], trail: Trail, comm: Comm, replicas: Comm | None
) -> Verdict:
    """Exchange which gradients arrived, in one small all_reduce of 8 bytes per parameter and group.

    The same exchange tells whether all ranks launched the same collectives since the trail began.
    n numbers x are all equal where ``n * sum(x * x) == sum(x) ** 2``, so sums are enough.

    Raises:
        RuntimeError: the ranks ran different units, so that they mixed up each other's data; on
            all ranks.

    **Collective**: all ranks of ``comm`` and of ``replicas``, with the same groups in the same
    order.
    """
    ranks = _count(comm, replicas)
    if ranks == 1:
        return Verdict([a for a in arrivals if a.waiting], None)
    flags = [flag for a in arrivals for flag in (a.waiting, *a.seen)]
    total = iter(_sum_on_one_trail(flags, trail, comm, replicas, name=_END_OF_BACKWARD))
    waiting: list[Arrivals] = []
    complaints: list[str] = []
    for arrival in arrivals:
        if next(total):
            waiting.append(arrival)
        for param in arrival.group.sharded_params:
            count = next(total)
            if count in (0, ranks) or arrival.may_differ:
                continue
            complaints.append(f"{param.spec.name} ({count} of {ranks} ranks)")
    if not complaints:
        return Verdict(waiting, None)
    shown = ", ".join(complaints[:8]) + (", ..." if len(complaints) > 8 else "")
    return Verdict(
        waiting,
        f"{shown}: got a gradient on some ranks only (rank {comm.rank} of {comm.size}); if ranks "
        f"may use different parameters, call set_reduce_scatter_unused_params(True) on the model",
    )


def check_trail(trail: Trail, comm: Comm, replicas: Comm | None) -> None:
    """Tell whether all ranks launched the same collectives. One all_reduce of 16 bytes.

    Raises:
        RuntimeError: they did not; on all ranks.

    **Collective**: all ranks of ``comm`` and of ``replicas``.
    """
    if _count(comm, replicas) > 1:
        _sum_on_one_trail([], trail, comm, replicas, name=_END_OF_FORWARD)


def check_same_model(units: Sequence[Unit], comm: Comm, replicas: Comm | None) -> None:
    """Make sure that all ranks cut the same parameters in the same units, by a checksum of 24 bits.

    One all_reduce of 16 bytes per comm, where they do.

    Args:
        units: all of those whose ranks are these.
        comm: the ranks that share the parameters.
        replicas: the ranks that hold the same shard, if there are any.

    Raises:
        RuntimeError: they did not; on all ranks, with the first difference.

    **Collective**: all ranks of ``comm`` and of ``replicas``.
    """
    if _count(comm, replicas) == 1:
        return
    lines = [
        f"{param.spec.name} {list(spec.shape)} {spec.dtype} on {param.device.type} in unit {number}"
        for number, unit in enumerate(units)
        for group in unit.groups
        for param, spec in zip(group.sharded_params, group.layout.specs, strict=True)
    ]
    checksum = _checksum("\n".join(lines))
    if _sum_if_same(checksum, [], comm, replicas, name=_FIRST_FORWARD) is not None:
        return
    raise RuntimeError(
        f"the ranks sharded different models; the first difference is at number "
        f"{_first_difference(lines, 0, comm, replicas)}. Build the same model on all ranks, and "
        f"call fully_shard on the same modules in the same order"
    )


def _checksum(text: str, before: int = 0) -> int:
    """24 bits, so that squares of many of them can be added."""
    return zlib.crc32(text.encode(), before) & 0xFFFFFF


def _count(comm: Comm, replicas: Comm | None) -> int:
    return comm.size * (1 if replicas is None else replicas.size)


def _sum_on_one_trail(
    numbers: Sequence[int], trail: Trail, comm: Comm, replicas: Comm | None, *, name: str
) -> list[int]:
    total = _sum_if_same(trail.checksum, numbers, comm, replicas, name=name)
    if total is None:
        raise RuntimeError(_where_trails_part(trail, comm, replicas))
    return total


def _sum_if_same(
    mine: int, numbers: Sequence[int], comm: Comm, replicas: Comm | None, *, name: str
) -> list[int] | None:
    """Return the sums over ranks of ``numbers``; None where ``mine`` is not the same on all."""
    numbers = [mine, mine * mine, *numbers]
    once, squared, *total = _sum_over_ranks(numbers, comm, replicas, name=name)
    return total if once**2 == _count(comm, replicas) * squared else None


def _sum_over_ranks(
    numbers: list[int], comm: Comm, replicas: Comm | None, *, name: str
) -> list[int]:
    with torch._C._DisableFuncTorch():  # a transform around would wrap what is sent
        counts = torch.tensor(numbers, dtype=torch.int64, device=comm.device)
        if comm.size > 1:
            comm.all_reduce(counts, op="sum", name=name)
        if replicas is not None:
            replicas.all_reduce(counts, op="sum", name=name)
        return [int(count) for count in counts.tolist()]


def _where_trails_part(trail: Trail, comm: Comm, replicas: Comm | None) -> str:
    """Say on which collective the ranks differ first. Collective."""
    found = _first_difference(list(trail.last), trail.count - len(trail.last), comm, replicas)
    if found is None:
        return (
            f"the ranks launched different collectives, longer ago than the last "
            f"{len(trail.last)}; all ranks must use the same units in the same order"
        )
    return (
        f"the ranks launched different collectives, so their data are mixed up and the "
        f"gradients are not to be used; the first difference is at number {found}. All ranks must "
        f"use the same units in the same order, in backward too: a loss that does not depend on a "
        f"unit adds 0 * its output"
    )


def _first_difference(
    lines: list[str], first: int, comm: Comm, replicas: Comm | None
) -> str | None:
    """Say at which number ranks have different lines, and which. Collective.

    Args:
        lines: of this rank.
        first: the first one's number.
        comm: the ranks.
        replicas: the ranks that hold the same.
    """
    everyone = [comm.all_gather_object((first, lines))]
    if replicas is not None:
        everyone = [theirs[0] for theirs in replicas.all_gather_object(everyone)]
    numbered = [dict(enumerate(those, start)) for ranks in everyone for start, those in ranks]
    begin = max(min(those, default=0) for those in numbered)
    for index in range(begin, max(max(those, default=0) for those in numbered) + 1):
        found = [those.get(index, "nothing more") for those in numbered]
        if len(set(found)) > 1:
            calls = ", ".join(f"rank {r}: {what}" for r, what in enumerate(found[:8]))
            return f"{index}: {calls}"
    return None
