"""Train one GPT under ours and torch's own data parallelism on the CPUs of one host, in one run.

    python tools/bench_cpu.py [--ranks N] [--rounds N] [--json PATH] [--small]

Times: every rank is a process of one thread. All systems are built in the same processes and take
one step each in turn; a step takes as long as its slowest rank, and ratios are medians over
rounds. Memory: each system alone in fresh processes, the model built on the meta device; the
figure is the largest sum over ranks of the proportional set size in two steps, less that of the
same processes with torch loaded and nothing built.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from _bench import Row, make_parser, print_table, report, row_of
from shard_comm import Checked, Comm
from shard_fsdp import MixedPrecisionPolicy, fully_shard, materialize
from shard_optim import AdamW
from shard_testing import run_ranks
from shard_wrap import by_class


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a rank's batch."""

    vocab: int = 8192
    width: int = 768
    heads: int = 12
    blocks: int = 8
    tokens: int = 128


SMALL = Sizes(512, 128, 4, 4, 32)


class Block(nn.Module):
    """Attention and an MLP, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[batch, tokens, width]`` to the same shape."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A decoder with an embedding of its own on either side."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocab, sizes.width)
        self.place = nn.Embedding(sizes.tokens, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.blocks))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting ``tokens`` ``[batch, tokens]`` one further."""
        x = self.embed(tokens) + self.place.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.ndim > 1:
        tensor.normal_(std=0.02, generator=generator)
    else:
        tensor.fill_(float("norm" in name and name.endswith("weight")))


def _reset(module: nn.Module) -> None:
    for part in module.modules():
        reset: Any = getattr(part, "reset_parameters", None)
        if reset is not None:
            reset()


Step = Callable[[torch.Tensor], None]


def _step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(tokens).backward()
        optimizer.step()

    return step


def _ours(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    with torch.device("meta"):
        model = GPT(sizes)
    fully_shard(
        model, mesh=comm, policy=by_class(Block), mp_policy=policy or MixedPrecisionPolicy()
    )
    materialize(model, _fill)
    return _step(model, AdamW(model.parameters(), lr=1e-4))


def _checked(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    """Ours, while ranks compare what they call."""
    return _ours(Checked(comm.split(0)), sizes, bf16)


def _fsdp2(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    policy = TorchPolicy(torch.bfloat16, torch.float32) if bf16 else TorchPolicy()
    with torch.device("meta"):
        model = GPT(sizes)
    for block in model.blocks:
        torch_fully_shard(block, mp_policy=policy)
    torch_fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    _reset(model)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def _fsdp1(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    mixed = MixedPrecision(torch.bfloat16, torch.float32, torch.float32) if bf16 else None
    model = FullyShardedDataParallel(
        GPT(sizes),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=mixed,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def _ddp(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    model = DistributedDataParallel(GPT(sizes), gradient_as_bucket_view=True)
    return _step(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def _bare(comm: Comm, sizes: Sizes, bf16: bool) -> Step:
    """The model alone on each rank, which steps its share of the parameters."""
    model: Any = GPT(sizes).to(torch.bfloat16 if bf16 else torch.float32)
    flat = nn.Parameter(torch.zeros(sum(p.numel() for p in model.parameters()) // comm.size))
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.AdamW([flat], lr=1e-4, fused=True)

    def step(tokens: torch.Tensor) -> None:
        for param in model.parameters():
            param.grad = None
        model(tokens).backward()
        optimizer.step()

    return step


SYSTEMS: dict[str, tuple[Callable[[Comm, Sizes, bool], Step], bool]] = {
    "ours": (_ours, False),
    "checked": (_checked, False),
    "FSDP2": (_fsdp2, False),
    "FSDP1": (_fsdp1, False),
    "DDP": (_ddp, False),
    "bare": (_bare, False),
    "ours bf16": (_ours, True),
    "FSDP2 bf16": (_fsdp2, True),
    "bare bf16": (_bare, True),
}


def _batch(comm: Comm, sizes: Sizes) -> torch.Tensor:
    generator = torch.Generator().manual_seed(comm.rank)
    return torch.randint(sizes.vocab, (1, sizes.tokens), generator=generator)


def _time(comm: Comm, sizes: Sizes, rounds: int, names: list[str]) -> list[list[float]]:
    """Seconds of each round for each system; the first two rounds are not counted."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    steps = [SYSTEMS[name][0](comm, sizes, SYSTEMS[name][1]) for name in names]
    tokens = _batch(comm, sizes)
    found: list[list[float]] = [[] for _ in names]
    for number in range(rounds + 2):
        for step, times in zip(steps, found, strict=True):
            comm.barrier()
            began = time.perf_counter()
            step(tokens)
            if number >= 2:
                times.append(time.perf_counter() - began)
    return found


def _pss_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/smaps_rollup has no line of Pss")


class _Sampler(threading.Thread):
    """Looks at this process's proportional set size all the time, at equal moments on all ranks."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.stopped = threading.Event()
        self.samples: dict[int, int] = {}

    def run(self) -> None:
        while not self.stopped.wait(0.05 - time.time() % 0.05):
            self.samples[int(time.time() / 0.05)] = _pss_bytes()


def _hold(comm: Comm, sizes: Sizes, name: str) -> tuple[int, dict[int, int]]:
    """Bytes before anything is built, and at each moment of two steps."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    with torch.device("meta"):
        GPT(SMALL)  # torch loads its compiler at the first module made there
    comm.barrier()
    before = _pss_bytes()
    comm.barrier()
    make, bf16 = SYSTEMS[name]
    step, tokens = make(comm, sizes, bf16), _batch(comm, sizes)
    step(tokens)
    dist.barrier()
    sampler = _Sampler()
    sampler.start()
    step(tokens)
    step(tokens)
    sampler.stopped.set()
    sampler.join()
    dist.barrier()
    return before, sampler.samples


def peak_bytes(ranks: int, sizes: Sizes, name: str) -> int:
    """The largest sum over ranks in two steps, less what was there before."""
    found: list[tuple[int, dict[int, int]]]
    found = run_ranks(_hold, ranks, sizes, name, timeout_s=600)
    moments = set.intersection(*(set(samples) for _, samples in found))
    if not moments:
        raise RuntimeError("the steps were over before all ranks were looked at")
    most = max(sum(samples[moment] for _, samples in found) for moment in moments)
    return most - sum(before for before, _ in found)


def compare(times: dict[str, list[float]], ranks: int) -> list[Row]:
    """The ratios of steps that were taken."""

    def against(name: str, kind: str, target: float, *, faster: bool = True) -> Row:
        end = "" if kind == "fp32" else f" {kind}"
        ours, theirs = ([1e3 * s for s in times[f"{who}{end}"]] for who in ("ours", name))
        return row_of(f"step, {kind}, ms", name, ours, theirs, target=target, faster=faster)

    if ranks > (os.cpu_count() or 1):  # more ranks than processors: no slower is what is asked
        return [against("FSDP2", "fp32", 1.0), against("FSDP2", "bf16", 1.0)]
    checked, ours = ([1e3 * s for s in times[who]] for who in ("checked", "ours"))
    return [
        against("FSDP2", "fp32", 2.2),
        against("FSDP2", "bf16", 3.0),
        against("DDP", "fp32", 1.35),
        against("FSDP1", "fp32", 1.0),
        against("bare", "fp32", 1.10, faster=False),
        against("bare", "bf16", 1.10, faster=False),
        row_of("step, checked, ms", "ours", checked, ours, target=1.03, faster=False),
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the tables; exit status 1 if a target is missed."""
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="a small model, to try the script")
    parser.add_argument("--no-memory", action="store_true", help="only the times")
    arguments = parser.parse_args(argv)
    sizes, names = SMALL if arguments.small else Sizes(), list(SYSTEMS)
    found = run_ranks(_time, arguments.ranks, sizes, arguments.rounds, names, timeout_s=3000)
    times = {
        name: [max(each) for each in zip(*(rank[index] for rank in found), strict=True)]
        for index, name in enumerate(names)
    }
    rows = compare(times, arguments.ranks)
    held: dict[str, int] = {}
    if not arguments.no_memory:
        for name in ("ours", "FSDP2", "ours bf16", "FSDP2 bf16"):
            held[name] = peak_bytes(arguments.ranks, sizes, name)
        for kind in ("", " bf16"):
            ours, theirs = ([held[f"{name}{kind}"] / 2**20] for name in ("ours", "FSDP2"))
            memory = f"peak memory,{kind or ' fp32'}, MiB"
            rows.append(row_of(memory, "FSDP2", ours, theirs, target=0.6))
    print(
        f"torch {torch.__version__}, {arguments.ranks} ranks of one thread on "
        f"{os.cpu_count()} processors, {arguments.rounds} rounds, medians"
    )
    lines = [["system", "step, ms", "peak, MiB"]]
    for name in names:
        peak = f"{held[name] / 2**20:.0f}" if name in held else ""
        lines.append([name, f"{statistics.median(times[name]) * 1e3:.1f}", peak])
    print_table(lines)
    print()
    return report(rows, arguments.json, times_s=times, peak_bytes=held)


if __name__ == "__main__":
    sys.exit(main())
