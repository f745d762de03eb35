"""What ranks tell each other at the end of a backward: which gradients each of them has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shard_comm import Comm
from shard_fsdp._group import ParamGroup


@dataclass(frozen=True)
class Arrivals:
    """One group's gradients on this rank in one backward.

    Attributes:
        group: the group.
        seen: per parameter, whether a gradient arrived.
        waiting: whether some of them were not reduced yet.
        may_differ: whether ranks may have different ones.
    """

    group: ParamGroup
    seen: list[bool]
    waiting: bool
    may_differ: bool


@dataclass(frozen=True)
class Verdict:
    """What all ranks agreed on.

    Attributes:
        waiting: groups of which some rank holds gradients that were not reduced yet.
        complaint: what to raise on every rank once those are reduced, if anything.
    """

    waiting: list[ParamGroup]
    complaint: str | None


def agree_on_arrivals(
    arrivals: Sequence[Arrivals], comm: Comm, replicas: Comm | None = None
) -> Verdict:
    """Exchange which gradients arrived, one small all_reduce of 4 bytes per parameter and group.

    **Collective**: all ranks of ``comm`` and of ``replicas``, with the same groups in the same
    order.
    """
    ranks = comm.size * (1 if replicas is None else replicas.size)
    if ranks == 1 or not arrivals:
        return Verdict([a.group for a in arrivals if a.waiting], None)
    flags = [flag for a in arrivals for flag in (a.waiting, *a.seen)]
    counts = torch.tensor(flags, dtype=torch.int32, device=comm.device)
    comm.all_reduce(counts, op="sum")
    if replicas is not None:
        replicas.all_reduce(counts, op="sum")
    total = iter(counts.tolist())
    waiting: list[ParamGroup] = []
    complaints: list[str] = []
    for arrival in arrivals:
        if next(total):
            waiting.append(arrival.group)
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
