from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from shard_train import UsageError
from shard_train._launch import RankFailure, explain


def failure(
    folder: Path, rank: int, exitcode: int, error: str = "", at: int = 100
) -> ProcessFailure:
    """A rank's end, as the elastic launcher reports it."""
    path = folder / f"{rank}.json"
    if error:
        extra = {"py_callstack": "Traceback ...", "timestamp": str(at)}
        path.write_text(json.dumps({"message": {"message": error, "extraInfo": extra}}))
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


PEER_LOST = "RuntimeError: all_gather of 9 torch.float32 failed on rank 0 of 2: closed by peer"


def test_killed_rank_is_to_blame(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, 1, PEER_LOST), 1: failure(tmp_path, 1, -9)}
    with pytest.raises(RankFailure, match=r"^rank 1 was killed by SIGKILL$"):
        explain(failures, tmp_path)


def test_rank_that_the_launcher_ended_is_not_to_blame(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, -15), 1: failure(tmp_path, 1, 1)}
    with pytest.raises(RankFailure, match="rank 1 failed: exit status 1"):
        explain(failures, tmp_path)


def test_first_error_is_to_blame_and_not_a_lost_peer(tmp_path: Path) -> None:
    failures = {
        0: failure(tmp_path, 0, 1, PEER_LOST, at=100),
        1: failure(tmp_path, 1, 1, "IndexError: later", at=102),
        2: failure(tmp_path, 2, 1, "MemoryError: no room\nfor it", at=101),
    }
    with pytest.raises(RankFailure, match=r"^rank 2 failed: MemoryError: no room; .*/logs$"):
        explain(failures, tmp_path)


def test_lost_peer_alone_is_told_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 failed: RuntimeError: all_gather of 9"):
        explain({0: failure(tmp_path, 0, 1, PEER_LOST)}, tmp_path)


def test_error_without_a_word(tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="rank 0 failed: exit status 3; its output"):
        explain({0: failure(tmp_path, 0, 3)}, tmp_path)


def test_mistake_found_by_the_ranks(tmp_path: Path) -> None:
    message = "UsageError: the loss of step 3 is nan; begin again"
    with pytest.raises(UsageError, match=r"^the loss of step 3 is nan; begin again$"):
        explain({rank: failure(tmp_path, rank, 2, message) for rank in (0, 1)}, tmp_path)


def test_ranks_that_a_signal_stopped(tmp_path: Path) -> None:
    assert explain({1: failure(tmp_path, 1, 143), 0: failure(tmp_path, 0, 143)}, tmp_path) == 143
