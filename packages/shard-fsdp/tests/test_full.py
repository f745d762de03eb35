"""Full parameters in memory that ranks share: who may write a shard, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded
from shard_fsdp import MixedPrecisionPolicy, fully_shard
from shard_testing import run_threads


class _Held(nn.Module):
    """Stays in its forward on rank 1 until rank 0 has written its shard, or has had the time to."""

    def __init__(self, rank: int, written: threading.Event) -> None:
        super().__init__()
        self.is_held = rank == 1
        self.written = written
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_held:
            self.written.wait(0.2)
        return x * self.weight


def _write_while_others_read(
    comm: Comm, written: threading.Event, dtype: torch.dtype | None, train: bool
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    inner: Any = fully_shard(_Held(comm.rank, written), mesh=comm, mp_policy=policy)
    model = fully_shard(nn.Sequential(inner), mesh=comm)
    for step in (1, 2, 3):
        comm.barrier()
        with torch.set_grad_enabled(train):
            out = model(torch.ones(16))
        assert out.tolist() == [float(step)] * 16
        if train:
            out.sum().backward()
        with torch.no_grad():
            inner.weight.add_(1)
        written.set()
        comm.barrier()
        written.clear()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_nobody_sees_a_torn_parameter(dtype: torch.dtype | None, train: bool) -> None:
    written = threading.Event()
    run_threads(_write_while_others_read, 2, written, dtype, train, shares_memory=True)


def _written_unseen(comm: Comm, dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model: Any = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=comm, mp_policy=policy, reshard_after_forward=False)
    for value in (1.0, 2.0):
        model.weight.to_local().detach().numpy().fill(value)
        model.reshard()
        assert model(torch.ones(4)).tolist() == [4 * value] * 4


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_reshard_takes_in_what_was_written_unseen(
    world_size: int, dtype: torch.dtype | None, shares_memory: bool
) -> None:
    run_threads(_written_unseen, world_size, dtype, shares_memory=shares_memory)


# What torch does not count, through a piece that was taken for it.
UNCOUNTED: dict[str, Callable[[Any, float], object]] = {
    "numpy": lambda p, value: p.detach().to_local().numpy().fill(value),
    "data of a piece": lambda p, value: p.to_local().data.fill_(value),
    "local of data": lambda p, value: p.data.local.data.fill_(value),
}


def _written_while_gathered(comm: Comm, dtype: torch.dtype | None, how: str) -> None:
    """A forward without a backward leaves it gathered; only the last rank writes."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    recorded = Recorded(comm)
    model: Any = nn.Linear(1, 8, bias=False)
    fully_shard(model, mesh=recorded, mp_policy=policy, reshard_after_forward=False)
    shard = 8 // comm.size
    with torch.no_grad():
        model.weight.fill_(1)
    for value in (2.0, 3.0):
        model(torch.ones(1))
        if comm.rank == comm.size - 1:
            UNCOUNTED[how](model.weight, value)
        found = model(torch.ones(1)).tolist()
        assert found == [1.0] * (8 - shard) + [value] * shard
    recorded.records.clear()
    model(torch.ones(1))
    assert "all_gather" not in recorded.records  # nobody took a piece since


@pytest.mark.parametrize("how", UNCOUNTED)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_written_through_a_new_piece_is_seen(
    world_size: int, dtype: torch.dtype | None, how: str, shares_memory: bool
) -> None:
    run_threads(_written_while_gathered, world_size, dtype, how, shares_memory=shares_memory)


def _read_between(comm: Comm, dtype: torch.dtype | None) -> None:
    """Who took a piece to read it is not told that parameters changed."""
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model: Any = nn.Linear(1, 8, bias=False)
    fully_shard(model, mesh=comm, mp_policy=policy)
    model.unshard()
    assert model.weight.to_local().numel() == 8 // comm.size
    out = model(torch.ones(1))
    assert model.weight.local.numel() == 8 // comm.size
    out.sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [[1.0]] * 8


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_piece_may_be_read_at_any_time(dtype: torch.dtype | None, shares_memory: bool) -> None:
    run_threads(_read_between, 2, dtype, shares_memory=shares_memory)


class _Hiding(nn.Module):
    """Returns what nobody can look into, so its unit keeps what it has gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.weight
        return lambda: y


def _kept_and_written(comm: Comm, create_graph: bool) -> list[list[float]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model: Any = fully_shard(_Hiding(), mesh=comm, mp_policy=policy, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        y = model(torch.ones(4))()
        seen.append(y.tolist())
        y.sum().backward(create_graph=create_graph)
        optimizer.step()
    return seen


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")  # with create_graph
@pytest.mark.parametrize("create_graph", [False, True])
def test_what_is_kept_for_a_graph_holds_no_step_up(create_graph: bool, shares_memory: bool) -> None:
    """A rank that keeps full parameters of one step lets others write those of the next."""
    seen = run_threads(_kept_and_written, 2, create_graph, timeout_s=5, shares_memory=shares_memory)
    assert seen == [[[1.0] * 4, [0.75] * 4, [0.5] * 4]] * 2


def _where_shards_lie(comm: Comm) -> None:
    model: Any = nn.Linear(8, 8, bias=False)
    before = torch.arange(64.0).view(8, 8)
    model.load_state_dict({"weight": before})
    fully_shard(model, mesh=comm)
    first = model.weight
    model(torch.ones(1, 8)).sum().backward()
    (group,) = model._shard_unit.groups
    assert group.exposes_shard
    assert model.weight is first
    assert model.weight.local.data_ptr() == group.full.own.data_ptr()  # one copy on the host
    assert torch.equal(model.weight.full_tensor(), before)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.step()
    assert torch.equal(model(torch.eye(8)), before.t() - 1)
    model.double()  # moves to memory of its own, and from there to another array
    assert torch.equal(model(torch.eye(8, dtype=torch.float64)), (before.t() - 1).double())


def test_a_shard_lies_where_others_read_it() -> None:
    run_threads(_where_shards_lie, 2, shares_memory=True)
