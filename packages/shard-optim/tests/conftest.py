"""Sharded parameters as a runtime makes them: views of one flat buffer per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from shard_comm import Comm
from shard_flat import ParamSpec, ShardTensor, plan_layout
from shard_testing import TinyDecoder, token_batches

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
Build = Callable[[Sequence[torch.Tensor]], torch.optim.Optimizer]
TrainDecoder = Callable[..., list[float]]


@pytest.fixture(scope="session")
def make_params() -> MakeParams:
    """Cut full tensors by one layout; they are called ``p0``, ``p1``, ..."""

    def make(comm: Comm, fulls: Sequence[torch.Tensor]) -> list[ShardTensor]:
        dtype = fulls[0].dtype
        specs = [ParamSpec(f"p{i}", tuple(full.shape), dtype) for i, full in enumerate(fulls)]
        layout = plan_layout(specs, comm.size)
        shard = torch.zeros(layout.shard_numel, dtype=dtype)
        params: list[ShardTensor] = []
        for i, (full, piece) in enumerate(zip(fulls, layout.pieces(comm.rank), strict=True)):
            local = shard[piece.offset : piece.offset + piece.numel]
            local.copy_(full.reshape(-1)[piece.start : piece.stop])
            param = nn.Parameter(ShardTensor(local, layout.shard_spec(comm.rank, i), comm=comm))
            assert isinstance(param, ShardTensor)
            params.append(param)
        return params

    return make


@pytest.fixture(scope="session")
def give_grads() -> GiveGrads:
    """Set gradients from full ones, the pieces of each rank in one new flat buffer."""

    def give(params: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor | None]) -> None:
        wanted = [(p, full) for p, full in zip(params, fulls, strict=True) if full is not None]
        for param in params:
            param.grad = None
        sharded = [(p, full) for p, full in wanted if isinstance(p, ShardTensor)]
        for param, full in wanted:
            if not isinstance(param, ShardTensor):
                param.grad = full.clone()
        if not sharded:
            return
        # In the order of memory, as a reduction over ranks leaves them.
        sharded.sort(key=lambda pair: pair[0].piece.data_ptr() if pair[0].piece.numel() else 0)
        parts = [full.reshape(-1)[p.spec.start : p.spec.stop] for p, full in sharded]
        flat = torch.cat(parts)
        sizes = [part.numel() for part in parts]
        for (param, _), part in zip(sharded, flat.split(sizes), strict=True):
            param.grad = param.like(part)

    return give


@pytest.fixture(scope="session")
def train_decoder(make_params: MakeParams, give_grads: GiveGrads) -> TrainDecoder:
    """Train a small language model on repeated tokens; the losses of all steps."""

    def train(comm: Comm | None, build: Build, steps: int = 20, width: int = 16) -> list[float]:
        """On plain parameters where there is no comm, else on parameters cut over its ranks."""
        model = TinyDecoder(width=width)
        plain = list(model.parameters())
        params = plain if comm is None else make_params(comm, [p.detach() for p in plain])
        optimizer, losses = build(params), []
        (tokens,) = token_batches(1, 1)[0]
        for _ in range(steps):
            model.zero_grad()
            loss = model.loss(tokens)
            loss.backward()
            losses.append(float(loss.detach()))
            if comm is not None:
                give_grads(params, [p.grad for p in plain])
            optimizer.step()
            if comm is not None:
                with torch.no_grad():
                    for whole, param in zip(plain, params, strict=True):
                        assert isinstance(param, ShardTensor)
                        whole.copy_(param.full_tensor())
        return losses

    return train
