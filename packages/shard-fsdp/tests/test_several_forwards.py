"""One backward after several outermost forwards: the gradients of the unwrapped model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shard_fsdp
from shard_comm import Comm
from shard_fsdp import MixedPrecisionPolicy
from shard_testing import DecoderBlock, TinyDecoder, full_grad, run_threads
from shard_wrap import by_class

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard

CHANGES = ["nothing", "checkpointed", "tied", "frozen", "all at once"]


class _Decoder(TinyDecoder):
    def __init__(self, change: str) -> None:
        super().__init__(layers=2)
        every = change == "all at once"
        self.checkpoints = every or change == "checkpointed"
        if every or change == "tied":
            self.head.weight = self.embed.weight
        if every or change == "frozen":
            self.blocks[0].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _loss(model: Any, batches: list[torch.Tensor]) -> torch.Tensor:
    """Not a plain sum, and with a forward in between that has no part in the backward."""
    with torch.no_grad():
        scale = model.loss(batches[2])
    total: torch.Tensor = model.loss(batches[0]) * model.loss(batches[1]) + scale * model.loss(
        batches[2]
    )
    return total


def _batches(rank: int) -> list[torch.Tensor]:
    """Of other lengths each, and other tokens on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(0, 61, (2, n), generator=generator) for n in (5, 7, 4)]


def _compare(comm: Comm, change: str, *, bfloat16: bool, accumulates: bool) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None, reduce_dtype=torch.float32
    )
    plain = _Decoder(change)
    model: Any = _Decoder(change)
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock), mp_policy=policy)
    times = 2 if accumulates else 1
    for step in range(times):
        model.set_requires_gradient_sync(step == times - 1)
        _loss(model, _batches(comm.rank)).backward()
        for rank in range(comm.size):
            (_loss(plain, _batches(rank)) / comm.size).backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        if want.grad is None:
            assert got.grad is None
        elif bfloat16:
            assert (full_grad(got) - want.grad).norm() < 0.05 * want.grad.norm()
        else:
            torch.testing.assert_close(full_grad(got), want.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients(
    world_size: int, change: str, accumulates: bool, bfloat16: bool, shares_memory: bool
) -> None:
    def compare(comm: Comm) -> None:
        _compare(comm, change, bfloat16=bfloat16, accumulates=accumulates)

    run_threads(compare, world_size, shares_memory=shares_memory)
