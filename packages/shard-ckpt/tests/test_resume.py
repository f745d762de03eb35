"""What a run needs besides tensors: generators, the place in the data, schedules, extras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import Checkpointer, PerRank, RankValues
from shard_comm import Comm
from shard_testing import run_threads


class _Run:
    """One rank of a run: draws numbers, reads every so manieth file, changes its rate."""

    def __init__(self, comm: Comm, files: list[str]) -> None:
        self.comm = comm
        self.generator = torch.Generator().manual_seed(100 + comm.rank)
        self.files = files
        self.seen: list[str] = []
        self.optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.extras: dict[str, Any] = {"best": float("inf"), "tags": ("a", b"\0"), "seed": 2**70}

    def step(self) -> float:
        self.seen.append(self.files.pop(0))
        self.optimizer.step()
        self.scheduler.step()
        return torch.rand((), generator=self.generator).item()

    def state(self) -> dict[str, Any]:
        return {
            "rng": PerRank(self.generator.get_state()),
            "data": PerRank({"left": self.files, "epoch": 3}),
            "optim": self.optimizer.state_dict(),
            "schedule": self.scheduler.state_dict(),
            "extras": self.extras,
            "who": PerRank(self.comm.rank),
        }


FILES = [f"f{number}" for number in range(12)]


def _saved(comm: Comm, folder: Path) -> list[float]:
    run = _Run(comm, FILES[comm.rank :: comm.size])
    run.step()
    run.step()
    run.extras["best"] = 0.1
    Checkpointer(folder, comm=comm).save(2, run.state())
    return [run.step(), float(run.scheduler.get_last_lr()[0])]


def _restored(comm: Comm, folder: Path) -> tuple[_Run, dict[str, Any]]:
    run = _Run(comm, [])
    run.generator.manual_seed(0)
    _, loaded = Checkpointer(folder, comm=comm).restore(run.state()) or (0, {})
    run.optimizer.load_state_dict(loaded["optim"])
    run.scheduler.load_state_dict(loaded["schedule"])
    run.extras = loaded["extras"]
    return run, loaded


def test_as_many_ranks_go_on_where_they_were(tmp_path: Path) -> None:
    went_on = run_threads(_saved, 3, tmp_path)
    assert len({number for number, _ in went_on}) == 3

    def rank(comm: Comm) -> list[float]:
        run, loaded = _restored(comm, tmp_path)
        run.generator.set_state(loaded["rng"])
        run.files = loaded["data"]["left"]
        assert loaded["who"] == comm.rank
        assert run.extras == {"best": 0.1, "tags": ("a", b"\0"), "seed": 2**70}
        return [run.step(), float(run.scheduler.get_last_lr()[0])]

    assert run_threads(rank, 3, timeout_s=30) == went_on
    assert went_on[0][1] == 0.5**3


@pytest.mark.parametrize("size", [1, 2, 5])
def test_other_ranks_are_dealt_what_is_left(tmp_path: Path, size: int) -> None:
    run_threads(_saved, 3, tmp_path)

    def rank(comm: Comm) -> tuple[list[str], list[int], float, dict[str, Any]]:
        run, loaded = _restored(comm, tmp_path)
        assert isinstance(loaded["data"], RankValues)
        parts = loaded["data"].deal(comm.rank, comm.size)
        assert all(part["epoch"] == 3 for part in parts)
        left = [name for part in parts for name in part["left"]]
        states = loaded["rng"].deal(comm.rank, comm.size)
        if states:
            run.generator.set_state(states[0])
        drawn = torch.rand((), generator=run.generator).item()
        took = loaded["who"].deal(comm.rank, comm.size)
        return left, took, drawn if states else -1.0, run.extras

    found = run_threads(rank, size)
    assert sorted(name for left, *_ in found for name in left) == sorted(FILES[6:])
    assert [number for _, took, *_ in found for number in took] == [0, 1, 2]
    drawn = [number for *_, number, _ in found if number >= 0]
    assert len(set(drawn)) == len(drawn) == min(size, 3)
    assert {extras["best"] for *_, extras in found} == {0.1}


def test_the_example_of_dealing() -> None:
    five, two = RankValues(range(5)), RankValues(range(2))
    assert [five.deal(rank, 2) for rank in range(2)] == [[0, 1], [2, 3, 4]]
    assert [two.deal(rank, 3) for rank in range(3)] == [[], [0], [1]]
    with pytest.raises(ValueError, match="expected one of 3 ranks, got 3"):
        two.deal(3, 3)
