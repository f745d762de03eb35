"""How ranks come to share a file, and what happens where they cannot."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shard_comm import Comm, GroupComm, SharedMemoryComm, comm_for
from shard_comm import _shared_file as shared_file
from shard_testing import logged, run_ranks


def denied(*_: Any, **__: Any) -> int:
    raise OSError(errno.EACCES, "not allowed here")


def picked_anew(comm: Comm) -> Comm:
    """What comm_for makes of a group that it has not seen."""
    return comm_for(dist.new_group(list(range(comm.size))))


def check_serves(comm: Comm, *, named: bool) -> None:
    """A comm of this kind moves what lies in its memory and what does not, and shares arrays."""
    assert isinstance(comm, SharedMemoryComm)
    assert comm._engine.file.named == named
    out = torch.empty(2 * comm.size)
    for inp in (comm.empty(2, torch.float32), torch.empty(2)):
        comm.all_gather(out.fill_(-1), inp.fill_(comm.rank))
        assert out.tolist() == [0.0, 0.0, 1.0, 1.0]
    part = comm.split(0)
    assert isinstance(part, SharedMemoryComm)
    array = part.shared(2, torch.float32)
    assert array is not None
    array.own.fill_(comm.rank)
    array.publish().wait()
    assert array.data.tolist() == [0.0, 1.0]
    for file in (comm._engine.file, part._engine.file):
        token = os.pread(file.fd, 16, 0)
        assert not Path(f"/dev/shm/shard-comm-{token.hex()}").exists()


def check_no_memory_file(comm: Comm) -> None:
    """Rank 0 cannot make a file in memory: one in /dev/shm, without a name by now, serves."""
    with logged("shard_comm") as records:
        if comm.rank == 0:
            with mock.patch.object(os, "memfd_create", denied):
                check_serves(picked_anew(comm), named=True)
        else:
            check_serves(picked_anew(comm), named=True)
    assert records == []


def check_other_processes_under_the_same_number(comm: Comm) -> None:
    """In another pid namespace, rank 0's entry in /proc is some other process, or none."""

    def create(nbytes: int, *, named: bool) -> tuple[shared_file.SharedFile, str, bytes]:
        file, path, token = made(nbytes, named=named)
        return file, path.replace(f"/{os.getpid()}/", "/1/"), token

    made = shared_file._create
    with mock.patch.object(shared_file, "_create", create):
        check_serves(picked_anew(comm), named=True)


def check_no_way(comm: Comm) -> None:
    """Rank 1 may open nothing: all go through Gloo, and rank 0 says why, once."""
    opened = denied if comm.rank == 1 else shared_file._open
    paths: list[str] = []

    def create(nbytes: int, *, named: bool) -> tuple[shared_file.SharedFile, str, bytes]:
        file, path, token = made(nbytes, named=named)
        paths.append(path)
        return file, path, token

    made = shared_file._create
    with (
        logged("shard_comm") as records,
        mock.patch.object(shared_file, "_open", opened),
        mock.patch.object(shared_file, "_create", create),
    ):
        found = picked_anew(comm)
    assert len(paths) == 2 * (comm.rank == 0)
    assert not any(Path(path).exists() for path in paths)
    assert isinstance(found, GroupComm)
    found.barrier()
    assert len(records) == (comm.rank == 0)
    for record in records:
        pattern = r"2 ranks of one host go through Gloo: .*: rank 1: .*not allowed here; rank 1: "
        assert re.match(pattern, record), record


def check_full_file_system(comm: Comm) -> None:
    """/dev/shm has no room for the control block of rank 1, or later for an array."""
    full = mock.patch.object(os, "posix_fallocate", denied)
    plain = comm_for(shared_memory=False)

    def join() -> SharedMemoryComm:
        with mock.patch.object(shared_file, "_MEMORY_FIRST", (True,)):
            return SharedMemoryComm.join(plain)

    def fail() -> None:
        with pytest.raises(RuntimeError, match=r"cannot open memory .*: rank 1: .*not allowed"):
            join()

    run_on(1, comm, full, fail)
    part = join()
    memory = part.empty(10, torch.float32)
    assert part._engine.arena.find(memory.data_ptr()) is not None
    with logged("shard_comm") as records, full:
        other = part.empty(1 << 22, torch.float32)
        assert part._engine.arena.find(other.data_ptr()) is None
        assert part.shared(2, torch.float32) is None
    assert re.match("no shared memory left for 16777216 bytes: .*ordinary memory", records[0])
    assert len(records) == 1 + (comm.rank == 0)


def run_on(rank: int, comm: Comm, patch: Any, call: Callable[[], None]) -> None:
    if comm.rank == rank:
        with patch:
            call()
    else:
        call()


def check_two_hosts(comm: Comm) -> None:
    """Nothing is wrong, so nothing is said; asked for by name, it is an error on all ranks."""
    name = f"host {comm.rank}"
    with logged("shard_comm") as records, mock.patch.dict(os.environ, SHARD_HOST=name):
        assert isinstance(picked_anew(comm), GroupComm)
    assert records == []
    with (
        mock.patch.dict(os.environ, SHARD_HOST=name),
        pytest.raises(RuntimeError, match="the 2 ranks are on 2 hosts"),
    ):
        SharedMemoryComm.join(comm)


def check_all(comm: Comm) -> None:
    check_no_memory_file(comm)
    check_other_processes_under_the_same_number(comm)
    check_no_way(comm)
    check_full_file_system(comm)
    check_two_hosts(comm)
    check_serves(picked_anew(comm), named=False)


def test_processes() -> None:
    run_ranks(check_all, 2)


def test_a_swapped_file_is_not_opened(tmp_path: Path) -> None:
    """Right name, wrong file: what another process has there is not mapped."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    with pytest.raises(OSError, match="is not the file that rank 0 made"):
        shared_file._open(str(path), b"y" * 16, named=True)
    with pytest.raises(OSError, match="is not the file that rank 0 made"):
        shared_file._open(str(tmp_path), b"x" * 16, named=True)
    file = shared_file._open(str(path), b"x" * 16, named=True)
    assert os.get_inheritable(file.fd) is False
    file.close()
    file.close()


def test_hosts_differ_where_nothing_is_known() -> None:
    assert shared_file.host_name() == shared_file.host_name()
    with mock.patch.object(Path, "read_text", denied):
        assert shared_file.host_name() != shared_file.host_name()
