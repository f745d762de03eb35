from __future__ import annotations

import pytest
import torch

from shard_comm import Work


def test_waiting_finishes_once() -> None:
    calls: list[bool] = []
    work = Work(lambda: calls.append(torch.is_grad_enabled()))
    assert calls == []
    work.wait()
    work.wait()
    assert calls == [False]  # results may land in parameters
    Work().wait()


def test_a_failure_is_raised_at_every_wait() -> None:
    """A second wait that passed would let a caller read what never arrived."""

    def fail() -> None:
        raise RuntimeError("rank 1 is gone")

    work = Work(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            work.wait()
