"""Matrix optimizers over parameters that every rank holds, as under DistributedDataParallel."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shard_comm import Comm, Recorded, comm_for
from shard_flat import ShardTensor
from shard_optim import SOAP, Muon, Offload, Shampoo, _routes
from shard_testing import draw_steps, run_ranks, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (16, 24), (2, 3, 4), (24, 10), (), (0, 4), (8, 8)]
KINDS: dict[str, Callable[..., Any]] = {
    "muon": lambda p, **hyper: Muon(p, lr=0.02, **hyper),
    "soap": lambda p, **hyper: SOAP(
        p, lr=0.02, precondition_frequency=2, max_preconditioner_dim=20, **hyper
    ),
    "shampoo": lambda p, **hyper: Shampoo(
        p, lr=0.02, precondition_frequency=2, max_preconditioner_dim=10, **hyper
    ),
    "muon, disk": lambda p, **hyper: Muon(p, lr=0.02, offload=Offload("disk"), **hyper),
    "soap, disk": lambda p, **hyper: SOAP(p, lr=0.02, offload=Offload("disk"), **hyper),
    "shampoo, disk": lambda p, **hyper: Shampoo(p, lr=0.02, offload=Offload("disk"), **hyper),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def data(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, 5)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def owned(state: Any) -> list[torch.Tensor]:
    """State tensors of matrices: pieces where there are several ranks, wholes else."""
    return [
        value.full_tensor() if isinstance(value, ShardTensor) else value
        for name in ("0.0", "0.2", "0.4", "0.7")
        for value in state["state"][name].values()
    ]


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("round_numel", [1 << 24, 100])
def test_bits_of_one_rank(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: torch.dtype,
    world_size: int,
    round_numel: int,
) -> None:
    """In one round and in several; state goes to and comes from an optimizer without ranks."""
    monkeypatch.setattr(_routes, "_ROUND_NUMEL", round_numel)
    fulls, steps = data(dtype)
    early, before = take_steps(KINDS[kind], fulls, steps[:2])
    late, after = take_steps(KINDS[kind], fulls, steps)
    middle = [p.detach().clone() for p in early]

    def rank(comm: Comm) -> list[torch.Tensor]:
        params, _ = take_steps(lambda p: KINDS[kind](p, comm=comm), fulls, steps[:2])
        assert all(torch.equal(a, b) for a, b in zip(params, middle, strict=True))

        def resumed(params: Any) -> Any:
            optimizer = KINDS[kind](params, comm=comm)
            optimizer.load_state_dict(before.state_dict())
            return optimizer

        params, optimizer = take_steps(resumed, middle, steps[2:])
        return [*(p.detach() for p in params), *owned(optimizer.state_dict())]

    expected = [*(p.detach() for p in late), *owned(after.state_dict())]
    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_one_collective_and_state_with_owners(kind: str) -> None:
    """Four like matrices over two ranks: two each; half of the matrices' elements per slice."""
    ones = [torch.ones(8, 4)] * 4

    def rank(comm: Comm) -> tuple[list[int], list[int]]:
        recorded = Recorded(comm)
        _, optimizer = take_steps(lambda p: KINDS[kind](p, comm=recorded), ones, [ones])
        assert set(recorded.records) == {"all_reduce", "all_gather"}
        # Where state is on disk, also whether it was all there.
        assert recorded.records["all_reduce"].calls == (2 if kind.endswith("disk") else 1)
        record = recorded.records["all_gather"]
        states = optimizer.state_dict()["state"].values()
        held = [sum(v.local.numel() for k, v in own.items() if k != "step") for own in states]
        return [record.calls, record.payload_bytes], held

    (sent, first), (_, second) = run_threads(rank, 2)
    assert sent == [1, 4 * 32 * (2 if kind.startswith("muon") else 4)]
    assert sorted(map(min, first, second)) == [0] * 4
    assert len({a + b for a, b in zip(first, second, strict=True)}) == 1
    assert sorted(first) == sorted(second)
    assert sorted(first)[:2] == [0, 0]


@kinds
def test_beside_sharded_parameters(
    make_params: MakeParams, give_grads: GiveGrads, kind: str
) -> None:
    """One optimizer has both, of two comms."""
    fulls, steps = data(torch.float32)
    expected, _ = take_steps(KINDS[kind], fulls, steps)

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls[:4])
        params = [*sharded, *(nn.Parameter(full.clone()) for full in fulls[4:])]
        optimizer = KINDS[kind](params, comm=Recorded(comm))
        for grads in steps:
            give_grads(params, grads)
            optimizer.step()
        return [p.full_tensor() if isinstance(p, ShardTensor) else p.detach() for p in params]

    for found in run_threads(rank, 3):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_a_gradient_on_some_ranks_only(kind: str) -> None:
    def rank(comm: Comm) -> None:
        first, second = (nn.Parameter(torch.ones(4, 4)) for _ in "ab")
        first.grad = torch.ones(4, 4)
        if comm.rank == 1:
            second.grad = torch.ones(4, 4)
        optimizer = KINDS[kind]([("a", first), ("b", second)], comm=comm)
        with pytest.raises(ValueError, match=r"^b: expected a gradient on all ranks or on none"):
            optimizer.step()
        second.grad = torch.ones(4, 4).to_sparse() if comm.rank == 1 else torch.ones(4, 4)
        refused = "b: expected a dense gradient" if comm.rank == 1 else "another rank refused"
        with pytest.raises(ValueError, match=f"^{refused}"):
            optimizer.step()
        assert first.eq(1).all()

    run_threads(rank, 2)


@kinds
def test_state_for_other_ranks(kind: str) -> None:
    """Pieces are refused where there are no ranks, or others."""

    def fresh() -> list[nn.Parameter]:
        return [nn.Parameter(torch.ones(4, 4)) for _ in "abc"]

    def rank(comm: Comm) -> Any:
        return KINDS[kind](fresh(), comm=comm).state_dict(allocate=True)

    halves, thirds = run_threads(rank, 2)[0], run_threads(rank, 3)[0]
    alone = KINDS[kind](fresh())
    with pytest.raises(ValueError, match=r"^0\.\d: \w+ is a piece .* of another sharding"):
        alone.load_state_dict(halves)

    def load(comm: Comm) -> None:
        with pytest.raises(ValueError, match=r"^0\.\d: \w+ is a piece .* of another sharding"):
            KINDS[kind](fresh(), comm=comm).load_state_dict(thirds)

    run_threads(load, 2)


def test_copies() -> None:
    def rank(comm: Comm) -> None:
        optimizer = Muon([nn.Parameter(torch.ones(2, 2))], comm=comm)
        with pytest.raises(TypeError, match=r"^this Muon holds a communicator"):
            copy.deepcopy(optimizer)

    run_threads(rank, 2)
    copy.deepcopy(Muon([nn.Parameter(torch.ones(2, 2))], comm=None))


def over_gloo(comm: Comm) -> list[list[float]]:
    """Train under DistributedDataParallel; with one rank, on its own."""
    found = []
    for build in KINDS.values():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        wrapped = model if comm.size == 1 else DistributedDataParallel(model)
        optimizer = build(model.named_parameters(), comm=comm)
        for _ in range(4):
            optimizer.zero_grad()
            wrapped(torch.linspace(-1, 1, 24).view(4, 6)).square().sum().backward()
            optimizer.step()
        found.append([float(p.detach().double().sum()) for p in model.parameters()])
    return found


def test_under_distributed_data_parallel() -> None:
    """Both ranks see the same batch, so that gradients are those of one."""
    alone = over_gloo(comm_for())
    assert run_ranks(over_gloo, 2) == [alone] * 2
