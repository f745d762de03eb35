"""Parameters that are DTensors of a tensor-parallel mesh, on dp x tp ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import shard_optim
from shard_comm import Comm
from shard_flat import Ragged, ShardTensor
from shard_fsdp import fully_shard
from shard_testing import run_ranks

WIDTH, HEADS, TOKENS = 12, 4, 6


class _Block(nn.Module):
    """Attention and an MLP, as tensor-parallel plans cut them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # its gradient would be zero but for rounding
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(h), self.k(h), self.v(h))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        change: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return x + change


class _Model(nn.Module):
    """Two blocks and a plain head, with values that depend on nothing but the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


PLAN = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def _parallel_model(mesh: DeviceMesh) -> Any:
    model = _Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
    return model


def _sharded(mesh: DeviceMesh, shard: Any = fully_shard) -> Any:
    model = _parallel_model(mesh)
    for block in model.blocks:
        shard(block, mesh=mesh["dp"])
    shard(model, mesh=mesh["dp"])
    return model


def _batches(dp: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, TOKENS, WIDTH, generator=generator) for _ in range(dp)]


def _train(model: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }


def _trained_alone(dp: int, steps: int = 3) -> dict[str, torch.Tensor]:
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, [torch.cat(_batches(dp, step)) for step in range(steps)])
    return _full(model)


def _check_training(comm: Comm, mesh: DeviceMesh) -> None:
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    mine = [_batches(dp, step)[dp_rank] for step in range(3)]
    want = _trained_alone(dp)
    start = _full(_Model())
    optimizers: tuple[Any, ...] = (torch.optim.AdamW, shard_optim.AdamW)
    for make in optimizers:
        model = _sharded(mesh)
        assert all(torch.equal(p, start[n]) for n, p in _full(model).items())
        _train(model, make(model.parameters(), lr=1e-2), mine)
        got = _full(model)
        for name, value in got.items():
            # the tensor-parallel matmuls and the mean over ranks add up in another order, which
            # Adam's quotient enlarges in the first steps
            torch.testing.assert_close(value, want[name], rtol=1e-3, atol=1e-4)
            assert not torch.equal(value, start[name])
        digests = comm.all_gather_object([v.double().sum().item() for v in got.values()])
        assert all(digest == digests[0] for digest in digests)
    reference = _sharded(mesh, torch_fsdp.fully_shard)
    _train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), mine)
    for name, value in _full(reference).items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)  # as above


def _check_parameters(comm: Comm, mesh: DeviceMesh) -> None:
    model = _sharded(mesh)
    block = model.blocks[0]
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    for linear, placement in ((block.q, Shard(0)), (block.out, Shard(1))):
        weight = linear.weight
        assert isinstance(weight, ShardTensor)
        assert weight.shape == (WIDTH, WIDTH)
        ragged, outer = weight.placements
        assert isinstance(ragged, Ragged)
        assert outer == placement
        assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
        assert weight.device_mesh.shape == (dp, tp)
        assert weight.to_local().shape == (ragged.stop - ragged.start,)
    assert block.down.bias.placements[1] == Replicate()
    assert len(model.head.weight.placements) == 1
    seen: list[Any] = []
    block.q.register_forward_pre_hook(lambda m, a: seen.append(m.weight))
    model(_batches(dp, 0)[0]).sum().backward()
    (inside,) = seen
    assert type(inside.data) is DTensor
    assert (inside.device_mesh, inside.placements) == (mesh["tp"], (Shard(0),))
    assert inside.to_local().shape == (WIDTH // tp, WIDTH)
    for param in model.parameters():
        assert isinstance(param.grad, ShardTensor)
        assert param.grad.placements == param.placements


WORLDS = [(2, 2), (2, 1), (1, 2)]


def _everything(comm: Comm, dp: int, tp: int) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for check in (_check_parameters, _check_training):
        check(comm, mesh)
        comm.barrier()


@pytest.mark.parametrize(("dp", "tp"), WORLDS)
def test_tensor_parallel_models_are_sharded(dp: int, tp: int) -> None:
    run_ranks(_everything, dp * tp, dp, tp)
