"""SOAP: Adam in another basis, the bits of one rank on any number of ranks, state with owners."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import SOAP, Adam, AdamW
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (16, 24), (2, 3, 4), (24, 10), (), (0, 4)]
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "precondition_every": 2, "max_size": 20}


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, steps)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def train(fulls: Sequence[torch.Tensor], steps: Any, **hyper: Any) -> tuple[list[Any], SOAP]:
    return take_steps(partial(SOAP, **hyper), fulls, steps)


def test_it_is_adam_in_the_basis_of_the_gradients() -> None:
    """Gradients that one rotation of each side makes diagonal: Adam on the diagonals, rotated."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(6, 6))
    right, _ = torch.linalg.qr(torch.randn(6, 6))
    sizes = torch.arange(1.0, 7.0)
    param, diagonal = nn.Parameter(torch.zeros(6, 6)), nn.Parameter(torch.zeros(6))
    hyper: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0, "eps": 1e-2}
    soap, adam = SOAP([param], precondition_every=2, **hyper), Adam([diagonal], **hyper)
    for step in range(5):
        diagonal.grad = sizes * (1 + 0.3 * step)
        param.grad = left @ torch.diag(diagonal.grad) @ right.t()
        soap.step()
        if step:  # the first one tells the basis alone
            adam.step()
    expected = left @ torch.diag(diagonal.detach()) @ right.t()
    torch.testing.assert_close(param.detach(), expected, rtol=0, atol=0.01)  # steps of 0.4 in all


def test_sides_that_are_too_long_keep_their_own_basis() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 7)
    param, twin = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    soap = SOAP([param], lr=0.1, max_size=4)
    adamw = AdamW([twin], lr=0.1, betas=(0.95, 0.95), weight_decay=0.01)
    param.grad = torch.randn(5, 7)
    soap.step()
    torch.testing.assert_close(param.detach(), values * (1 - 0.1 * 0.01))
    with torch.no_grad():
        param.copy_(values)
    for _ in range(3):
        param.grad = torch.randn(5, 7)
        twin.grad = param.grad.clone()
        soap.step()
        adamw.step()
    torch.testing.assert_close(param, twin, rtol=1e-5, atol=1e-5)
    assert sorted(soap.state[param]) == ["exp_avg", "exp_avg_sq", "step"]
    half = SOAP([param], max_size=6)
    half.step()
    assert half.state[param]["left_basis"].shape == (5, 5)
    assert "right" not in half.state[param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_of_one_rank(
    make_params: MakeParams, give_grads: GiveGrads, dtype: torch.dtype, world_size: int
) -> None:
    """Also after a state dictionary on the way."""
    fulls, steps = data(dtype, 5)
    params, plain = train(fulls, steps, **HYPER)
    expected = [p.detach() for p in params] + [plain.state[params[2]]["left_basis"]]

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls)
        first = SOAP(sharded, **HYPER)
        for grads in steps[:2]:
            give_grads(sharded, grads)
            first.step()
        twins = make_params(comm, [p.full_tensor().detach() for p in sharded])
        second = SOAP(twins, max_size=20)
        second.state_dict(allocate=True)
        second.load_state_dict(first.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            second.step()
        basis = second.state[twins[2]]["left_basis"].full_tensor()
        return [*(p.full_tensor().detach() for p in twins), basis]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_state_lives_with_owners(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """Four like matrices over two ranks: two each, whole, and nothing on the other one."""
    fulls = [torch.ones(8, 4)] * 4

    def rank(comm: Comm) -> tuple[list[int], list[tuple[int, ...]], int]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        optimizer = SOAP(params)
        give_grads(params, fulls)
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        held = [sum(v.local.numel() for k, v in own.items() if k != "step") for own in states]
        shapes = [tuple(v.shape) for k, v in states[0].items() if k != "step"]
        return held, shapes, recorded.records["all_to_all"].calls

    (first, shapes, calls), (second, _, _) = run_threads(rank, 2)
    each = 2 * 32 + 2 * (64 + 16)
    assert sorted(zip(first, second, strict=True)) == [(0, each)] * 2 + [(each, 0)] * 2
    assert shapes == [(8, 4), (8, 4), (8, 8), (8, 8), (4, 4), (4, 4)]
    assert calls == 2


def test_copies_keep_their_owners(make_params: MakeParams, give_grads: GiveGrads) -> None:
    def rank(comm: Comm) -> bool:
        params = make_params(comm, [torch.ones(4, 4), torch.ones(4, 2)])
        give_grads(params, [torch.ones(4, 4), torch.ones(4, 2)])
        optimizer = SOAP(params, lr=0.1)
        optimizer.step()
        twins = [copy.deepcopy(param) for param in params]
        other = SOAP(twins, lr=0.1)
        other.load_state_dict(optimizer.state_dict())
        optimizer.step()
        other.step()
        return all(torch.equal(a.local, b.local) for a, b in zip(params, twins, strict=True))

    assert run_threads(rank, 2) == [True, True]


def test_a_small_language_model(train_decoder: TrainDecoder) -> None:
    def build(params: Sequence[torch.Tensor]) -> SOAP:
        return SOAP(params, lr=0.01, precondition_every=5)

    plain = train_decoder(None, build)
    assert plain[-1] < 0.6 * plain[0]
    assert run_threads(train_decoder, 3, build) == [plain] * 3


def test_state_of_another_number_of_ranks(make_params: MakeParams) -> None:
    halves = run_threads(
        lambda comm: SOAP(make_params(comm, [torch.ones(4, 4)] * 2)).state_dict(allocate=True), 2
    )
    whole = make_params(SoloComm(), [torch.ones(4, 4)] * 2)
    with pytest.raises(ValueError, match=r"^p[01]: exp_avg is a piece .* of another sharding"):
        SOAP(whole).load_state_dict(halves[1])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"precondition_every": 0}, "expected precondition_every >= 1, got 0"),
        ({"shampoo_beta": 1.0}, r"expected one shampoo_beta in \[0, 1\)"),
        ({"betas": (0.9,)}, r"expected two betas in \[0, 1\)"),
        ({"max_size": -1}, "expected max_size >= 0, got -1"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SOAP([nn.Parameter(torch.ones(2, 2))], **hyper)
    with pytest.raises(TypeError, match=r"got \['beta'\]"):
        SOAP([nn.Parameter(torch.ones(2, 2))], beta=1)
