"""The runtime on a CUDA device: bits, memory, several ranks on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shard_comm import Comm, HostStaged, SoloComm, tree_sum
from shard_flat import ShardTensor
from shard_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from shard_optim import (
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Offload,
    Shampoo,
    clip_grad_norm_,
)
from shard_testing import DecoderBlock, TinyDecoder, run_ranks, token_batches
from shard_wrap import by_class


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for (tokens,) in token_batches(steps, 1):
        loss = model.loss(tokens.cuda())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_gives_the_bits_of_the_bare_model(dtype: torch.dtype) -> None:
    bare: Any = TinyDecoder().to("cuda", dtype)
    ours: Any = TinyDecoder().to("cuda", dtype)
    fully_shard(ours, policy=by_class(DecoderBlock))
    want = _train(bare, AdamW(bare.parameters(), lr=1e-2), 5)
    got = _train(ours, AdamW(ours.parameters(), lr=1e-2), 5)
    assert got == want
    for a, b in zip(bare.parameters(), ours.parameters(), strict=True):
        assert isinstance(b, ShardTensor)
        assert torch.equal(b.full_tensor(), a)


def test_memory_is_flat_after_warm_up() -> None:
    model: Any = TinyDecoder(width=256, layers=4, heads=4).cuda()
    fully_shard(
        model,
        mesh=SoloComm("cuda"),
        policy=by_class(DecoderBlock),
        reshard_after_forward=True,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    optimizer = AdamW(model.parameters(), lr=1e-3)
    _train(model, optimizer, 3)
    torch.cuda.reset_peak_memory_stats()
    _train(model, optimizer, 3)
    after_3 = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    _train(model, optimizer, 100)
    assert torch.cuda.max_memory_allocated() == after_3


def test_shards_live_on_the_host_when_offloaded() -> None:
    model: Any = TinyDecoder().cuda()
    fully_shard(model, policy=by_class(DecoderBlock), offload_policy=CPUOffloadPolicy())
    plain: Any = TinyDecoder().cuda()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(g.shard.is_pinned() for g in model._shard_unit.groups)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    for (tokens,) in token_batches(3, 1):
        for each, other in ((model, optimizer), (plain, reference)):
            each.loss(tokens.cuda()).backward()
            other.step()
            other.zero_grad()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.full_tensor(), a.cpu())


def _shared_device(comm: Comm) -> None:
    staged = HostStaged(comm, "cuda")
    model: Any = TinyDecoder().cuda()
    fully_shard(model, mesh=staged, policy=by_class(DecoderBlock), reshard_after_forward=True)
    plain: Any = TinyDecoder().cuda()
    batches = token_batches(1, comm.size)[0]
    model.loss(batches[comm.rank].cuda()).backward()
    terms = [torch.autograd.grad(plain.loss(b.cuda()), list(plain.parameters())) for b in batches]
    for param, each in zip(model.parameters(), zip(*terms, strict=True), strict=True):
        assert param.grad.device.type == "cuda"
        want = (tree_sum([t.cpu() for t in each]) / comm.size).cuda()
        assert torch.equal(param.grad.full_tensor(), want)


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_ranks_on_one_device(world_size: int) -> None:
    run_ranks(_shared_device, world_size)


@pytest.mark.parametrize("to", ["cpu", "disk"])
@pytest.mark.parametrize("kind", [SGD, AdamW, Lion, AdamW8bit, Adafactor, Muon, SOAP, Shampoo])
def test_offloaded_state_gives_the_same_bits(kind: Any, to: str) -> None:
    hyper: dict[str, Any] = {"lr": 1e-2, **({"momentum": 0.9} if kind is SGD else {})}

    def train(offload: Offload | None) -> tuple[list[float], list[torch.Tensor], Any]:
        model: Any = TinyDecoder().cuda()
        optimizer = kind(model.parameters(), offload=offload, **hyper)
        losses = _train(model, optimizer, 5)
        return losses, [p.detach() for p in model.parameters()], optimizer

    want, plain, _ = train(None)
    got, params, optimizer = train(Offload(to, window_bytes=1 << 16))
    assert got == want
    assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
    (group,) = optimizer.param_groups
    for param, own in optimizer.state.items():
        for slot in optimizer._slots_of(group, param):
            assert own[slot.name].device.type == ("cpu" if slot.moves else "cuda")


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_offloaded_state_takes_a_window_of_the_device(to: str) -> None:
    param = torch.nn.Parameter(torch.zeros(1 << 24, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizer = AdamW([param], offload=Offload(to, window_bytes=12 << 20))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        optimizer.step()
    grown = torch.cuda.max_memory_allocated() - before
    assert 11 << 20 <= grown <= (12 << 20) + (1 << 16)
