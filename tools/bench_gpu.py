"""Time and weigh a 1B-parameter decoder on one CUDA device: bare, ours, torch's FSDP2.

    python tools/bench_gpu.py [--layers N] [--steps N] [--json PATH]

bf16 parameters, activation checkpointing of each block, fused AdamW, one rank, each model alone
on the device. Then a trace of one step of ours is searched for full-size copies.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from _bench import make_parser, print_table, write_json
from shard_fsdp import fully_shard
from shard_optim import AdamW
from shard_testing import DecoderBlock, TinyDecoder
from shard_wrap import by_class

VOCAB, WIDTH, HEADS, BATCH, TOKENS = 32_000, 2048, 16, 4, 2048
NO_DEVICE = 3


@dataclass(frozen=True)
class Row:
    """One model's figures.

    Attributes:
        name: which model.
        step_ms: median time of a step after warm-up.
        peak_gib: most memory allocated during a step.
        peak_grew_bytes: peak of the last steps beyond that of the first ones after warm-up.
    """

    name: str
    step_ms: float
    peak_gib: float
    peak_grew_bytes: int


class CheckpointedBlock(DecoderBlock):
    """A block that keeps its input only and runs its forward again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


def make_model(layers: int) -> TinyDecoder:
    """Return the decoder on the device in bf16, with checkpointed blocks."""
    with torch.device("cuda"):
        model = TinyDecoder(8, WIDTH, 0, HEADS)
        model.embed = nn.Embedding(VOCAB, WIDTH)
        model.head = nn.Linear(WIDTH, VOCAB, bias=False)
        model.blocks = nn.ModuleList(CheckpointedBlock(WIDTH, HEADS) for _ in range(layers))
    return model.to(torch.bfloat16)


def bare(model: TinyDecoder) -> torch.optim.Optimizer:
    """Leave the model as it is."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def ours(model: TinyDecoder) -> torch.optim.Optimizer:
    """Shard it with this library."""
    fully_shard(model, policy=by_class(CheckpointedBlock))
    return AdamW(model.parameters(), lr=1e-4)


def theirs(model: TinyDecoder) -> torch.optim.Optimizer:
    """Shard it with torch's FSDP2."""
    for block in model.blocks:
        torch_fully_shard(block)
    torch_fully_shard(model)
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure(
    name: str, wrap: Callable[[TinyDecoder], torch.optim.Optimizer], layers: int, steps: int
) -> Row:
    """Train one model alone on the device."""
    model = make_model(layers)
    optimizer = wrap(model)
    tokens = torch.randint(0, VOCAB, (BATCH, TOKENS + 1), device="cuda")
    times, peaks = [], []
    for _ in range(3 + steps):
        torch.cuda.reset_peak_memory_stats()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        one_step(model, optimizer, tokens)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
        peaks.append(torch.cuda.max_memory_allocated())
    del model, optimizer
    gc.collect()
    torch.cuda.empty_cache()
    return Row(name, statistics.median(times[3:]), max(peaks[3:]) / 2**30, peaks[-1] - peaks[3])


def one_step(model: Any, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """Forward, backward, update."""
    model.loss(tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def full_size_copies(layers: int) -> list[str]:
    """Return the names of copying operators that move as much as a block's smallest matrix."""
    model = make_model(layers)
    optimizer = ours(model)
    tokens = torch.randint(0, VOCAB, (1, 17), device="cuda")  # activations are small
    one_step(model, optimizer, tokens)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as p:
        one_step(model, optimizer, tokens)
        torch.cuda.synchronize()
    found = []
    for event in p.events() or []:
        shapes = [s for s in event.input_shapes or [] if s]
        numel = max((_product(s) for s in shapes), default=0)
        if event.name in ("aten::copy_", "aten::cat", "aten::clone") and numel >= WIDTH * WIDTH:
            found.append(f"{event.name} of {shapes}")
    return found


def _product(shape: list[int]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a promise does not hold, 3 without a device."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return NO_DEVICE
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        rows = [
            measure(name, wrap, arguments.layers, arguments.steps)
            for name, wrap in (("bare", bare), ("shard_fsdp", ours), ("torch FSDP2", theirs))
        ]
        copies = full_size_copies(2)
        dist.destroy_process_group()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {arguments.steps} steps")
    lines = [["model", "step ms", "to bare", "peak GiB", "grew B"]]
    for row in rows:
        ratio = row.step_ms / rows[0].step_ms
        shown = f"{row.step_ms:.1f}", f"{ratio:.3f}", f"{row.peak_gib:.2f}"
        lines.append([row.name, *shown, str(row.peak_grew_bytes)])
    print_table(lines)
    print(f"full-size copies in a step of ours: {len(copies)}")
    for copied in copies:
        print(f"  {copied}")
    figures = {"rows": [asdict(row) for row in rows], "full_size_copies": copies}
    write_json(arguments.json, figures)
    mine = rows[1]
    return 0 if mine.peak_grew_bytes == 0 and not copies else 1


if __name__ == "__main__":
    sys.exit(main())
