"""A group's collectives bear the name of its first parameter."""

from __future__ import annotations

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


FIRST, SECOND = "0.weight", "1.1.weight"


def test_gathers_and_reductions() -> None:
    expected = [
        ("shared", FIRST),
        ("all_gather", FIRST),
        ("shared", SECOND),
        ("all_gather", SECOND),
        ("all_gather", SECOND),
        ("all_gather", FIRST),
        ("reduce_scatter sum", SECOND),
        ("reduce_scatter sum", FIRST),
    ]
    assert run_threads(_copied, 2) == [expected] * 2


def test_arrays_that_all_ranks_map() -> None:
    expected = [
        ("shared", FIRST),
        ("publish", FIRST),
        ("shared", SECOND),
        ("publish", SECOND),
        ("publish", SECOND),
        ("publish", FIRST),
        ("reduce_scatter sum", SECOND),
        ("reduce_scatter sum", FIRST),
    ]
    assert run_threads(_mapped, 2, shares_memory=True) == [expected] * 2


def test_sums_over_replicas() -> None:
    for calls in run_threads(_replicated, 4):
        assert sorted(calls) == [("all_reduce sum", FIRST), ("all_reduce sum", SECOND)]
