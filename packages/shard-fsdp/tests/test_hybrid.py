"""Two dimensions of ranks, and resharding to a part of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shard_comm import Comm, Recorded, tree_sum
from shard_flat import ShardTensor
from shard_fsdp import fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_ranks, run_threads, token_batches
from shard_wrap import by_class


def _mean_grads(ranks: int, step: int = 0) -> list[torch.Tensor]:
    """Gradients of the unwrapped model: summed within replicas of two, then over them."""
    plain = TinyDecoder()
    per_rank = []
    for tokens in token_batches(step + 1, ranks)[step]:
        per_rank.append(torch.autograd.grad(plain.loss(tokens), list(plain.parameters())))
    return [tree_sum(terms) / ranks for terms in zip(*per_rank, strict=True)]


def _check(model: Any, want: list[torch.Tensor]) -> None:
    for param, grad in zip(model.parameters(), want, strict=True):
        assert isinstance(param.grad, ShardTensor)
        assert torch.equal(param.grad.full_tensor(), grad)


def _two_comms(comm: Comm) -> tuple[Comm, Comm]:
    """Replicate over columns, shard over rows of a 2 x 2 grid."""
    return comm.split(comm.rank % 2), comm.split(comm.rank // 2)


def _hybrid(comm: Comm) -> None:
    model: Any = TinyDecoder()
    replicate, shard = _two_comms(comm)
    fully_shard(model, mesh=(replicate, shard), policy=by_class(DecoderBlock))
    assert model.head.weight.comm is shard
    model.loss(token_batches(1, 4)[0][comm.rank]).backward()
    _check(model, _mean_grads(4))


def test_gradients_are_means_over_all_ranks() -> None:
    run_threads(_hybrid, 4)


def _mesh_2d(comm: Comm) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = TinyDecoder()
    fully_shard(model, mesh=mesh, policy=by_class(DecoderBlock))
    model.loss(token_batches(1, 4)[0][comm.rank]).backward()
    _check(model, _mean_grads(4))


def test_two_dimensional_mesh_over_processes() -> None:
    run_ranks(_mesh_2d, 4)


def _late_all_reduce(comm: Comm) -> None:
    model: Any = TinyDecoder()
    replicate, shard = _two_comms(comm)
    recorded = Recorded(replicate)
    fully_shard(model, mesh=(recorded, shard), policy=by_class(DecoderBlock))
    batches = token_batches(2, 4)
    model.set_requires_all_reduce(False)
    model.loss(batches[0][comm.rank]).backward()
    assert all(p.grad is None for p in model.parameters())
    # flags of arrived gradients, and two checksums: of what ranks launched, and of their models
    small = sum(1 for _ in model.parameters()) + 3 + 2 + 2
    assert recorded.records["all_reduce"].payload_bytes == 8 * small
    model.set_requires_all_reduce(True)
    model.loss(batches[1][comm.rank]).backward()
    both = [a + b for a, b in zip(_mean_grads(4), _mean_grads(4, step=1), strict=True)]
    for param, want in zip(model.parameters(), both, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), want, rtol=1e-5, atol=1e-7)


def test_all_reduce_may_wait_for_the_last_microbatch() -> None:
    run_threads(_late_all_reduce, 4)


def _to_a_part(comm: Comm, part: int) -> None:
    recorded = Recorded(comm)
    model: Any = TinyDecoder()
    fully_shard(model, mesh=recorded, policy=by_class(DecoderBlock), reshard_after_forward=part)
    numel = sum(g.layout.numel for u in model._shard_unit.schedule.units for g in u.groups)
    for step in range(2):
        model.zero_grad()
        recorded.reset()
        model.loss(token_batches(2, comm.size)[step][comm.rank]).backward()
        _check(model, _mean_grads(comm.size, step))
        # backward gathers among the part only, or, for 1, not at all
        gathers = 2 if part == comm.size else 1
        grads = sum(p.grad.numel() for p in model.parameters())
        assert grads <= numel
        assert recorded.records["all_gather"].payload_bytes >= gathers * numel * 4


@pytest.mark.parametrize("part", [1, 2, 4])
def test_resharding_to_a_part_of_the_ranks(part: int) -> None:
    run_threads(_to_a_part, 4, part)


def _bad_part(comm: Comm) -> None:
    for part in (0, 3, -2):
        with pytest.raises(ValueError, match="expected reshard_after_forward to divide the 4"):
            fully_shard(nn.Linear(2, 2), mesh=comm, reshard_after_forward=part)


def test_part_must_divide_the_ranks() -> None:
    run_threads(_bad_part, 4)
