"""Two network namespaces joined by one link are two hosts: what crosses the link is counted."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shard_comm import Comm, GroupComm, HierarchicalComm, comm_for
from shard_testing import run_ranks

NEW_NETWORK = 0x40000000  # CLONE_NEWNET
SIZE, RANKS_PER_HOST = 4, 2
IN_A_ROW, IN_TURNS = [0, 0, 1, 1], [0, 1, 0, 1]
NUMEL = 1 << 18
SLICE_BYTES = 4 * NUMEL
"""Bytes of one rank's slice, the unit of what is counted."""
PORT = 29_531  # in a namespace of its own no port is taken
LINK = "link0"

IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""
PROBE = "import ctypes, os; os._exit(ctypes.CDLL(None).unshare(0x40000000) and 1)"


def why_not() -> str:
    """Return what keeps this machine from it, if anything does."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if not IP:
        return "there is no command ip (Debian: iproute2)"
    if os.geteuid() != 0:
        return "making network namespaces takes root"
    if subprocess.run([sys.executable, "-c", PROBE], check=False).returncode:
        return "this machine forbids network namespaces, even to root"
    return ""


@pytest.fixture(scope="module")
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


def ip(*words: object) -> None:
    done = subprocess.run([IP, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {words}: {done.stderr}"


def move(name: str, *numbers: int) -> None:
    """Call unshare or setns, which move the calling thread, and threads that it starts later."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*numbers):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def enter_host(comm: Comm, layout: Sequence[int]) -> None:
    """Go to the namespace of this rank's host, which is gone when its last rank is.

    The first rank of a host makes it, rank 0 lays the link between the two.
    """
    host = layout[comm.rank]
    leaders = [layout.index(0), layout.index(1)]
    if comm.rank in leaders:
        move("unshare", NEW_NETWORK)
    processes = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        ends = [[LINK, "netns", processes[leader]] for leader in leaders]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
    comm.barrier()
    if comm.rank in leaders:
        ip("address", "add", f"10.77.0.{host + 1}/24", "dev", LINK)
        for device in ("lo", LINK):
            ip("link", "set", device, "up")
    else:
        theirs = os.open(f"/proc/{processes[leaders[host]]}/ns/net", os.O_RDONLY)
        move("setns", theirs, NEW_NETWORK)
        os.close(theirs)
    comm.barrier()


def join_hosts(comm: Comm, layout: Sequence[int]) -> None:
    """Initialise torch.distributed as torchrun does, over the link."""
    rank = comm.rank
    enter_host(comm, layout)
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="10.77.0.1",
        MASTER_PORT=str(PORT),
        RANK=str(rank),
        WORLD_SIZE=str(SIZE),
        GLOO_SOCKET_IFNAME=LINK,
        SHARD_HOST=f"host {layout[rank]}",
    )
    dist.init_process_group("gloo")


def crossed_bytes() -> int:
    """Return what this host has received and sent over the link so far."""
    for line in Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            received, sent = (int(counts.split()[column]) for column in (0, 8))
            return received + sent
    raise AssertionError("there is no link")


def count(call: Callable[[], object]) -> float:
    """Return how many slices cross the link in one direction, on average, in one call."""
    quiet = comm_for(shared_memory=False)
    call()  # connections are made
    quiet.barrier()
    before = crossed_bytes()
    quiet.barrier()
    call()
    quiet.barrier()
    crossed = crossed_bytes() - before
    quiet.barrier()
    return crossed / 2 / SLICE_BYTES


def measure(comm: Comm) -> dict[str, float]:
    """Count each collective, and see that it did its work."""
    wide, slice_, full = torch.empty(NUMEL * SIZE), torch.empty(NUMEL), torch.empty(NUMEL * SIZE)
    narrow = torch.ones(NUMEL * SIZE).bfloat16()

    def gather() -> None:
        comm.all_gather(full, slice_.fill_(comm.rank))
        assert full[::NUMEL].tolist() == [0.0, 1.0, 2.0, 3.0]

    def reduce() -> None:
        comm.reduce_scatter(slice_, wide.fill_(comm.rank + 1))
        assert slice_.unique().tolist() == [10.0]

    def reduce_narrow() -> None:
        comm.reduce_scatter(slice_, narrow, sum_dtype=torch.float32)
        assert slice_.unique().tolist() == [4.0]

    def reduce_all() -> None:
        comm.all_reduce(slice_.fill_(comm.rank + 1))
        assert slice_.unique().tolist() == [10.0]

    def broadcast() -> None:
        comm.broadcast(slice_.fill_(comm.rank), src=1)
        assert slice_.unique().tolist() == [1.0]

    calls = (gather, reduce, reduce_narrow, reduce_all, broadcast)
    return {call.__name__: count(call) for call in calls}


def measure_both(comm: Comm, layout: Sequence[int]) -> tuple[dict[str, float], dict[str, float]]:
    join_hosts(comm, layout)
    ours, plain = comm_for(), comm_for(shared_memory=False)
    assert isinstance(ours, HierarchicalComm)
    assert ours.hosts.of == tuple(layout)
    assert isinstance(plain, GroupComm)
    return measure(ours), measure(plain)


@pytest.mark.usefixtures("namespaces")
def test_each_host_gets_every_byte_once() -> None:
    """In slices: what a host lacks is two of them, over Gloo its ranks fetch more.

    A reduction sends a sum for each rank elsewhere, where Gloo sends a contribution of each rank:
    half of it. A gather of Gloo's goes round in a ring, which crosses the link once for each rank
    but one where ranks of a host are neighbours.
    """
    ours, plain = run_ranks(measure_both, SIZE, IN_A_ROW)[0]
    assert_about(ours, gather=2, reduce=2, reduce_narrow=2, reduce_all=1, broadcast=0.5)
    assert_about(plain, gather=3, reduce=4, reduce_narrow=2, reduce_all=3)
    assert plain["reduce"] / ours["reduce"] == pytest.approx(RANKS_PER_HOST, rel=0.1)


@pytest.mark.usefixtures("namespaces")
def test_hosts_that_take_turns() -> None:
    """Gloo's ring crosses the link at every step; no two contributions can be added up first."""
    ours, plain = run_ranks(measure_both, SIZE, IN_TURNS)[0]
    assert_about(ours, gather=2, reduce=4, reduce_narrow=2, broadcast=0.5)
    assert_about(plain, gather=6, reduce=4, reduce_narrow=2)
    assert plain["gather"] / ours["gather"] > RANKS_PER_HOST


def assert_about(found: dict[str, float], **expected: float) -> None:
    """Headers and acknowledgements add a little."""
    for name, slices in expected.items():
        assert slices <= found[name] < 1.1 * slices + 0.02, (name, found)
