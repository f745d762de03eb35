"""SOAP and Shampoo: the bits of one rank on any number of ranks, state with the owners."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import SOAP, AdamW, Shampoo
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (16, 24), (2, 3, 4), (24, 10), (), (0, 4)]
KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "soap": (SOAP, {"precondition_frequency": 2, "max_preconditioner_dim": 20}, "left_basis"),
    "shampoo": (
        Shampoo,
        {"precondition_frequency": 2, "max_preconditioner_dim": 10},
        "left_root",
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, steps)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def build(kind: str, params: Any, **hyper: Any) -> Any:
    make, own, _ = KINDS[kind]
    return make(params, **{"lr": 0.02, "weight_decay": 0.1, **own, **hyper})


@kinds
def test_everything_else_is_adamws(kind: str) -> None:
    """Also tensors of three dimensions."""
    fulls, steps = data(torch.float32, 3)
    params, _ = take_steps(lambda p: build(kind, p, betas=(0.9, 0.999)), fulls, steps)
    twins, _ = take_steps(lambda p: AdamW(p, lr=0.02, weight_decay=0.1), fulls, steps)
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin) == (param.ndim != 2 or not param.numel())
    hyper: dict[str, Any] = {"elementwise": True, "betas": (0.9, 0.999)}
    tables = [grads[2:3] for grads in steps]
    table, _ = take_steps(lambda p: build(kind, p, **hyper), fulls[2:3], tables)
    other, _ = take_steps(lambda p: AdamW(p, lr=0.02, weight_decay=0.1), fulls[2:3], tables)
    assert torch.equal(table[0], other[0])


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_of_one_rank(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, dtype: torch.dtype, world_size: int
) -> None:
    """Also after a state dictionary on the way, to an optimizer whose state is on disk."""
    fulls, steps = data(dtype, 5)
    slot = KINDS[kind][2]
    params, plain = take_steps(lambda p: build(kind, p), fulls, steps)
    expected = [p.detach() for p in params] + [plain.state[params[2]][slot]]

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls)
        first = build(kind, sharded)
        for grads in steps[:2]:
            give_grads(sharded, grads)
            first.step()
        twins = make_params(comm, [p.full_tensor().detach() for p in sharded])
        second = build(kind, twins, lr=1.0, offload="disk")
        second.state_dict(allocate=True)
        second.load_state_dict(first.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            second.step()
        learned = second.state[twins[2]][slot].full_tensor()
        return [*(p.full_tensor().detach() for p in twins), learned]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_state_lives_with_owners(make_params: MakeParams, give_grads: GiveGrads, kind: str) -> None:
    """Four like matrices over two ranks: two each, whole, and nothing on the other one."""
    fulls = [torch.ones(8, 4)] * 4

    def rank(comm: Comm) -> tuple[list[int], int]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        optimizer = build(kind, params)
        give_grads(params, fulls)
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        held = [sum(v.local.numel() for k, v in own.items() if k != "step") for own in states]
        return held, recorded.records["all_to_all"].calls

    (first, calls), (second, _) = run_threads(rank, 2)
    each = 2 * 32 + 2 * (64 + 16)
    assert sorted(zip(first, second, strict=True)) == [(0, each)] * 2 + [(each, 0)] * 2
    assert calls == 2


@kinds
def test_copies_keep_their_owners(
    make_params: MakeParams, give_grads: GiveGrads, kind: str
) -> None:
    def rank(comm: Comm) -> bool:
        params = make_params(comm, [torch.ones(4, 4), torch.ones(4, 2)])
        give_grads(params, [torch.ones(4, 4), torch.ones(4, 2)])
        optimizer = build(kind, params)
        optimizer.step()
        twins = [copy.deepcopy(param) for param in params]
        other = build(kind, twins)
        other.load_state_dict(optimizer.state_dict())
        optimizer.step()
        other.step()
        return all(torch.equal(a.local, b.local) for a, b in zip(params, twins, strict=True))

    assert run_threads(rank, 2) == [True, True]


@kinds
def test_gradients_that_are_no_numbers(
    make_params: MakeParams, give_grads: GiveGrads, kind: str
) -> None:
    """They make parameters NaN on all ranks, as element-wise optimizers do; nobody waits."""

    def rank(comm: Comm) -> bool:
        params = make_params(comm, [torch.ones(6, 4)])
        optimizer = build(kind, params)
        for _ in range(2):
            give_grads(params, [torch.full((6, 4), torch.inf)])
            optimizer.step()
        return bool(params[0].full_tensor().isnan().all())

    assert run_threads(rank, 2) == [True, True]


@kinds
def test_a_small_language_model(train_decoder: TrainDecoder, kind: str) -> None:
    def make(params: Sequence[torch.Tensor]) -> Any:
        return KINDS[kind][0](params, lr=0.01, precondition_frequency=5)

    plain = train_decoder(None, make)
    assert plain[-1] < 0.6 * plain[0]
    assert run_threads(train_decoder, 3, make) == [plain] * 3


@kinds
def test_state_of_another_number_of_ranks(make_params: MakeParams, kind: str) -> None:
    fulls = [torch.ones(4, 4)] * 2
    halves = run_threads(
        lambda comm: build(kind, make_params(comm, fulls)).state_dict(allocate=True), 2
    )
    whole = make_params(SoloComm(), fulls)
    with pytest.raises(ValueError, match=r"^p[01]: exp_avg is a piece .* of another sharding"):
        build(kind, whole).load_state_dict(halves[1])
