"""Gradients: values stated by hand, or those of the unwrapped model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shard_fsdp
from shard_comm import Comm
from shard_fsdp import MixedPrecisionPolicy
from shard_testing import (
    DecoderBlock,
    Scale,
    TinyDecoder,
    full_grad,
    run_threads,
    token_batches,
)
from shard_wrap import by_class

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard

WORLDS = [1, 2, 3, 4]


# --- activation checkpointing inside and around units ---


class _CheckpointedBlock(DecoderBlock):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=self.reentrant)
        return out


def _against_plain(
    comm: Comm, change: Callable[[TinyDecoder], None], wrap: Callable[[TinyDecoder], None]
) -> None:
    """Same gradients as the mean of the unwrapped model's over the ranks' batches."""
    plain, model = TinyDecoder(), TinyDecoder()
    change(plain)
    change(model)
    wrap(model)
    batches = token_batches(1, comm.size)[0]
    (sum(plain.loss(b) for b in batches) / comm.size).backward()  # type: ignore[union-attr]
    model.loss(batches[comm.rank]).backward()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert want.grad is not None
        torch.testing.assert_close(full_grad(got), want.grad, rtol=1e-5, atol=1e-7)


def _checkpoint_inside(comm: Comm) -> None:
    def change(model: TinyDecoder) -> None:
        for block in model.blocks:
            block.__class__ = _CheckpointedBlock

    def wrap(model: TinyDecoder) -> None:
        fully_shard(model, mesh=comm, policy=by_class(_CheckpointedBlock))

    for reentrant in (True, False):
        _CheckpointedBlock.reentrant = reentrant
        comm.barrier()
        _against_plain(comm, change, wrap)
        comm.barrier()


class _CheckpointingDecoder(TinyDecoder):
    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _checkpoint_around(comm: Comm) -> None:
    def change(model: TinyDecoder) -> None:
        model.__class__ = _CheckpointingDecoder

    def wrap(model: TinyDecoder) -> None:
        fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))

    for reentrant in (True, False):
        _CheckpointingDecoder.reentrant = reentrant
        comm.barrier()
        _against_plain(comm, change, wrap)
        comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_checkpointing_below_and_at_unit_boundaries(world_size: int) -> None:
    run_threads(_checkpoint_inside, world_size)
    run_threads(_checkpoint_around, world_size)


# --- where outputs go ---


class _Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class _Record:
    value: torch.Tensor
    note: str


class _Returns(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.linear(x))


PACKINGS: list[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = [
    (lambda y: {"a": [y, None, "text"]}, lambda out: out["a"][0]),
    (lambda y: _Record(y, "note"), lambda out: out.value),
    (lambda y: (y, (1, y)), lambda out: out[1][1]),
    (lambda y: _Opaque(y), lambda out: out.value),
]


def _packed_outputs(comm: Comm) -> None:
    for pack, unpack in PACKINGS:
        inner = _Returns(pack)
        with torch.no_grad():
            inner.linear.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        fully_shard(inner, mesh=comm, reshard_after_forward=True)
        x = torch.tensor([[1.0, 10.0]], requires_grad=True)
        unpack(inner(x)).sum().backward()
        assert full_grad(inner.linear.weight).tolist() == [[1, 10], [1, 10]]
        assert x.grad is not None
        assert x.grad.tolist() == [[4, 6]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_in_containers_and_unknown_objects(world_size: int) -> None:
    run_threads(_packed_outputs, world_size)


# --- several forwards, several backwards ---


def _shared_layer(comm: Comm) -> None:
    """w * (w * x): d/dw = 2 w x = 12 at w = 2, x = 3."""
    layer = fully_shard(Scale(torch.tensor([2.0])), mesh=comm, reshard_after_forward=True)
    layer(layer(torch.tensor([3.0], requires_grad=True))).sum().backward()
    assert full_grad(layer.weight).item() == 12


def _two_forwards_two_backwards(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.tensor([2.0])), mesh=comm, reshard_after_forward=True)
    first = layer(torch.tensor([3.0], requires_grad=True))
    second = layer(torch.tensor([5.0], requires_grad=True))
    first.sum().backward()
    assert full_grad(layer.weight).item() == 3
    second.sum().backward()
    assert full_grad(layer.weight).item() == 8


def _retained_graph(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.tensor([2.0])), mesh=comm, reshard_after_forward=True)
    model = fully_shard(nn.Sequential(layer), mesh=comm, reshard_after_forward=True)
    out = model(torch.tensor([3.0], requires_grad=True)).square().sum()  # 2 w x x = 36
    out.backward(retain_graph=True)
    assert full_grad(layer.weight).item() == 36
    out.backward()
    assert full_grad(layer.weight).item() == 72


def _two_losses(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.tensor([2.0])), mesh=comm, reshard_after_forward=True)
    out = layer(torch.tensor([3.0]))
    (out.sum() + (out * 10).sum()).backward()
    assert full_grad(layer.weight).item() == 33


@pytest.mark.parametrize(
    "check", [_shared_layer, _two_forwards_two_backwards, _retained_graph, _two_losses]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_repeated_calls(
    check: Callable[[Comm], None], world_size: int, shares_memory: bool
) -> None:
    run_threads(check, world_size, shares_memory=shares_memory)


# --- accumulation ---


def _accumulation(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.tensor([1.0, 1.0])), mesh=comm)
    x = torch.full((2,), float(comm.rank + 1))
    layer.set_requires_gradient_sync(False)
    layer(x).sum().backward()
    if comm.size > 1:
        assert layer.weight.grad is None
    layer.set_requires_gradient_sync(True)
    layer(10 * x).sum().backward()
    mean = (comm.size + 1) / 2
    assert full_grad(layer.weight).tolist() == [11 * mean] * 2
    layer(x).sum().backward()  # without zero_grad: reduced gradients add up
    assert full_grad(layer.weight).tolist() == [12 * mean] * 2


@pytest.mark.parametrize("world_size", WORLDS)
def test_accumulation_with_and_without_sync(world_size: int) -> None:
    run_threads(_accumulation, world_size)


def _divide_factor(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.tensor([1.0])), mesh=comm)
    layer.set_gradient_divide_factor(1.0)
    layer(torch.tensor([3.0])).sum().backward()
    assert full_grad(layer.weight).item() == 3 * comm.size
    layer.set_gradient_divide_factor(6.0)
    layer.zero_grad()
    layer(torch.tensor([3.0])).sum().backward()
    assert full_grad(layer.weight).item() == 3 * comm.size / 6
    with pytest.raises(ValueError, match="above 0"):
        layer.set_gradient_divide_factor(0.0)


@pytest.mark.parametrize("world_size", WORLDS)
def test_divide_factor(world_size: int) -> None:
    run_threads(_divide_factor, world_size)


# --- frozen, unused ---


def _frozen(comm: Comm) -> None:
    model = nn.Sequential(Scale(torch.tensor([2.0])), Scale(torch.tensor([3.0])))
    model[0].weight.requires_grad_(False)
    fully_shard(model, mesh=comm)
    model(torch.tensor([5.0])).sum().backward()
    assert model[0].weight.grad is None
    assert full_grad(model[1].weight).item() == 10
    model[0].weight.requires_grad_(True)  # unfrozen later
    model(torch.tensor([5.0])).sum().backward()
    assert full_grad(model[0].weight).item() == 15
    assert full_grad(model[1].weight).item() == 20


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_frozen_and_unfrozen(world_size: int) -> None:
    run_threads(_frozen, world_size)


class _TwoVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(2))

    def forward(self, use_a: bool) -> torch.Tensor:
        return 2 * self.a.sum() if use_a else 4 * self.b.sum()


def _unused(comm: Comm) -> None:
    model = fully_shard(_TwoVectors(), mesh=comm)
    model(True).backward()
    assert full_grad(model.a).tolist() == [2, 2]
    assert model.b.grad is None


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameter_that_no_rank_uses_has_no_gradient(world_size: int) -> None:
    run_threads(_unused, world_size)


# --- dtypes ---


def _mixed_precision(comm: Comm) -> None:
    seen: list[torch.dtype] = []
    layer = Scale(torch.tensor([1.0, 1.0]))
    layer.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    layer.register_forward_pre_hook(lambda m, args: seen.append(m.weight.dtype))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    fully_shard(layer, mesh=comm, mp_policy=policy)
    # 1 + 2**-9 is not a bf16 number, its sum over ranks in fp32 is exact
    out = layer(torch.tensor([1.0, 1.0 + 2**-9]))
    assert out.dtype == torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16]
    out.sum().backward()
    assert layer.weight.dtype == torch.float32
    grad = full_grad(layer.weight)
    assert grad.dtype == torch.float32
    assert grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_mixed_precision(world_size: int) -> None:
    run_threads(_mixed_precision, world_size)


def _output_dtype_of_a_tree(comm: Comm) -> None:
    """What follows a unit inside the tree meets its own dtype; the tree's outputs are cast."""
    seen: list[torch.dtype] = []
    inner = nn.Sequential(Scale(torch.ones(2)), Scale(torch.ones(2)))
    model = nn.Sequential(inner, nn.Linear(2, 2, bias=False))
    inner.register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard(model, mesh=comm, mp_policy=policy, policy=by_class(Scale, nn.Sequential))
    out = model(torch.ones(1, 2))
    assert seen == [torch.bfloat16]
    assert out.dtype == torch.float32
    out.sum().backward()


def test_output_dtype_is_that_of_the_outermost_module() -> None:
    run_threads(_output_dtype_of_a_tree, 2)


def _reduces_in_float32(comm: Comm) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layer = fully_shard(Scale(torch.ones(1)), mesh=comm, mp_policy=policy)
    # 256 and 1 add up to 257, which bf16 rounds to 256
    (layer(torch.ones(1)) * (256 if comm.rank == 0 else 1)).sum().backward()
    assert full_grad(layer.weight).item() == 257 / 2


def test_sum_is_taken_in_the_reduction_dtype() -> None:
    run_threads(_reduces_in_float32, 2)


# --- hooks ---


def _user_hooks(comm: Comm) -> None:
    layer = fully_shard(Scale(torch.ones(2)), mesh=comm)
    seen: list[list[float]] = []
    layer.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(p.grad.full_tensor().tolist())
    )
    (layer(torch.ones(2)) * (comm.rank + 1)).sum().backward()
    assert seen == [[(comm.size + 1) / 2] * 2]


def _hook_on_a_sharded_parameter(comm: Comm) -> None:
    model = fully_shard(nn.Linear(2, 3, bias=False), mesh=comm)
    seen = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.full_tensor().tolist())  # type: ignore[attr-defined]
        return grad * 2

    handle = model.weight.register_hook(double)
    for _ in range(2):
        model(torch.full((1, 2), 1.0 + comm.rank)).sum().backward()
    mean = (comm.size + 1) / 2
    assert seen == [[[mean, mean]] * 3] * 2  # the reduced gradient of each backward, not the sum
    assert model.weight.grad.full_tensor().tolist() == [[4 * mean, 4 * mean]] * 3
    handle.remove()
    model.weight.register_hook(lambda grad: torch.zeros(3, 2))
    with pytest.raises(TypeError, match=r"weight: expected a hook to return None or a ShardTensor"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_hook_on_a_sharded_parameter(world_size: int) -> None:
    run_threads(_hook_on_a_sharded_parameter, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_post_accumulate_hook_fires_once_with_the_reduced_gradient(world_size: int) -> None:
    run_threads(_user_hooks, world_size)
