"""What matrix optimizers send for a decoder, who works on what, and what travels meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, PlanComm, Recorded, Slices, Work
from shard_flat import ParamSpec, ShardTensor, plan_layout, shard_tensor
from shard_optim import SOAP, Muon, Shampoo, _routes
from shard_optim._homes import Home
from shard_optim._workshop import Matrix, Workshop
from shard_testing import run_threads

KINDS: dict[str, Callable[..., Any]] = {"muon": Muon, "soap": SOAP, "shampoo": Shampoo}
WIDTH = 32
BLOCK: list[tuple[int, ...]] = [
    (WIDTH,),
    (3 * WIDTH, WIDTH),
    (WIDTH, WIDTH),
    (WIDTH,),
    (4 * WIDTH, WIDTH),
    (WIDTH, 4 * WIDTH),
]


def sharded(comm: Comm, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Twelve blocks of a decoder with gradients, one layout per block as a runtime makes them."""
    params: list[torch.Tensor] = []
    for block in range(12):
        specs = [ParamSpec(f"{block}.{i}", s, dtype) for i, s in enumerate(BLOCK)]
        layout = plan_layout(specs, comm.size)
        for index, piece in enumerate(layout.pieces(comm.rank)):
            spec = layout.shard_spec(comm.rank, index)
            local = torch.ones(piece.numel, dtype=dtype)
            param = nn.Parameter(ShardTensor(local, spec, comm=comm))
            assert isinstance(param, ShardTensor)
            param.grad = param.like(torch.ones_like(local))
            params.append(param)
    return params


def replicated(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(12) for shape in BLOCK]
    for param in params:
        param.grad = torch.ones_like(param)
    return list(params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_sharded_decoder(kind: str, dtype: torch.dtype, world_size: int) -> None:
    """All ranks together send what is not with its owner, once there and once back."""
    sent, held = 0, 12 * 12 * WIDTH * WIDTH * dtype.itemsize
    for rank in range(0, world_size, max(world_size // 8, 1)):  # some of very many
        comm = PlanComm(world_size, rank, "cpu")
        optimizer = KINDS[kind](sharded(comm, dtype))
        optimizer.step()
        sent += comm.records["all_to_all"].payload_bytes
        assert comm.records["all_to_all"].calls == 2
        assert comm.records["all_reduce"].calls == 1
    assert 0 < sent <= 2 * held
    if world_size <= 8:
        (loads,) = optimizer._workshop.loads.values()
        assert max(loads) <= 1.2 * sum(loads) / world_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_replicated_decoder(kind: str, world_size: int) -> None:
    """Each rank receives all results, with some padding."""
    comm = PlanComm(world_size, 1, "cpu")
    optimizer = KINDS[kind](replicated(), comm=comm)
    optimizer.step()
    held = 12 * 12 * WIDTH * WIDTH * (2 if kind == "muon" else 4)
    record = comm.records["all_gather"]
    assert record.calls == 1
    assert held <= record.payload_bytes <= 1.5 * held
    (loads,) = optimizer._workshop.loads.values()
    assert len(loads) == world_size
    assert max(loads) <= 1.2 * sum(loads) / world_size


class Logged(Recorded):
    """Notes when exchanges are launched and waited for."""

    def __init__(self, inner: Comm, log: list[str]) -> None:
        super().__init__(inner)
        self.log = log
        self.count = 0

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        return self._noted(super()._all_to_all_by(slices, out, inp, timeout_s))

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._noted(super()._all_gather(out, inp, timeout_s))

    def _noted(self, work: Work) -> Work:
        number, self.count = self.count, self.count + 1
        self.log.append(f"launch {number}")

        def finish() -> None:
            self.log.append(f"wait {number}")
            work.wait()

        return Work(finish)


def log_of(monkeypatch: pytest.MonkeyPatch, *, is_cut: bool) -> list[str]:
    """What each of two ranks does for six like matrices, of which it owns three, one per round."""
    monkeypatch.setattr(_routes, "_ROUND_NUMEL", 1)

    def rank(comm: Comm) -> list[str]:
        log: list[str] = []
        logged = Logged(comm, log)
        ones = [torch.ones(4, 4) for _ in range(6)]
        params = [shard_tensor(one, comm=logged, name="w") if is_cut else one for one in ones]

        def solve(whole: torch.Tensor, state: Sequence[torch.Tensor]) -> torch.Tensor:
            log.append("solve")
            return whole + 1

        def apply(result: torch.Tensor) -> None:
            assert result.eq(2).all()

        matrices = [
            Matrix(
                param=param,
                piece=(param.local if isinstance(param, ShardTensor) else param).view(-1),
                cost=1.0,
                solve=solve,
                apply=apply,
                comm=logged,
                owner=index % 2,
            )
            for index, param in enumerate(params)
        ]
        Workshop().work_off(matrices, Home())
        return log

    logs: list[list[str]] = run_threads(rank, 2)
    assert logs[0] == logs[1]
    return logs[0]


def test_matrices_travel_while_others_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """There: 0, 1 and 3; back: 2, 4 and 5."""
    assert log_of(monkeypatch, is_cut=True) == [
        "launch 0",
        "launch 1",  # travels while the first one is worked on
        *("wait 0", "solve", "launch 2"),
        "launch 3",
        *("wait 1", "solve", "launch 4"),
        "wait 2",  # has travelled back while the second one was worked on
        *("wait 3", "solve", "launch 5"),
        "wait 4",
        "wait 5",
    ]


def test_results_travel_while_others_are_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_of(monkeypatch, is_cut=False) == [
        *("solve", "launch 0"),
        *("solve", "launch 1", "wait 0"),
        *("solve", "launch 2", "wait 1"),
        "wait 2",
    ]
