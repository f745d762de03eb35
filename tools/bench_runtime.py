"""Time and count what the runtime adds to a step, in one run.

    python tools/bench_runtime.py [--rounds N] [--json PATH]

One process, one rank, one thread for the times; two ranks as threads for the bytes. The bare
model, ours and torch's FSDP2 take turns in every round, and ratios are medians over rounds.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from _bench import Row, make_parser, report, row_of
from shard_comm import Comm, Recorded, SoloComm
from shard_fsdp import fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_threads, token_batches
from shard_wrap import by_class

UNITS = 64


class TinyUnit(nn.Module):
    """A unit whose own work is next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale and shift ``[batch, 8]``."""
        return x * self.weight + self.bias


def chain() -> nn.Sequential:
    """Return ``UNITS`` tiny units in a row."""
    return nn.Sequential(*(TinyUnit() for _ in range(UNITS)))


def step_s(model: nn.Module, run: Callable[[], torch.Tensor]) -> float:
    """Return the seconds of one forward and backward."""
    began = time.perf_counter()
    run().backward()
    took = time.perf_counter() - began
    for param in model.parameters():
        param.grad = None
    return took


def take_turns(models: list[nn.Module], x: torch.Tensor, rounds: int) -> list[list[float]]:
    """Return per model the seconds of each round, after three rounds that are not counted."""
    found: list[list[float]] = [[] for _ in models]
    for number in range(rounds + 3):
        for model, times in zip(models, found, strict=True):
            took = step_s(model, lambda model=model: model(x).sum())  # type: ignore[misc]
            if number >= 3:
                times.append(took)
    return found


def host_overhead(rounds: int) -> Row:
    """Microseconds per unit and step beyond the bare model, against torch's FSDP2."""
    bare, ours, theirs = chain(), chain(), chain()
    for unit in ours:
        fully_shard(unit, mesh=SoloComm())
    fully_shard(ours, mesh=SoloComm())
    for unit in theirs:
        torch_fully_shard(unit)
    torch_fully_shard(theirs)
    times = take_turns([bare, ours, theirs], torch.ones(4, 8), rounds)
    mine = [(b - a) / UNITS * 1e6 for a, b in zip(times[0], times[1], strict=True)]
    other = [(b - a) / UNITS * 1e6 for a, b in zip(times[0], times[2], strict=True)]
    name = "host overhead per unit and step, us"
    return row_of(name, "torch FSDP2", mine, other, target=0.5)


def one_rank_cost(rounds: int) -> Row:
    """Milliseconds of a step on one rank, against the bare model."""
    torch.manual_seed(0)
    bare, ours = (TinyDecoder(512, 256, 4, 4) for _ in range(2))
    fully_shard(ours, mesh=SoloComm(), policy=by_class(DecoderBlock))
    tokens = token_batches(1, 1, vocab=512, shape=(4, 128))[0][0]
    times = take_turns([bare, ours], tokens, rounds)
    bare_ms, ours_ms = ([1e3 * seconds for seconds in each] for each in times)
    return row_of("step on one rank, ms", "the bare model", ours_ms, bare_ms, target=1.02)


class Adapted(nn.Module):
    """A frozen bf16 matrix with a trainable fp32 low-rank addition, about 1 in 100 elements."""

    def __init__(self, width: int = 512, rank: int = 2) -> None:
        super().__init__()
        frozen = torch.ones(width, width, dtype=torch.bfloat16) / width
        self.frozen = nn.Parameter(frozen, requires_grad=False)
        self.down = nn.Parameter(torch.ones(rank, width) / width)
        self.up = nn.Parameter(torch.ones(width, rank) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, width]`` to the same shape."""
        added = (x @ self.down.t()) @ self.up.t()
        return (x.bfloat16() @ self.frozen.t()).float() + added


def _adapter_bytes(comm: Comm) -> tuple[int, int, int]:
    recorded = Recorded(comm)
    blocks = [Adapted() for _ in range(4)]
    for block in blocks:
        fully_shard(block, mesh=recorded)
    model = fully_shard(nn.Sequential(*blocks), mesh=recorded)
    recorded.reset()
    model(torch.ones(2, 512)).sum().backward()
    reduced = recorded.records["reduce_scatter"].payload_bytes
    held = sum(_local_bytes(p.grad) for p in model.parameters() if p.grad is not None)
    trainable = sum(p.numel() * p.itemsize for p in model.parameters() if p.requires_grad)
    return reduced, held * comm.size, trainable


def _local_bytes(grad: Any) -> int:
    nbytes: int = grad.to_local().nbytes
    return nbytes


def adapter_bytes() -> list[Row]:
    """Bytes reduced, and bytes of gradients held over all ranks, against the trainable ones."""
    reduced, held, trainable = run_threads(_adapter_bytes, 2)[0]
    return [
        row_of(f"LoRA: bytes {what}", "trainable bytes", [nbytes], [trainable], target=1.0)
        for what, nbytes in (("reduced", reduced), ("of gradients held", held))
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a target is missed."""
    arguments = make_parser(__doc__, rounds=30).parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [
            host_overhead(arguments.rounds),
            one_rank_cost(arguments.rounds),
            *adapter_bytes(),
        ]
        dist.destroy_process_group()
    print(f"torch {torch.__version__}, one thread, {arguments.rounds} rounds, medians")
    return report(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
