"""A file above 4 GiB, sparse so that it costs no disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from shard_ckpt import CheckpointError, _posix, inspect, load, save
from shard_ckpt._blocks import BLOCK_BYTES
from shard_comm import Comm, SoloComm, ThreadComm
from shard_flat import ShardSpec, ShardTensor
from shard_testing import run_threads

HUGE = (1 << 32) + 3 * BLOCK_BYTES + 5


def write_holes(fd: int, views: Sequence[memoryview]) -> int:
    """Leave a hole for a block that is zero at both ends; here it is zero in between too."""
    (first, *_) = views
    if len(first) == BLOCK_BYTES and not first[0] and not first[-1]:
        os.lseek(fd, BLOCK_BYTES, os.SEEK_CUR)
        return BLOCK_BYTES
    return os.writev(fd, views)


def test_more_than_4_gib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_posix, "write", write_holes)
    memory = torch.zeros(HUGE + 100, dtype=torch.uint8)  # pages that nobody writes take none
    memory[HUGE - 7 :] = torch.arange(1, 108)
    state = {"m": {"huge": memory[:HUGE], "tail": memory[HUGE:]}}
    save(state, tmp_path / "a", comm=SoloComm())
    (file,) = (f for f in inspect(tmp_path / "a").files if f.name.startswith("m-"))
    path = tmp_path / "a" / file.name
    assert file.nbytes == path.stat().st_size > HUGE
    assert path.stat().st_blocks * 512 < HUGE // 8
    records = {record.name: record for record in inspect(tmp_path / "a").tensors}
    assert records["tail"].ranges[0].offset > 1 << 32
    with safe_open(path, framework="pt") as opened:
        assert opened.get_tensor("tail").tolist() == list(range(8, 108))

    share = HUGE // 1000 + 1
    members = ThreadComm.group(1000)

    def rank(comm: Comm) -> tuple[list[int], list[int]]:
        """Of 1,000 ranks, the last two load."""
        number = 998 + comm.rank
        start, stop = number * share, min((number + 1) * share, HUGE)
        spec = ShardSpec("huge", (HUGE,), start, stop, 0, share)
        held = torch.full((stop - start,), 9, dtype=torch.uint8)
        tail = torch.zeros(100, dtype=torch.uint8)
        template = {"huge": ShardTensor(held, spec, comm=members[number]), "tail": tail}
        load({"m": template}, tmp_path / "a", comm=comm)
        return held[-8:].tolist(), tail[-2:].tolist()

    assert run_threads(rank, 2) == [([0] * 8, [106, 107]), ([0, 1, 2, 3, 4, 5, 6, 7], [106, 107])]
    with path.open("r+b") as raw:
        raw.seek(-103, os.SEEK_END)  # within the last elements of "huge"
        raw.write(b"\xff")
    with pytest.raises(CheckpointError, match="they hold m: huge, m: tail"):
        run_threads(rank, 2)
