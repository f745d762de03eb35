"""Copies of parameters in another dtype, written along with a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from shard_comm import Comm, PlanComm, SoloComm
from shard_flat import Shadow, ShardTensor
from shard_optim import SGD, Adafactor, Adam, AdamW, AdamW8bit, Lion, Muon, Offload
from shard_optim._copies import _cut
from shard_optim._window import _WINDOW
from shard_testing import Casts, draw_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
Make = Callable[..., Any]

SHAPES = [(30, 10), (7,), (5, 5), (1000,), (3,)]
KINDS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.1, weight_decay=0.1),
    "adamw": partial(AdamW, lr=0.1),
    "lion": partial(Lion, lr=0.1),
    "on disk": partial(AdamW, lr=0.1, offload=Offload("disk", window_bytes=1 << 14)),
}
NARROW_KINDS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9),
    "stochastic": partial(AdamW, lr=0.1, rounding="stochastic"),
    "kahan": partial(AdamW, lr=0.1, rounding="kahan"),
}
OTHER_KINDS: dict[str, Make] = {
    "muon": partial(Muon, lr=0.1),
    "8bit": partial(AdamW8bit, lr=0.1),
    "adafactor": partial(Adafactor, lr=0.1),
    "torch": partial(torch.optim.AdamW, lr=0.1, fused=True),
}


@pytest.fixture(autouse=True)
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies written after every 128 elements, and windows of 256."""
    monkeypatch.setattr("shard_optim._copies._CALL_NUMEL", 128)
    monkeypatch.setitem(_WINDOW, "cpu", 256)


def shadow_over(params: Sequence[ShardTensor], dtype: torch.dtype) -> tuple[torch.Tensor, Shadow]:
    """Return the shard that all these are pieces of, and its shadow with a current copy."""
    first = params[0].piece
    numel = max(p.piece.storage_offset() + p.piece.numel() for p in params)
    shard = first.as_strided((numel,), (1,), 0)
    shadow = Shadow(shard)
    shadow.attach(shard.to(dtype), lambda: True)
    shadow.settle()
    return shard, shadow


def copy_of(shadow: Shadow) -> torch.Tensor:
    assert shadow.copy is not None
    return shadow.copy


def test_worked_example() -> None:
    parts = [torch.arange(float(numel)) for numel in (300, 100, 64)]
    steps = [torch.tensor(float(number)) for number in (1, 2, 3)]
    calls = list(_cut([parts, steps], 256))
    assert [[part.numel() for part in call[0]] for call in calls] == [[256], [44, 100, 64]]
    assert calls[1][0][0].tolist() == [*range(256, 300)]
    assert [[float(step) for step in call[1]] for call in calls] == [[1], [1, 2, 3]]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kind", KINDS)
def test_each_element_is_copied_once_and_bits_stay(
    kind: str, dtype: torch.dtype, size: int, make_params: MakeParams, give_grads: GiveGrads
) -> None:
    values, steps = draw_steps(SHAPES, torch.float32, 3)
    for rank in range(size):
        comm = PlanComm(size, rank, "cpu")
        plain, params = make_params(comm, values), make_params(comm, values)
        shard, shadow = shadow_over(params, dtype)
        expected, optimizer = KINDS[kind](plain), KINDS[kind](params)
        for grads in steps:
            give_grads(plain, grads)
            give_grads(params, grads)
            expected.step()
            with Casts(dtype) as casts:
                optimizer.step()
            assert casts.numel == sum(p.piece.numel() for p in params)
            assert shadow.is_current
            assert torch.equal(copy_of(shadow).float(), shard.to(dtype).float())
            assert all(torch.equal(a.piece, b.piece) for a, b in zip(params, plain, strict=True))


@pytest.mark.parametrize("kind", NARROW_KINDS)
def test_parameters_of_several_dtypes_have_a_copy_each(
    kind: str, make_params: MakeParams, give_grads: GiveGrads
) -> None:
    """In one group, so that one step takes kernels of both kinds."""
    wide, wide_steps = draw_steps(SHAPES, torch.float32, 2)
    narrow, narrow_steps = draw_steps(SHAPES, torch.bfloat16, 2)
    params = [make_params(SoloComm(), values) for values in (wide, narrow)]
    shards = [shadow_over(params[0], torch.bfloat16), shadow_over(params[1], torch.float16)]
    named = [(f"{i}.{j}", p) for i, part in enumerate(params) for j, p in enumerate(part)]
    optimizer = NARROW_KINDS[kind](named)
    for grads in zip(wide_steps, narrow_steps, strict=True):
        for part, each in zip(params, grads, strict=True):
            give_grads(part, each)
        optimizer.step()
        for shard, shadow in shards:
            assert shadow.is_current
            assert torch.equal(copy_of(shadow), shard.to(copy_of(shadow).dtype))


def test_two_groups_and_parameters_without_a_gradient(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    values, steps = draw_steps(SHAPES, torch.float32, 2)
    params = make_params(SoloComm(), values)
    shard, shadow = shadow_over(params, torch.bfloat16)
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=0.1)
    before = copy_of(shadow).clone()
    for grads in steps:
        give_grads(params, [*grads[:3], None, grads[4]])
        optimizer.step()
        assert shadow.is_current
        assert torch.equal(copy_of(shadow), shard.bfloat16())
    changed = copy_of(shadow) != before
    places = [p.piece.storage_offset() for p in params]
    ends = [place + p.numel() for place, p in zip(places, params, strict=True)]
    changes = [bool(changed[a:b].any()) for a, b in zip(places, ends, strict=True)]
    assert changes == [True, True, True, False, True]


HALF_WAY: dict[str, Make] = {"adamw": KINDS["adamw"], "8bit": OTHER_KINDS["8bit"]}


@pytest.mark.parametrize("kind", HALF_WAY)
def test_a_step_that_fails_half_way_is_counted_where_nothing_was_lent(
    kind: str, make_params: MakeParams, give_grads: GiveGrads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels count no change themselves."""
    values, steps = draw_steps([4096, 4096], torch.float32, 1)
    params = make_params(SoloComm(), values)
    shard, shadow = shadow_over(params, torch.bfloat16)
    shadow.attach(copy_of(shadow), lambda: False)  # somebody reads it
    shadow.settle()
    before = shard.clone()
    give_grads(params, steps[0])
    optimizer = HALF_WAY[kind](params)
    kernel, calls = torch._fused_adamw_, []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        kernel(*args, **kwargs)
        calls.append(len(args[0]))
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_fused_adamw_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(calls) == 1
    assert not torch.equal(shard, before)
    assert not shadow.is_current


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_optimizers_leave_the_copy_behind(
    kind: str, make_params: MakeParams, give_grads: GiveGrads
) -> None:
    values, steps = draw_steps([(80, 80), (7,)], torch.float32, 1)
    params = make_params(SoloComm(), values)
    _, shadow = shadow_over(params, torch.bfloat16)
    give_grads(params, steps[0])
    OTHER_KINDS[kind](params).step()
    assert not shadow.is_current


def test_a_copy_that_is_behind_stays_so(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """Who brings it up to date copies all of it, so a step copies nothing."""
    values, steps = draw_steps(SHAPES, torch.float32, 1)
    params = make_params(SoloComm(), values)
    _, shadow = shadow_over(params, torch.bfloat16)
    with torch.no_grad():
        params[3].add_(1)
    give_grads(params, steps[0])
    with Casts(torch.bfloat16) as casts:
        AdamW(params).step()
    assert casts.numel == 0
    assert not shadow.is_current


def test_a_step_that_fails_half_way_leaves_the_copy_behind(
    make_params: MakeParams, give_grads: GiveGrads, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, steps = draw_steps(SHAPES, torch.float32, 1)
    params = make_params(SoloComm(), values)
    _, shadow = shadow_over(params, torch.bfloat16)
    give_grads(params, steps[0])
    optimizer = AdamW(params)
    kernel, calls = torch._fused_adamw_, []

    def failing(*args: Any, **kwargs: Any) -> None:
        calls.append(len(args[0]))
        if len(calls) == 3:
            raise OSError("no more")
        kernel(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_fused_adamw_", failing)
        with pytest.raises(OSError, match="no more"):
            optimizer.step()
    assert not shadow.is_current
    optimizer.step()
    assert not shadow.is_current
