"""torch.compile of blocks and of the whole model: same values, one graph for all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shard_comm import Comm
from shard_fsdp import fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_ranks, token_batches
from shard_wrap import by_class

BACKEND = "aot_eager"  # what the compiler captures is the question here, not the code it makes


def _compiled_blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=BACKEND, fullgraph=True)
    return model


def _compiled_in_place(model: Any) -> Any:
    model.compile(backend=BACKEND)
    return model


def _wrapped_by_the_compiler(model: Any) -> Any:
    blocks: list[Any] = [torch.compile(block, backend=BACKEND) for block in model.blocks]
    model.blocks = nn.ModuleList(blocks)
    return model


def _compiled_outside(model: Any) -> Any:
    return torch.compile(model, backend=BACKEND)


@pytest.mark.parametrize(
    "compiled",
    [_compiled_blocks, _compiled_in_place, _compiled_outside, _wrapped_by_the_compiler],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_model_trains_alike(compiled: Callable[[Any], Any], world_size: int) -> None:
    # Processes: the compiler's state is per process, and threads would share it.
    run_ranks(_train_both, world_size, compiled.__name__)


def _train_both(comm: Comm, compiled: str) -> None:
    models: list[Any] = [TinyDecoder(), TinyDecoder()]
    make = globals()[compiled]
    if make is _wrapped_by_the_compiler:
        make(models[1])
    for model in models:
        fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    eager, other = models[0], models[1] if make is _wrapped_by_the_compiler else make(models[1])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for batch in token_batches(3, comm.size):
        tokens = batch[comm.rank]
        losses = []
        for each, optimizer in zip((eager, other), optimizers, strict=True):
            logits = each(tokens[:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for want, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got.full_tensor(), want.full_tensor(), rtol=1e-4, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1  # both blocks, every step
