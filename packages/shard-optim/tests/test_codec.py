"""State of AdamW in AdamW8bit, and the other way round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm
from shard_flat import ShardTensor
from shard_optim import SGD, SOAP, Adafactor, Adam, AdamW, AdamW8bit, Lion, Muon, Offload
from shard_optim._cuts import cut_blocks
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

SHAPES: list[int | tuple[int, ...]] = [(70, 60), 5, 9001]
worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def whole(optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: {
            key: value.full_tensor() if isinstance(value, ShardTensor) else value.clone()
            for key, value in own.items()
        }
        for name, own in optimizer.state_dict()["state"].items()
    }


@worlds
def test_there_and_back(make_params: MakeParams, give_grads: GiveGrads, world_size: int) -> None:
    """Codes made of moments are those of one rank, as near as codes are; made again, alike."""
    values, steps = draw_steps(SHAPES, torch.float32, 3)

    def rank(comm: Comm) -> tuple[Any, Any]:
        params = make_params(comm, values)
        assert comm.size == 1 or any(cut_blocks(p.spec, comm.size) for p in params)
        exact = AdamW(params, lr=0.1)
        for grads in steps:
            give_grads(params, grads)
            exact.step()
        coded, back, again = AdamW8bit(params), AdamW(params), AdamW8bit(params)
        coded.load_state_dict(exact.state_dict())
        assert coded.param_groups[0]["lr"] == 0.1
        back.load_state_dict(coded.state_dict())
        again.load_state_dict(back.state_dict())
        found, moments, codes = whole(coded), whole(back), whole(again)
        for name, own in whole(exact).items():
            assert float(found[name]["step"]) == float(moments[name]["step"]) == 3
            top = own["exp_avg"].abs().amax()
            torch.testing.assert_close(
                moments[name]["exp_avg"], own["exp_avg"], rtol=0, atol=float(top) / 120
            )
            torch.testing.assert_close(
                moments[name]["exp_avg_sq"], own["exp_avg_sq"], rtol=0.06, atol=0
            )
            for key, value in found[name].items():
                again_there = codes[name][key]
                if value.is_floating_point():  # a scale, back from the number of the largest code
                    torch.testing.assert_close(again_there, value, rtol=1e-6, atol=0)
                else:
                    assert torch.equal(again_there, value)
        assert found["p0"]["exp_avg"].dtype == torch.int8
        assert found["p1"]["exp_avg"].dtype == torch.float32  # too small for codes
        return found, moments

    (alone,) = run_threads(rank, 1)
    for found in run_threads(rank, world_size):
        for mine, theirs in zip(found, alone, strict=True):
            for name, own in theirs.items():
                assert all(torch.equal(mine[name][key], value) for key, value in own.items())


@worlds
def test_full_tensors_need_no_other_rank(make_params: MakeParams, world_size: int) -> None:
    """What torch's AdamW or a run on one rank saved: the same codes and moments, nothing sent."""
    values, steps = draw_steps(SHAPES, torch.float32, 2)
    plain, theirs = take_steps(lambda p: torch.optim.AdamW(p, lr=0.1), values, steps)
    alone = AdamW8bit([(f"p{i}", p) for i, p in enumerate(plain)])
    alone.load_state_dict(theirs.state_dict())
    saved = alone.state_dict()
    decoded = AdamW([(f"p{i}", p) for i, p in enumerate(plain)])
    decoded.load_state_dict(saved)

    def rank(comm: Comm) -> None:
        if comm.rank:  # the others would be missed in a collective
            params = make_params(comm, values)
            coded, back = AdamW8bit(params), AdamW(params)
            coded.load_state_dict(theirs.state_dict())
            back.load_state_dict(saved)
            for param, name in zip(params, ("p0", "p1", "p2"), strict=True):
                for optimizer, full in ((coded, saved), (back, decoded.state_dict())):
                    for key, value in optimizer.state[param].items():
                        wanted = full["state"][name][key]
                        if isinstance(value, ShardTensor):
                            wanted = wanted.reshape(-1)[value.spec.start : value.spec.stop]
                            value = value.local
                        assert torch.equal(value, wanted), (name, key)

    run_threads(rank, world_size)


def test_a_run_goes_on(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """A step after the change is AdamW's up to what codes tell apart, offloaded or not."""
    values, steps = draw_steps([(70, 60)], torch.float32, 4)
    (expected,), trained = take_steps(lambda p: AdamW(p, lr=0.1), values, steps[:3])
    saved = trained.state_dict()
    twins = [nn.Parameter(expected.detach().clone()) for _ in range(2)]
    coded, wide = AdamW8bit([twins[0]]), AdamW([twins[1]], offload=Offload("disk"))
    coded.load_state_dict(saved)
    wide.load_state_dict(coded.state_dict())
    for param, optimizer in ((expected, trained), (twins[0], coded), (twins[1], wide)):
        param.grad = steps[3][0].clone()
        optimizer.step()
    for twin in twins:
        torch.testing.assert_close(twin, expected, rtol=0, atol=0.02)
        assert not torch.equal(twin, expected)
    torch.testing.assert_close(twins[0], twins[1], rtol=1e-5, atol=1e-6)


def test_other_orders_of_memory() -> None:
    """A parameter that is transposed in memory has its codes in that order."""
    value = torch.linspace(-1, 1, 6000).view(60, 100)
    turned, straight = nn.Parameter(value.T), nn.Parameter(value.clone())
    exact = AdamW([turned])
    turned.grad = value.T.clone()
    exact.step()
    coded, flat = AdamW8bit([turned]), AdamW8bit([straight])
    coded.load_state_dict(exact.state_dict())
    contiguous = {
        key: (own.T.contiguous() if own.ndim else own) for key, own in exact.state[turned].items()
    }
    state = exact.state_dict()
    flat.load_state_dict({**state, "state": {"0.0": contiguous}})
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(coded.state[turned][key].T, flat.state[straight][key])
        scale = f"{key}_scale"
        assert torch.equal(coded.state[turned][scale], flat.state[straight][scale])
    back = AdamW([turned])
    back.load_state_dict(coded.state_dict())
    torch.testing.assert_close(
        back.state[turned]["exp_avg"], exact.state[turned]["exp_avg"], rtol=0.05, atol=1e-3
    )


OTHERS: dict[str, Callable[[Any], Any]] = {
    "Adam or AdamW": AdamW,
    "AdamW8bit": AdamW8bit,
    "AdamW with rounding='kahan'": lambda p: AdamW(p, rounding="kahan"),
    "Lion": Lion,
    "SGD or Muon": lambda p: SGD(p, momentum=0.9),
    "Adafactor": Adafactor,
}


@pytest.mark.parametrize(
    ("make", "kind", "theirs"),
    [
        (Adam, "Adam", "AdamW8bit"),
        (AdamW, "AdamW", "SGD or Muon"),
        (AdamW, "AdamW", "Adafactor"),
        (AdamW, "AdamW", "Lion"),
        (AdamW8bit, "AdamW8bit", "SGD or Muon"),
        (AdamW8bit, "AdamW8bit", "Lion"),
        (Lion, "Lion", "AdamW8bit"),
        (Lion, "Lion", "SGD or Muon"),
        (Adafactor, "Adafactor", "Adam or AdamW"),
        (Muon, "Muon", "Adafactor"),
        (SOAP, "SOAP", "AdamW8bit"),
        (lambda p: AdamW(p, rounding="kahan"), "AdamW", "AdamW8bit"),
    ],
)
def test_anything_else_names_both(make: Any, kind: str, theirs: str) -> None:
    param = nn.Parameter(torch.ones(80, 80, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    source = OTHERS[theirs]([("w", param)])
    source.step()
    target = make([("w", param)])
    message = rf"^w: .*: it is that of {theirs}, and this is {kind}$"
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(source.state_dict())
    assert target.state_dict()["state"] == {}
