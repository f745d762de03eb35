"""Train a small language model with every optimizer, cut over ranks, and with its reference.

    python tools/bench_convergence.py [--steps N] [--ranks N] [--json PATH]

The language is a chain in which each token is followed by one of four others, so there is
something to learn and something that cannot be. Ranks are threads; each sees the same batch. The
reference is torch's optimizer on whole parameters, or the same optimizer there where torch has
none; 8-bit and 16-bit variants are held against AdamW.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from _bench import make_parser, print_table, write_json
from shard_comm import Comm
from shard_flat import ParamSpec, ShardTensor, plan_layout
from shard_optim import SGD, SOAP, Adafactor, Adam, AdamW, AdamW8bit, Lion, Muon, Shampoo
from shard_testing import TinyDecoder, run_threads

_VOCAB, _WIDTH, _LAST = 61, 48, 20
_Build = Callable[[Sequence[torch.Tensor]], Any]


@dataclass(frozen=True)
class Case:
    """An optimizer and what it is held against.

    Attributes:
        ours: Builds it.
        reference: Builds the other one.
        dtype: Of ours' parameters.
        target: How far the final losses may be apart, relative.
    """

    ours: _Build
    reference: _Build
    dtype: torch.dtype = torch.float32
    target: float = 0.01


@dataclass(frozen=True)
class Row:
    """One line of the table; losses are means over the last steps."""

    name: str
    first: float
    ours: float
    reference: float
    ratio: float
    target: float
    same_bits: bool


def _muon(params: Sequence[torch.Tensor]) -> Muon:
    ends = {"params": [params[0], params[-1]], "elementwise": True, "lr": 3e-3}
    return Muon([{"params": list(params[1:-1])}, ends], lr=0.02, weight_decay=0.0)


def _torch_adamw(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, fused=True)


def _pair(ours: Any, reference: Any, **hyper: Any) -> Case:
    return Case(lambda params: ours(params, **hyper), lambda params: reference(params, **hyper))


def cases() -> dict[str, Case]:
    """Return what is trained, by name."""
    bf16 = torch.bfloat16

    def narrow(rounding: str) -> _Build:
        return lambda params: AdamW(params, lr=3e-3, betas=(0.9, 0.99), rounding=rounding)

    def wide(params: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, betas=(0.9, 0.99), fused=True)

    return {
        "SGD": _pair(SGD, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        "Adam": _pair(Adam, torch.optim.Adam, lr=3e-3),
        "AdamW": _pair(AdamW, torch.optim.AdamW, lr=3e-3),
        "Lion": _pair(Lion, Lion, lr=5e-4),
        "Adafactor": _pair(Adafactor, torch.optim.Adafactor, lr=0.02),
        "Muon": Case(_muon, _muon),
        "SOAP": _pair(SOAP, SOAP, lr=3e-3),
        "Shampoo": _pair(Shampoo, Shampoo, lr=3e-3, weight_decay=0.0),
        "AdamW8bit": Case(lambda params: AdamW8bit(params, lr=3e-3), _torch_adamw),
        "AdamW, bfloat16, stochastic": Case(narrow("stochastic"), wide, bf16),
        "AdamW, bfloat16, kahan": Case(narrow("kahan"), wide, bf16),
        "AdamW, bfloat16, nearest": Case(narrow("nearest"), wide, bf16, 0.05),
    }


def batches(steps: int) -> list[torch.Tensor]:
    """Return tokens ``[4, 33]`` per step, of a chain with four successors to each token."""
    generator = torch.Generator().manual_seed(5)
    successors = torch.randint(0, _VOCAB, (_VOCAB, 4), generator=generator)
    found = []
    for _ in range(steps):
        tokens = torch.empty(4, 33, dtype=torch.int64)
        tokens[:, 0] = torch.randint(0, _VOCAB, (4,), generator=generator)
        for place in range(1, 33):
            choice = torch.randint(0, 4, (4,), generator=generator)
            tokens[:, place] = successors[tokens[:, place - 1], choice]
        found.append(tokens)
    return found


def train(
    comm: Comm | None, build: _Build, data: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[float]:
    """Return the losses of all steps, on whole parameters where there is no comm."""
    model = TinyDecoder(vocab=_VOCAB, width=_WIDTH)
    plain = list(model.parameters())
    held: list[torch.Tensor] = list(plain)
    if comm is not None or dtype != torch.float32:
        held = cut(comm, [p.detach().to(dtype) for p in plain])
    optimizer, losses = build(held), []
    for tokens in data:
        model.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        losses.append(float(loss.detach()))
        for whole, param in zip(plain, held, strict=True):
            if param is whole:
                continue
            assert whole.grad is not None
            grad = whole.grad.to(dtype)
            if isinstance(param, ShardTensor):
                piece = grad.view(-1)[param.spec.start : param.spec.stop].clone()
                param.grad = param.like(piece)
            else:
                param.grad = grad
        optimizer.step()
        with torch.no_grad():
            for whole, param in zip(plain, held, strict=True):
                if param is not whole:
                    full = param.full_tensor() if isinstance(param, ShardTensor) else param
                    whole.copy_(full)
    return losses


def cut(comm: Comm | None, fulls: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters with the given values, cut over the ranks of ``comm`` if there is one."""
    if comm is None:
        return [nn.Parameter(full) for full in fulls]
    specs = [ParamSpec(f"0.{i}", tuple(full.shape), full.dtype) for i, full in enumerate(fulls)]
    layout = plan_layout(specs, comm.size)
    shard = torch.zeros(layout.shard_numel, dtype=layout.dtype)
    params: list[torch.Tensor] = []
    for index, (full, piece) in enumerate(zip(fulls, layout.pieces(comm.rank), strict=True)):
        local = shard[piece.offset : piece.offset + piece.numel]
        local.copy_(full.reshape(-1)[piece.start : piece.stop])
        spec = layout.shard_spec(comm.rank, index)
        params.append(nn.Parameter(ShardTensor(local, spec, comm=comm)))
    return params


def measure(name: str, case: Case, data: Sequence[torch.Tensor], ranks: int) -> Row:
    """Train three times: cut over ranks, whole, and the reference."""
    sharded = run_threads(train, ranks, case.ours, data, case.dtype)[0]
    whole = train(None, case.ours, data, case.dtype)
    reference = train(None, case.reference, data, torch.float32)
    ends = [sum(losses[-_LAST:]) / len(losses[-_LAST:]) for losses in (sharded, reference)]
    return Row(name, whole[0], ends[0], ends[1], ends[0] / ends[1], case.target, sharded == whole)


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; exit status 1 if a loss is too far off or bits differ."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--ranks", type=int, default=3, help="threads that share the parameters")
    options = parser.parse_args(argv)
    if min(options.steps, options.ranks) < 1:
        parser.error("--steps and --ranks must be at least 1")
    data = batches(options.steps)
    rows = [measure(name, case, data, options.ranks) for name, case in cases().items()]
    lines = [["optimizer", "first loss", "ours", "reference", "ratio", "same bits as on one rank"]]
    for row in rows:
        figures = (f"{each:.4f}" for each in (row.first, row.ours, row.reference, row.ratio))
        lines.append([row.name, *figures, "yes" if row.same_bits else "no"])
    print_table(lines)
    write_json(options.json, [asdict(row) for row in rows])
    return 1 if any(abs(r.ratio - 1) > r.target or not r.same_bits for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
