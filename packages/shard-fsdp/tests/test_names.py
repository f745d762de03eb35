"""A group's collectives bear the name of its first parameter, the others that of their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_comm import Checked, Comm
from shard_fsdp import fully_shard
from shard_testing import run_threads

Calls = list[tuple[str, str]]


def _calls(checked: Checked) -> Calls:
    return [(entry.op, entry.name) for entry in checked.entries if entry.name]


def _step(comm: Comm, replicas: Comm | None = None) -> None:
    """Layers that are wrapped before the whole, so that their names come last."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    mesh = comm if replicas is None else (replicas, comm)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)(torch.ones(1, 2)).sum().backward()


def _copied(comm: Comm) -> Calls:
    checked = Checked(comm)
    _step(checked)
    return _calls(checked)


def _mapped(comm: Comm) -> Calls:
    return [call for call in _copied(comm) if call[0] != "claim"]


def _replicated(comm: Comm) -> Calls:
    replicas = Checked(comm.split(comm.rank % 2))
    _step(comm.split(comm.rank // 2), replicas)
    return _calls(replicas)


def _one_skips_a_backward(comm: Comm) -> str:
    """Rank 1 goes on to the next forward, where the root is still full."""
    model = fully_shard(nn.Linear(2, 2), mesh=Checked(comm))
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(RuntimeError) as raised:
        loss.backward() if comm.rank == 0 else model(torch.ones(1, 2))
    return str(raised.value)


def _without_gradients(comm: Comm) -> Calls:
    checked = Checked(comm)
    model = fully_shard(nn.Linear(2, 2), mesh=checked)
    with torch.no_grad():
        model(torch.ones(1, 2))
    return _calls(checked)[-1:]


FIRST, SECOND = "0.weight", "1.1.weight"
BEGIN = ("all_reduce sum", "the start of the first forward")
END = ("all_reduce sum", "the end of a backward")


def test_gathers_and_reductions() -> None:
    expected = [
        BEGIN,
        ("shared", FIRST),
        ("all_gather", FIRST),
        ("shared", SECOND),
        ("all_gather", SECOND),
        ("all_gather", SECOND),
        ("all_gather", FIRST),
        ("reduce_scatter sum", SECOND),
        ("reduce_scatter sum", FIRST),
        END,
    ]
    assert run_threads(_copied, 2) == [expected] * 2


def test_arrays_that_all_ranks_map() -> None:
    expected = [
        BEGIN,
        ("shared", FIRST),
        ("publish", FIRST),
        ("shared", SECOND),
        ("publish", SECOND),
        ("publish", SECOND),
        ("publish", FIRST),
        ("reduce_scatter sum", SECOND),
        ("reduce_scatter sum", FIRST),
        END,
    ]
    assert run_threads(_mapped, 2, shares_memory=True) == [expected] * 2


def test_sums_over_replicas() -> None:
    for calls in run_threads(_replicated, 4):
        assert sorted(calls) == [("all_reduce sum", FIRST), ("all_reduce sum", SECOND), END, BEGIN]


def test_the_end_of_a_forward() -> None:
    expected = ("all_reduce sum", "the end of a forward without gradients")
    assert run_threads(_without_gradients, 2) == [[expected]] * 2


def test_a_backward_that_one_rank_skips() -> None:
    """The error says where each rank stands, so that nobody has to guess from sizes."""
    for said in run_threads(_one_skips_a_backward, 2):
        assert "rank 0 calls reduce_scatter sum of 8 float32 (mean) for weight" in said
        assert "rank 1 calls all_reduce sum of 1 int64 for the start of a forward" in said
