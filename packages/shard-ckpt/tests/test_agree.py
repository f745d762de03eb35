from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shard_ckpt import Checkpointer, CheckpointError, load, save, save_async
from shard_ckpt._agree import Outcome, agree, attempt
from shard_comm import Comm, SoloComm
from shard_testing import run_threads


def fail(error: Exception) -> Callable[[], Any]:
    def work() -> None:
        raise error

    return work


def errors_of_ranks(failing: dict[int, Exception], world_size: int) -> list[Exception | None]:
    def rank(comm: Comm) -> Exception | None:
        error = failing.get(comm.rank)
        outcome: Outcome[int] = attempt(fail(error)) if error else Outcome(comm.rank, None)
        try:
            assert agree(comm, outcome, share=str, timeout_s=None) == ["0", "1", "2"][:world_size]
        except (OSError, ValueError, TypeError, RuntimeError, AssertionError) as exc:
            return exc
        return None

    results: list[Exception | None] = run_threads(rank, world_size)
    return results


def test_all_go_on_if_all_succeed() -> None:
    assert errors_of_ranks({}, 3) == [None] * 3


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("w: bad"), ValueError, "w: bad (rank 1 of 3)"),
        (TypeError("w: bad"), TypeError, "w: bad (rank 1 of 3)"),
        (CheckpointError("f: bad"), CheckpointError, "f: bad (rank 1 of 3)"),
        (AssertionError("bad"), AssertionError, "bad (rank 1 of 3)"),
        (RuntimeError("bad"), RuntimeError, "RuntimeError: bad (rank 1 of 3)"),
        (KeyError("k"), RuntimeError, "KeyError: 'k' (rank 1 of 3)"),
        (
            OSError(errno.ENOSPC, "No space", "/x/f"),
            OSError,
            "[Errno 28] No space (rank 1 of 3): '/x/f'",
        ),
        (FileNotFoundError("gone"), FileNotFoundError, "gone (rank 1 of 3)"),
    ],
)
def test_all_raise_what_one_rank_raised(error: Exception, kind: type, text: str) -> None:
    raised = errors_of_ranks({1: error}, 3)
    assert [type(exc) for exc in raised] == [kind] * 3
    assert [str(exc) for exc in raised] == [text] * 3
    assert [exc.__cause__ for exc in raised if exc is not None] == [None, error, None]


def test_system_errors_keep_number_and_class() -> None:
    raised = errors_of_ranks({2: FileExistsError(errno.EEXIST, "taken", "a")}, 3)
    assert [type(exc) for exc in raised] == [FileExistsError] * 3
    assert [exc.errno for exc in raised if isinstance(exc, OSError)] == [errno.EEXIST] * 3


def test_of_several_errors_the_first_ranks_is_raised() -> None:
    raised = errors_of_ranks({2: ValueError("two"), 1: ValueError("one")}, 3)
    assert {str(exc) for exc in raised} == {"one (rank 1 of 3)"}


def test_one_rank_raises_its_own_error() -> None:
    error = ValueError("bad")
    with pytest.raises(ValueError, match=r"^bad$") as caught:
        agree(SoloComm(), attempt(fail(error)), share=str, timeout_s=None)
    assert caught.value is error


def test_what_is_no_comm_or_path_is_named(tmp_path: Path) -> None:
    uses: list[Any] = [save, save_async, load]
    for use in uses:
        with pytest.raises(TypeError, match=r"^comm: expected a Comm, got 'gloo'; .*comm_for"):
            use({}, tmp_path / "a", comm="gloo")
        for path in (None, b"a", 3):
            with pytest.raises(TypeError, match=f"^expected a path, .* got {path!r}$"):
                use({}, path, comm=SoloComm())
    with pytest.raises(TypeError, match=r"^comm: expected a Comm, got None"):
        Checkpointer(tmp_path, comm=None)  # type: ignore[arg-type]
