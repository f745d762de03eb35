"""Time collectives through shared memory against the same over Gloo, in one run.

    python tools/bench_comm.py [--ranks N] [--hosts N] [--rounds N] [--json PATH]

Ranks are processes of one thread each. In every round both transports take turns with a few
calls in a row, the first of which is not timed: it pays for the threads and caches that the other
left behind. A round takes as long as its slowest rank, and ratios are medians over rounds.

With several hosts, ranks of this machine declare themselves to be on as many, and the loopback
device is the network: fast, so that what is saved on a network does not show.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from _bench import Row, make_parser, report, row_of
from shard_comm import Comm, HierarchicalComm, SharedMemoryComm, comm_for
from shard_testing import run_ranks

SIZES_MIB = (16, 64)
BARRIERS, BARRIER_US = 2000, 5.0  # in a row, and how long one may take
CALLS = 8, 2  # in a row, ours and over Gloo


def gather(comm: Comm, mib: int) -> Callable[[], None]:
    """Copy every rank's slice of ``out``, as the runtime gathers parameters."""
    out = comm.empty(mib << 18, torch.float32).fill_(comm.rank)
    inp = out.view(comm.size, -1)[comm.rank]
    return lambda: comm.all_gather(out, inp).wait()


def gather_apart(comm: Comm, mib: int) -> Callable[[], None]:
    """The same with input and output in ordinary memory, apart."""
    out = torch.zeros(mib << 18)
    inp = torch.full((out.numel() // comm.size,), float(comm.rank))
    return lambda: comm.all_gather(out, inp).wait()


def gather_mapped(comm: Comm, mib: int) -> Callable[[], None]:
    """Make every rank's slice visible where it lies."""
    array = comm.shared(mib << 18, torch.float32)
    assert array is not None
    array.own.fill_(comm.rank)

    def run() -> None:
        array.claim()
        array.publish().wait()
        array.release()

    return run


def reduce(comm: Comm, mib: int) -> Callable[[], None]:
    """Sum every rank's input and keep a slice."""
    numel = (mib << 18) // comm.size
    out = torch.zeros(numel)
    inp = comm.empty(numel * comm.size, torch.float32).fill_(comm.rank)
    return lambda: comm.reduce_scatter(out, inp).wait()


def reduce_staged(comm: Comm, mib: int) -> Callable[[], None]:
    """The same with an input in ordinary memory."""
    numel = (mib << 18) // comm.size
    out, inp = torch.zeros(numel), torch.full((numel * comm.size,), float(comm.rank))
    return lambda: comm.reduce_scatter(out, inp).wait()


def barriers(comm: Comm, _: int) -> Callable[[], None]:
    """Many barriers in a row."""

    def run() -> None:
        for _ in range(BARRIERS):
            comm.barrier()

    return run


Make = Callable[[Comm, int], Callable[[], None]]


@dataclass(frozen=True)
class Case:
    """One collective of one size, ours and over Gloo.

    Attributes:
        name: what is measured, and in which unit.
        ours: makes our call.
        theirs: makes that over Gloo.
        mib: size of the full tensor.
        target: how many times faster ours is to be.
        per_s: units in a second.
    """

    name: str
    ours: Make
    theirs: Make
    mib: int
    target: float | None
    per_s: float = 1e3


def cases_of(hosts: int) -> list[Case]:
    """Return what is measured; the barrier last. Targets are for one host."""
    kinds = (
        ("gather, copied", gather, gather, 8.0),
        ("gather, copied, ordinary memory", gather_apart, gather_apart, None),
        ("gather, mapped", gather_mapped, gather, 8.0),
        ("reduce_scatter", reduce, reduce, 8.0),
        ("reduce_scatter, ordinary memory", reduce_staged, reduce_staged, None),
    )
    cases = [
        Case(f"{name}, {mib} MiB, ms", ours, theirs, mib, target if hosts == 1 else None)
        for mib in SIZES_MIB
        for name, ours, theirs, target in kinds
        if hosts == 1 or ours is not gather_mapped
    ]
    return [*cases, Case("barrier, us", barriers, barriers, 0, None, 1e6 / BARRIERS)]


def measure(comm: Comm, rounds: int, hosts: int) -> list[tuple[list[float], list[float]]]:
    """Return the seconds of each round of each case, ours and over Gloo."""
    gloo = comm_for(shared_memory=False)
    assert isinstance(comm, SharedMemoryComm)
    ours: Comm = comm
    if hosts > 1:
        os.environ["SHARD_HOST"] = str(comm.rank * hosts // comm.size)
        ours = comm_for(dist.new_group(list(range(comm.size))))
        assert isinstance(ours, HierarchicalComm)
    found = []
    for case in cases_of(hosts):
        runs = case.ours(ours, case.mib), case.theirs(gloo, case.mib)
        times: tuple[list[float], list[float]] = [], []
        for _ in range(rounds):
            for run, own, calls in zip(runs, times, CALLS, strict=True):
                run()
                comm.barrier()
                comm.barrier()  # the first may find one rank asleep and the other gone on
                began = time.perf_counter()
                for _ in range(calls):
                    run()
                comm.barrier()
                own.append((time.perf_counter() - began) / calls)
        found.append(times)
    return found


def rows_of(found: list[list[tuple[list[float], list[float]]]], hosts: int) -> list[Row]:
    """Put together what the ranks measured."""
    rows = []
    for index, case in enumerate(cases_of(hosts)):
        ours, theirs = (
            [case.per_s * max(each) for each in zip(*(r[index][side] for r in found), strict=True)]
            for side in (0, 1)
        )
        rows.append(row_of(case.name, "Gloo", ours, theirs, target=case.target, faster=True))
        if case.ours is barriers and hosts == 1:
            most = [BARRIER_US] * len(ours)
            rows.append(row_of(case.name, "what it may take", ours, most, target=1.0, faster=True))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a target is missed."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, help="as many, each of several ranks")
    arguments = parser.parse_args(argv)
    ranks, rounds, hosts = arguments.ranks, arguments.rounds, arguments.hosts
    if not 0 < hosts < max(ranks, 2):
        parser.error(f"expected hosts below the {ranks} ranks, got {hosts}")
    rows = rows_of(run_ranks(measure, ranks, rounds, hosts, timeout_s=600), hosts)
    print(
        f"torch {torch.__version__}, {ranks} ranks of one thread, hosts: {hosts}, fp32, "
        f"{rounds} rounds, medians"
    )
    return report(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
