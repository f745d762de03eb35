"""Bytes of state on each rank, and bytes that a step takes besides, against every docstring."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shard_comm import Comm
from shard_flat import ShardTensor, shard_tensor
from shard_optim import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Shampoo,
    ShardedOptimizer,
    _window,
)
from shard_testing import run_ranks, run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

WINDOW_NUMEL = 1 << 12  # smaller ones than usual, so that small parameters have many
WINDOW_BYTES = 4 * WINDOW_NUMEL
SHAPES: list[tuple[int, ...]] = [(96, 64), (300,), (64, 64), (5000,), (), (7, 3)]
worlds = pytest.mark.parametrize("world_size", [1, 2, 4])


def each(per_element: int) -> Callable[[Any, Any], int]:
    """So many bytes for each element of a piece."""

    def nbytes(optimizer: Any, param: Any) -> int:
        held: int = per_element * _local(param).numel()
        return held

    return nbytes


def coded(optimizer: Any, param: Any) -> int:
    """Two bytes per element, and two scales for each block of 256 that begins in the piece."""
    if param.numel() < 4096:
        return int(2 * _local(param).nbytes)
    start, stop = param.spec.start, param.spec.stop
    return int(2 * (stop - start) + 8 * (-(-stop // 256) - -(-start // 256)))


def rows_and_columns(optimizer: Any, param: Any) -> int:
    """One number per row and per column, whole on every rank."""
    return 4 * (sum(param.shape) if param.ndim > 1 else _local(param).numel())


def momentum_or_moments(optimizer: Any, param: Any) -> int:
    return (1 if param.ndim == 2 else 2) * _local(param).nbytes


def owned(optimizer: Any, param: Any) -> int:
    """Two moments and two squares of each side, with one rank; two moments of what is no matrix."""
    if param.ndim != 2:
        return 2 * _local(param).nbytes
    if not _local(optimizer.state[param]["exp_avg"]).numel():
        return 0
    rows, columns = param.shape
    numel: int = rows * columns + rows**2 + columns**2
    return 4 * 2 * numel


Kind = tuple[Callable[[Any], Any], torch.dtype, Callable[[Any, Any], int]]
KINDS: dict[str, Kind] = {
    "sgd": (SGD, torch.float32, each(0)),
    "momentum": (lambda p: SGD(p, momentum=0.9), torch.float32, each(4)),
    "adam": (Adam, torch.float32, each(8)),
    "adamw": (AdamW, torch.float32, each(8)),
    "adamw, bfloat16": (AdamW, torch.bfloat16, each(4)),
    "adamw, disk": (lambda p: AdamW(p, offload="disk"), torch.float32, each(8)),
    "kahan": (lambda p: AdamW(p, rounding="kahan"), torch.bfloat16, each(6)),
    "stochastic": (lambda p: AdamW(p, rounding="stochastic"), torch.bfloat16, each(4)),
    "lion": (Lion, torch.float32, each(4)),
    "lion, bfloat16": (Lion, torch.bfloat16, each(2)),
    "adamw8bit": (AdamW8bit, torch.float32, coded),
    "adafactor": (Adafactor, torch.float32, rows_and_columns),
    "muon": (Muon, torch.float32, momentum_or_moments),
    "soap": (SOAP, torch.float32, owned),
    "shampoo": (Shampoo, torch.float32, owned),
    "adamw8bit, disk": (lambda p: AdamW8bit(p, offload="disk"), torch.float32, coded),
    "adafactor, disk": (lambda p: Adafactor(p, offload="disk"), torch.float32, rows_and_columns),
    "muon, disk": (lambda p: Muon(p, offload="disk"), torch.float32, momentum_or_moments),
    "soap, disk": (lambda p: SOAP(p, offload="disk"), torch.float32, owned),
    "shampoo, disk": (lambda p: Shampoo(p, offload="disk"), torch.float32, owned),
}
MATRICES = ("muon", "soap", "shampoo", "muon, disk", "soap, disk", "shampoo, disk")


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.local if isinstance(tensor, ShardTensor) else tensor


def _held(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Bytes of tensors, and of the memory that they lie in."""
    pieces = [_local(t) for t in tensors]
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in pieces}
    storages.pop(0, None)
    return sum(piece.nbytes for piece in pieces), sum(storages.values())


@worlds
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_what_the_docstring_says(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    """On each rank to the byte; over all ranks that of one, but for what every rank has whole."""
    make, dtype, wanted = KINDS[kind]

    def rank(comm: Comm) -> int:
        params = make_params(comm, [torch.ones(shape, dtype=dtype) for shape in SHAPES])
        optimizer = make(params)
        for _ in range(2):
            give_grads(params, [torch.ones(shape, dtype=dtype) for shape in SHAPES])
            optimizer.step()
        slots = [v for own in optimizer.state.values() for k, v in own.items() if k != "step"]
        held, allocated = _held(slots)
        assert held == allocated == sum(wanted(optimizer, param) for param in params)
        steps = [own["step"] for own in optimizer.state.values()]
        assert _held(steps) == (4 * len(SHAPES), 4 * len(SHAPES))
        return held

    total = sum(run_threads(rank, world_size))
    if not kind.startswith("adafactor"):
        (alone,) = run_threads(rank, 1)
        assert total == alone


@worlds
def test_state_of_replicated_parameters(world_size: int) -> None:
    numel = sum(math.prod(shape) for shape in SHAPES)

    def rank(comm: Comm) -> tuple[int, int]:
        params = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = ShardedOptimizer(params, torch.optim.AdamW, comm=comm, fused=True)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        slots = [v for own in optimizer.state.values() for k, v in own.items() if k != "step"]
        held, allocated = _held(slots)
        assert held == allocated
        assert held <= 8 * (numel // world_size + 16 * len(SHAPES))
        return held, sum(param.numel() for param in params)

    found = run_threads(rank, world_size)
    assert sum(held for held, _ in found) == 8 * numel


@worlds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages(make_params: MakeParams, dtype: torch.dtype, world_size: int) -> None:
    """In float32, also those of bfloat16."""

    def rank(comm: Comm) -> int:
        params = make_params(comm, [torch.ones(shape, dtype=dtype) for shape in SHAPES])
        average = EMA(params, 0.9)
        average.update()
        held, allocated = _held(average.state_dict()["averages"].values())
        numel = sum(param.local.numel() for param in params)
        assert held == allocated == 4 * numel
        return 4 * numel

    total = sum(run_threads(rank, world_size))
    assert total == 4 * sum(math.prod(shape) for shape in SHAPES)


# --- what a step takes besides ---


def _peaks(calls: dict[str, Callable[[], Any]]) -> dict[str, int]:
    """The most that torch's allocator had given out during each call and not got back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for name, call in calls.items():
            with record_function(f"peak of {name}"):
                call()
    assert found.profiler is not None
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events}
    moves = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]

    def peak(begin: int, end: int) -> int:
        most: int = max(accumulate((n for at, n in moves if begin <= at <= end), initial=0))
        return most

    return {name: peak(*spans[f"peak of {name}"]) for name in calls}


# Windows that one step has at the same time, at most, and rows of 640 elements on each rank: more
# than the windows hold, so that a copy of what is updated would be found out.
WINDOWS = {
    "sgd": (0, 128),
    "momentum": (0, 128),
    "adam": (0, 128),
    "adamw": (0, 128),
    "adamw, bfloat16": (0, 128),
    "adamw, disk": (0, 128),
    "kahan": (8, 128),
    "stochastic": (9, 128),
    "lion": (4, 128),
    "lion, bfloat16": (8, 128),
    "adamw8bit": (4 * 8, 256),
    "adafactor": (9, 512),
    "adamw8bit, disk": (4 * 8, 256),
    "adafactor, disk": (9, 512),
}
SLACK_BYTES = 1 << 13  # tails, flags, numbers of one parameter each
SIDES = (512, 256)


def _sharded(comm: Comm, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Any]:
    params = []
    for index, shape in enumerate(shapes):
        whole = torch.ones(shape, dtype=dtype)
        param = nn.Parameter(shard_tensor(whole, comm=comm, name=f"p{index}"))
        param.grad = torch.ones_like(param)
        params.append(param)
    return params


def _measure(comm: Comm) -> dict[str, int]:
    """Peaks of the second step of every kind, of matrices the third."""
    _window._WINDOW["cpu"] = WINDOW_NUMEL
    calls: dict[str, Callable[[], Any]] = {}
    for kind, (_, rows) in WINDOWS.items():
        make, dtype, _ = KINDS[kind]
        optimizer = make(_sharded(comm, [(rows * comm.size, 640), (700,), (5,)], dtype))
        optimizer.step()
        calls[kind] = optimizer.step
    matrices = _sharded(comm, [SIDES] * 4, torch.float32)
    for kind in MATRICES:
        optimizer = KINDS[kind][0](matrices)
        optimizer.step()
        optimizer.step()
        calls[kind] = optimizer.step
    return _peaks(calls)


@worlds
def test_a_step_takes_no_more_than_the_docstring_says(world_size: int) -> None:
    matrix = math.prod(SIDES)
    pieces = owned_here = 4 * matrix // world_size
    # What there is of pieces, what travels both ways, and the matrix at hand; in SOAP's squares.
    at_most = {
        "muon": 2 * (pieces + 4 * owned_here) + 2 * 6 * matrix,
        "soap": 4 * (pieces + 4 * owned_here) + 4 * 6 * max(SIDES) ** 2,
        "shampoo": 4 * (pieces + 4 * owned_here) + 4 * 6 * max(SIDES) ** 2,
    }
    at_most.update({f"{kind}, disk": nbytes for kind, nbytes in at_most.items()})
    for kind, (windows, rows) in WINDOWS.items():
        at_most[kind] = windows * WINDOW_BYTES
        if kind.startswith(
            "adafactor"
        ):  # what squares are added up in; sums by row and by column, packed
            at_most[kind] += (1 << 20) + 3 * 8 * (rows * world_size + 640)
        assert at_most[kind] < 4 * rows * 640
    for found in run_ranks(_measure, world_size):
        assert {k: n for k, n in found.items() if n > at_most[k] + SLACK_BYTES} == {}
        assert found["lion"] > WINDOW_BYTES  # what is measured is not nothing
