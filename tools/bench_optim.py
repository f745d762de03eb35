"""Time optimizers and clipping on sharded parameters against torch, in one run.

    python tools/bench_optim.py [--numel N] [--tiny N] [--kinds N] [--rounds N] [--json PATH]

Two ranks are two processes over Gloo with one thread each. Ours and the reference take turns in
every round; a round lasts as long as its slower rank, and the ratio is the median over rounds.
The large rows work on the same memory on both sides, since where pages happen to lie makes a
difference of a tenth by itself.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from _bench import Row, make_parser, report, row_of
from shard_comm import Comm, PlanComm
from shard_flat import ParamSpec, Shadow, ShardTensor, plan_layout
from shard_optim import (
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Offload,
    Shampoo,
    ShardedOptimizer,
    clip_grad_norm_,
)
from shard_testing import run_ranks

_WORLD_SIZE = 2
_TINY_NUMEL = 64
_HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def sharded_params(comm: Comm, shapes: Sequence[tuple[int, ...]]) -> list[ShardTensor]:
    """Return parameters with gradients, both views of one flat buffer, as a runtime makes them."""
    specs = [ParamSpec(f"p{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    layout = plan_layout(specs, comm.size)
    shard, grads = torch.randn(layout.shard_numel), torch.randn(layout.shard_numel)
    params: list[ShardTensor] = []
    for index, piece in enumerate(layout.pieces(comm.rank)):
        own = slice(piece.offset, piece.offset + piece.numel)
        spec = layout.shard_spec(comm.rank, index)
        param = nn.Parameter(ShardTensor(shard[own], spec, comm=comm))
        assert isinstance(param, ShardTensor)
        param.grad = param.like(grads[own])
        params.append(param)
    return params


def model_shapes(numel: int) -> list[tuple[int, ...]]:
    """Return shapes like those of a decoder: matrices and vectors, ``numel`` elements in all."""
    width = 512
    block = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
    per_block = sum(rows * columns for rows, columns in block) + 2 * width
    blocks, rest = divmod(numel, per_block)
    return [*[*block, (width,), (width,)] * blocks, (rest,)]


def compare(
    comm: Comm, ours: Callable[[], Any], reference: Callable[[], Any], rounds: int
) -> tuple[list[float], list[float]]:
    """Return milliseconds per round of the slower rank, after two rounds that do not count."""
    times_ms: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 2):
        for call, own in zip((ours, reference), times_ms, strict=True):
            comm.barrier()
            began = time.perf_counter()
            call()
            own.append(1e3 * (time.perf_counter() - began))
    everyone = comm.all_gather_object(times_ms)
    slowest = [
        [max(each) for each in zip(*side, strict=True)] for side in zip(*everyone, strict=True)
    ]
    return slowest[0][2:], slowest[1][2:]


def bench_rank(comm: Comm, numel: int, tiny: int, kinds: int, rounds: int) -> list[Row]:
    """Measure every row on this rank. Collective."""
    return [
        *bench_large(comm, numel, rounds),
        bench_copy(comm, numel, rounds),
        *bench_tiny(comm, tiny, rounds),
        *bench_kinds(comm, kinds, rounds),
        bench_replicated(comm, kinds, rounds),
        bench_offload(comm, AdamW, numel, rounds),
        bench_offload(comm, AdamW8bit, kinds, rounds),
    ]


def flat_twin(params: Sequence[ShardTensor], ours: AdamW) -> tuple[nn.Parameter, torch.optim.AdamW]:
    """Return all pieces as one plain parameter, and torch's optimizer for it, in our memory."""
    ours.step()  # makes the moments
    numel = sum(param.local.numel() for param in params)
    held = [param for param in params if param.local.numel()]
    first = min(held, key=lambda param: param.local.data_ptr())

    def whole(piece: torch.Tensor) -> torch.Tensor:
        assert isinstance(piece, ShardTensor)
        return piece.local.as_strided((numel,), (1,))

    assert first.grad is not None
    flat = nn.Parameter(whole(first.detach()))
    flat.grad = whole(first.grad)
    theirs = torch.optim.AdamW([flat], fused=True, **_HYPER)
    moments = {slot: whole(ours.state[first][slot]) for slot in ("exp_avg", "exp_avg_sq")}
    theirs.state[flat] = {"step": torch.ones(()), **moments}
    return flat, theirs


def bench_large(comm: Comm, numel: int, rounds: int) -> list[Row]:
    """Compare with torch on one flat tensor of the same bytes per rank."""
    params = sharded_params(comm, model_shapes(numel))
    total = sum(param.numel() for param in params)
    ours = AdamW(params, **_HYPER)
    flat, theirs = flat_twin(params, ours)
    what = f"{total / 1e6:.0f}M elements on {comm.size} ranks, ms"
    stepped = compare(comm, ours.step, theirs.step, rounds)
    clipped = compare(
        comm,
        lambda: clip_grad_norm_(params, 1e9),
        lambda: torch.nn.utils.clip_grad_norm_([flat], 1e9),
        rounds,
    )
    return [
        row_of(f"AdamW, {what}", "torch fused, one flat tensor", *stepped, target=1.05),
        row_of(f"clip, {what}", "torch, one flat tensor, float32, local", *clipped),
    ]


def bench_copy(comm: Comm, numel: int, rounds: int) -> Row:
    """Compare a step that also writes a bfloat16 copy with a step and a pass over its result."""
    params = sharded_params(comm, model_shapes(numel))
    first = params[0].piece
    shard = first.as_strided((first.untyped_storage().nbytes() // first.itemsize,), (1,), 0)
    copy = torch.empty_like(shard, dtype=torch.bfloat16)
    optimizer = AdamW(params, **_HYPER)
    shadow = Shadow(shard)
    shadow.attach(copy, lambda: True)

    def ours() -> None:
        shadow.settle()
        optimizer.step()

    def theirs() -> None:
        shadow.spoil()
        optimizer.step()
        copy.copy_(shard)

    name = f"AdamW and a copy in bfloat16, {numel / 1e6:.0f}M elements on {comm.size} ranks, ms"
    return row_of(name, "the step, then the copy", *compare(comm, ours, theirs, rounds))


def bench_tiny(comm: Comm, count: int, rounds: int) -> list[Row]:
    """Compare with torch on the DTensors of its own fully_shard."""
    params = sharded_params(comm, [(_TINY_NUMEL,)] * count)
    mesh = init_device_mesh("cpu", (comm.size,))
    module = nn.ParameterList([nn.Parameter(torch.randn(_TINY_NUMEL)) for _ in range(count)])
    holder = nn.Module()
    holder.tiny = module
    fully_shard(holder, mesh=mesh)
    dtensors = list(holder.parameters())
    for dtensor in dtensors:
        dtensor.grad = torch.ones_like(dtensor)
    ours, theirs = AdamW(params, **_HYPER), torch.optim.AdamW(dtensors, fused=True, **_HYPER)
    what = f"{count} parameters of {_TINY_NUMEL}, ms"
    stepped = compare(comm, ours.step, theirs.step, rounds)
    clipped = compare(
        comm,
        lambda: clip_grad_norm_(params, 1e9),
        lambda: torch.nn.utils.clip_grad_norm_(dtensors, 1e9),
        rounds,
    )
    return [
        row_of(f"AdamW, {what}", "torch fused, DTensors", *stepped, target=0.25),
        row_of(f"clip, {what}", "torch, DTensors", *clipped),
    ]


def bench_kinds(comm: Comm, numel: int, rounds: int) -> list[Row]:
    """Compare the other optimizers with torch's fused one on one flat tensor of the same bytes."""
    params = sharded_params(comm, model_shapes(numel))
    flat = nn.Parameter(torch.cat([param.local for param in params]).detach())
    flat.grad = torch.ones_like(flat)
    adamw = torch.optim.AdamW([flat], fused=True, **_HYPER)
    momentum: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
    pairs = [
        ("SGD", SGD(params, **momentum), torch.optim.SGD([flat], fused=True, **momentum)),
        ("Adam", Adam(params), torch.optim.Adam([flat], fused=True)),
        ("Lion", Lion(params), adamw),
        ("AdamW8bit", AdamW8bit(params), adamw),
        ("Adafactor", Adafactor(params), torch.optim.Adafactor([flat])),
    ]
    what = f"{numel / 1e6:.0f}M elements on {comm.size} ranks, ms"
    return [
        row_of(
            f"{name}, {what}",
            f"torch {type(theirs).__name__}, one flat tensor",
            *compare(comm, ours.step, theirs.step, rounds),
        )
        for name, ours, theirs in pairs
    ]


def bench_replicated(comm: Comm, numel: int, rounds: int) -> Row:
    """Compare ZeRO-1 and its gather with the step on whole parameters that every rank takes."""
    shapes = model_shapes(numel)
    ours, theirs = ([nn.Parameter(torch.randn(s)) for s in shapes] for _ in range(2))
    for param in (*ours, *theirs):
        param.grad = torch.ones_like(param)
    sharded = ShardedOptimizer(ours, AdamW, comm=comm, **_HYPER)
    whole = torch.optim.AdamW(theirs, fused=True, **_HYPER)
    name = f"ShardedOptimizer of AdamW, {numel / 1e6:.0f}M elements on {comm.size} ranks, ms"
    times = compare(comm, sharded.step, whole.step, rounds)
    return row_of(name, "torch fused, whole on every rank", *times)


def bench_offload(comm: Comm, kind: Any, numel: int, rounds: int) -> Row:
    """Compare state on disk, in the file cache where there is room, with state in memory."""
    here, away = (sharded_params(comm, model_shapes(numel)) for _ in range(2))
    ours, theirs = kind(away, offload=Offload("disk"), **_HYPER), kind(here, **_HYPER)
    name = f"{kind.__name__}, state on disk, {numel / 1e6:.0f}M elements on {comm.size} ranks, ms"
    times = compare(comm, ours.step, theirs.step, rounds)
    return row_of(name, f"{kind.__name__}, state in memory", *times)


def count_matrices() -> list[Row]:
    """Count what optimizers of matrices send for a decoder of 12 blocks, and who works on what.

    Ratios do not depend on the width. Each rank is counted by itself, as if the others were there.
    """
    kinds: dict[str, Any] = {"Muon": Muon, "SOAP": SOAP, "Shampoo": Shampoo}
    rows = []
    for name, kind in kinds.items():
        for size in (2, 4, 8):
            sent = held = 0
            for rank in range(size):
                comm = PlanComm(size, rank, "cpu")
                # A layout per block, as a runtime makes them.
                params = [p for _ in range(12) for p in sharded_params(comm, _BLOCK)]
                optimizer = kind(params)
                optimizer.step()
                sent += comm.records["all_to_all"].payload_bytes
                held = sum(p.numel() * p.dtype.itemsize for p in params if p.ndim == 2)
            (loads,) = optimizer._workshop.loads.values()
            what = f"{name}, {size} ranks"
            mean = sum(loads) / size
            rows += [
                row_of(f"{what}, bytes sent", "bytes of matrices", [sent], [held], target=2.0),
                row_of(f"{what}, largest load", "the mean", [max(loads)], [mean], target=1.2),
            ]
    return rows


_BLOCK: list[tuple[int, ...]] = [(64,), (192, 64), (64, 64), (64,), (256, 64), (64, 256)]


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; exit status 1 if a target is missed."""
    parser = make_parser(__doc__, rounds=21)
    parser.add_argument("--numel", type=int, default=69_000_000, help="elements of the large model")
    parser.add_argument("--tiny", type=int, default=2000, help="number of tiny parameters")
    parser.add_argument("--kinds", type=int, default=8_000_000, help="elements for other kinds")
    options = parser.parse_args(argv)
    arguments = (options.numel, options.tiny, options.kinds, options.rounds)
    if min(arguments) < 1:
        parser.error("--numel, --tiny, --kinds and --rounds must be at least 1")
    rows: list[Row] = run_ranks(bench_rank, _WORLD_SIZE, *arguments, timeout_s=1200)[0]
    return report([*rows, *count_matrices()], options.json)


if __name__ == "__main__":
    sys.exit(main())
