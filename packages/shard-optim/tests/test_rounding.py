"""Parameters of bfloat16 alone: stochastic rounding and Kahan summation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded
from shard_flat import ShardTensor
from shard_optim import AdamW
from shard_optim._noise import mix, noise, round_stochastically, seed_of
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

roundings = pytest.mark.parametrize("rounding", ["stochastic", "kahan"])


def test_mixing_by_hand() -> None:
    mixed = mix(torch.tensor([0, 1], dtype=torch.int32))
    assert [value % 2**32 for value in mixed.tolist()] == [0, 0x514E28B7]


def test_bits_go_by_name_step_and_element() -> None:
    seed = seed_of("layers.0.weight", 7)
    whole = noise([(seed, 0, 1000)], torch.device("cpu"))
    other = seed_of("layers.1.weight", 7)
    cut = noise([(seed, 300, 700), (other, 5, 9)], torch.device("cpu"))
    assert torch.equal(cut[:400], whole[300:700])
    assert torch.equal(cut[400:], noise([(other, 5, 9)], torch.device("cpu")))
    assert not torch.equal(noise([(seed_of("layers.0.weight", 8), 0, 1000)], whole.device), whole)
    far = noise([(seed, 2**33 + 1, 2**33 + 3)], whole.device)
    assert torch.equal(far, noise([(seed, 1, 3)], whole.device))


def test_bits_look_random() -> None:
    """Every bit is set in about half of all numbers, and neighbours are not alike."""
    bits = noise([(seed_of("w", 1), 0, 100_000)], torch.device("cpu"))
    for place in range(32):
        share = ((bits >> place) & 1).double().mean()
        assert abs(float(share) - 0.5) < 0.01
        same = (((bits[1:] ^ bits[:-1]) >> place) & 1).double().mean()
        assert abs(float(same) - 0.5) < 0.01


@pytest.mark.parametrize("high", [False, True])
def test_rounding_is_right_on_average(high: bool) -> None:
    """1 and a quarter of the way to the next bfloat16, which is 1 + 2**-7."""
    wide = torch.full((100_000,), 1 + 2.0**-9)
    bits = noise([(seed_of("w", 1), 0, wide.numel())], wide.device)
    rounded = torch.empty_like(wide, dtype=torch.bfloat16)
    round_stochastically(rounded, wide, bits, high=high)
    assert sorted(set(rounded.tolist())) == [1.0, 1 + 2.0**-7]
    assert float(rounded.gt(1).double().mean()) == pytest.approx(0.25, abs=0.01)
    negative = torch.empty_like(rounded)
    round_stochastically(negative, -wide, bits, high=high)
    assert torch.equal(negative, -rounded)


def test_what_is_not_finite_stays() -> None:
    canonical = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaN on GPUs
    wide = torch.cat([torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0]), canonical])
    rounded = torch.empty(5, dtype=torch.bfloat16)
    round_stochastically(rounded, wide, torch.full((5,), -1, dtype=torch.int32))
    assert rounded[:2].tolist() == [float("inf"), -float("inf")]
    assert rounded.isnan().tolist() == [False, False, True, False, True]
    assert float(rounded[3]) == 0.0


def small_steps(rounding: str, steps: int = 200) -> float:
    """200 steps of 1e-4 from 1, each a fortieth of what bfloat16 can tell from 1."""
    param = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([("w", param)], lr=1e-4, weight_decay=0, rounding=rounding)
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return float(param.detach().double().mean())


def test_small_steps_add_up() -> None:
    assert small_steps("nearest") == 1.0
    assert small_steps("stochastic") == pytest.approx(0.98, abs=2e-4)
    assert small_steps("kahan") == pytest.approx(0.98, abs=2e-3)


def test_kahan_keeps_what_is_lost() -> None:
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-3, weight_decay=0, rounding="kahan")
    param.grad = torch.ones_like(param)
    optimizer.step()
    lost = optimizer.state[param]["compensation"]
    assert lost.dtype == torch.bfloat16
    assert float(param.detach()[0]) == 1.0
    assert float(lost[0]) == pytest.approx(-1e-3, rel=2**-8)
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        optimizer.step()
    assert float(lost[0]) == pytest.approx(-1e-3, rel=2**-8)


@roundings
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_on_any_number_of_ranks(
    make_params: MakeParams, give_grads: GiveGrads, rounding: str, world_size: int
) -> None:
    torch.manual_seed(0)
    sizes = [37, 0, 70_000, 5, 2001, 64]
    fulls = [torch.randn(n).bfloat16() for n in sizes]
    steps: list[list[Any]] = [[torch.randn(n).bfloat16() for n in sizes] for _ in range(3)]
    steps[1][3] = None
    hyper: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "rounding": rounding}
    plain = [nn.Parameter(full.clone()) for full in fulls]
    optimizer = AdamW([(f"p{i}", p) for i, p in enumerate(plain)], **hyper)
    for grads in steps:
        for param, grad in zip(plain, grads, strict=True):
            param.grad = grad
        optimizer.step()

    def rank(comm: Comm) -> list[torch.Tensor]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        mine = AdamW(params, **hyper)
        for grads in steps:
            give_grads(params, grads)
            mine.step()
        assert not recorded.records
        moments = [mine.state[p]["exp_avg_sq"].full_tensor() for p in params]
        return [p.full_tensor().detach() for p in params] + moments

    expected = [p.detach() for p in plain] + [optimizer.state[p]["exp_avg_sq"] for p in plain]
    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@roundings
def test_wider_parameters_are_updated_as_ever(rounding: str) -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(37), torch.randn(37)
    ends = []
    for each in ("nearest", rounding):
        param = nn.Parameter(start.clone())
        param.grad = grad
        AdamW([param], rounding=each).step()
        ends.append(param.detach())
    assert torch.equal(*ends)


@roundings
def test_close_to_float32(rounding: str) -> None:
    """Results of float32 up to what bfloat16 can tell apart, over steps of all sizes."""
    torch.manual_seed(0)
    start = torch.randn(512).bfloat16()
    params = [nn.Parameter(start.clone()), nn.Parameter(start.float())]
    optimizers = [
        AdamW([params[0]], lr=1e-3, betas=(0.9, 0.95), rounding=rounding),
        AdamW([params[1]], lr=1e-3, betas=(0.9, 0.95)),
    ]
    for _ in range(50):
        grad = torch.randn(512).bfloat16()
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.to(param.dtype)
            optimizer.step()
    difference = (params[0].detach().float() - params[1].detach()).abs()
    assert float((difference / params[1].detach().abs().clamp_min(0.1)).mean()) < 0.02


def test_state_of_kahan_goes_by_name_and_resumes() -> None:
    def build(param: nn.Parameter, rounding: str) -> AdamW:
        return AdamW([("w", param)], lr=1e-3, rounding=rounding)

    params = [nn.Parameter(torch.ones(8, dtype=torch.bfloat16)) for _ in range(2)]
    first, second = build(params[0], "kahan"), build(params[1], "nearest")
    params[0].grad = torch.ones_like(params[0])
    first.step()
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["rounding"] == "kahan"
    assert torch.equal(
        second.state[params[1]]["compensation"], first.state[params[0]]["compensation"]
    )
    without = first.state_dict()
    without["state"]["w"].pop("compensation")
    with pytest.raises(ValueError, match=r"^w: the state has no 'compensation'"):
        second.load_state_dict(without)


def test_bad_input() -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"^expected rounding to be one of .* got 'up'"):
        AdamW([param], rounding="up")
    half = nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"^w: expected bfloat16 .* use rounding='kahan'"):
        AdamW([("w", half)], rounding="stochastic")
