"""State dictionaries: names, sharing, loading, and the cases O1 to O4 of the field."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor, shard_tensor
from shard_optim import AdamW
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def gathered(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, ShardTensor) else value


def snapshot(state: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    return {
        name: {slot: gathered(value).clone().reshape(-1).tolist() for slot, value in own.items()}
        for name, own in state["state"].items()
    }


@worlds
@pytest.mark.parametrize("export", [False, True])
@pytest.mark.parametrize("allocate", [False, True])
def test_o1_reading_changes_nothing(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int, export: bool, allocate: bool
) -> None:
    def rank(comm: Comm) -> list[float]:
        (param,) = make_params(comm, [torch.ones(5)])
        optimizer = AdamW([param], lr=0.1, weight_decay=0)
        if export:
            optimizer.state_dict(allocate=allocate)
        give_grads([param], [torch.ones(5)])
        optimizer.step()
        if export:
            optimizer.state_dict(allocate=allocate)
        return param.full_tensor().tolist()

    for values in run_threads(rank, world_size):
        assert values == pytest.approx([0.9] * 5, abs=1e-6)


@worlds
def test_o2_loading_while_gradients_exist(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int
) -> None:
    def rank(comm: Comm) -> None:
        params = make_params(comm, [torch.ones(5), torch.ones(2, 3)])
        optimizer = AdamW(params, lr=0.1, weight_decay=0)
        give_grads(params, [torch.ones(5), torch.ones(2, 3)])
        optimizer.step()
        saved = optimizer.state_dict()
        grads = [param.grad for param in params]
        fresh = AdamW(params, lr=0.7)
        fresh.load_state_dict(saved)
        for param, grad in zip(params, grads, strict=True):
            assert param.grad is grad
            assert grad is not None
            assert gathered(grad).eq(1).all()
            own = fresh.state[param]
            torch.testing.assert_close(gathered(own["exp_avg"]), torch.full(param.shape, 0.1))
            torch.testing.assert_close(gathered(own["exp_avg_sq"]), torch.full(param.shape, 0.001))
            assert float(own["step"]) == 1
        assert fresh.param_groups[0]["lr"] == 0.1
        fresh.step()
        assert float(fresh.state[params[0]]["step"]) == 2
        assert float(optimizer.state[params[0]]["step"]) == 1  # copied, not shared

    run_threads(rank, world_size)


@worlds
def test_o3_frozen_after_training(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int
) -> None:
    """State outlives freezing; a parameter frozen from the start never has any."""

    def rank(comm: Comm) -> None:
        trained, never, live = make_params(comm, [torch.ones(5), torch.ones(4), torch.ones(3)])
        never.requires_grad_(False)
        params = [trained, never, live]
        optimizer = AdamW(params, lr=0.1)
        give_grads(params, [torch.ones(5), None, torch.ones(3)])
        optimizer.step()
        trained.requires_grad_(False)
        give_grads(params, [None, None, torch.ones(3)])
        optimizer.step()
        saved = optimizer.state_dict(allocate=True)
        assert sorted(saved["state"]) == ["p0", "p2"]
        assert [float(saved["state"][n]["step"]) for n in ("p0", "p2")] == [1, 2]
        fresh = AdamW(params, lr=0.1)
        fresh.load_state_dict(saved)
        assert snapshot(fresh.state_dict()) == snapshot(saved)
        assert never not in fresh.state
        trained.requires_grad_(True)
        for each in (optimizer, fresh):
            give_grads(params, [torch.ones(5), None, torch.ones(3)])
            each.step()
        assert snapshot(fresh.state_dict()) == snapshot(optimizer.state_dict())
        assert float(fresh.state[trained]["step"]) == 2

    run_threads(rank, world_size)


@worlds
def test_templates_hold_frozen_parameters_that_are_named(
    make_params: MakeParams, world_size: int
) -> None:
    def rank(comm: Comm) -> None:
        for names, expected in (
            (True, ["p2"]),
            ((), ["p2"]),
            (["p0", "elsewhere"], ["p0", "p2"]),
            ({"p0", "p1", "p2"}, ["p0", "p1", "p2"]),
            (False, []),
        ):
            params = make_params(comm, [torch.ones(5), torch.ones(4), torch.ones(3)])
            for param in params[:2]:
                param.requires_grad_(False)
            optimizer = AdamW(params)
            template = optimizer.state_dict(allocate=names)
            assert sorted(template["state"]) == expected
            assert all(float(own["step"]) == 0 for own in template["state"].values())
        with pytest.raises(TypeError, match="expected a collection of names, got 'p0'"):
            optimizer.state_dict(allocate="p0")
        assert not optimizer.state

    run_threads(rank, world_size)


@worlds
def test_o4_one_empty_group_among_several(make_params: MakeParams, world_size: int) -> None:
    def rank(comm: Comm) -> list[tuple[Any, ...]]:
        first, last = make_params(comm, [torch.ones(5), torch.ones(4)])

        def build(**hyper: Any) -> AdamW:
            groups: list[dict[str, Any]] = [
                {"params": [first], **hyper},
                {"params": []},
                {"params": [last]},
            ]
            return AdamW(groups, lr=0.5)

        optimizer = build(lr=0.1, betas=(0.5, 0.6))
        optimizer.param_groups[1].update(lr=0.2, betas=(0.7, 0.8), eps=1e-3)
        optimizer.param_groups[2].update(weight_decay=0.3)
        fresh = build()
        fresh.load_state_dict(optimizer.state_dict())
        fresh.step()
        keys = ("lr", "betas", "eps", "weight_decay")
        return [tuple(group[key] for key in keys) for group in fresh.param_groups]

    expected = [
        (0.1, (0.5, 0.6), 1e-8, 0.01),
        (0.2, (0.7, 0.8), 1e-3, 0.01),
        (0.5, (0.9, 0.999), 1e-8, 0.3),
    ]
    assert run_threads(rank, world_size) == [expected] * world_size


def test_names(make_params: MakeParams) -> None:
    """Given names win; shards know theirs; the rest go by position."""
    (sharded,) = make_params(SoloComm(), [torch.ones(2)])
    plain, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    unnamed = AdamW([{"params": [plain, sharded]}, {"params": [other]}])
    groups = unnamed.state_dict()["param_groups"]
    assert [group["params"] for group in groups] == [["0.0", "p0"], ["1.0"]]
    named = AdamW([("layer.weight", plain), ("renamed", sharded)])
    state = named.state_dict(allocate=True)
    assert state["param_groups"][0]["params"] == ["layer.weight", "renamed"]
    assert "param_names" not in state["param_groups"][0]
    assert sorted(state["state"]) == ["layer.weight", "renamed"]
    assert sorted(state["state"]["renamed"]) == ["exp_avg", "exp_avg_sq", "step"]
    moment = state["state"]["renamed"]["exp_avg"]
    assert isinstance(moment, ShardTensor)
    assert moment.spec is sharded.spec
    assert state["state"]["layer.weight"]["step"].dtype == torch.float32
    assert state["state"]["layer.weight"]["step"].shape == ()


def test_no_state_before_the_first_gradient() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = AdamW(params)
    assert optimizer.state_dict()["state"] == {}
    params[0].grad = torch.ones(2)
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == ["0.0"]
    assert params[1] not in optimizer.state


def test_a_state_dict_shares_memory(make_params: MakeParams, give_grads: GiveGrads) -> None:
    params = make_params(SoloComm(), [torch.zeros(16), torch.zeros(16)])
    optimizer = AdamW(params, lr=0.1, weight_decay=0)
    give_grads(params, [torch.zeros(16), torch.zeros(16)])
    optimizer.step()
    state = optimizer.state_dict()["state"]
    state["p1"]["exp_avg"].fill_(1.0)
    state["p1"]["exp_avg_sq"].fill_(4.0)
    state["p1"]["step"].numpy().fill(1000)  # unseen by autograd
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1001]
    assert params[0].local.eq(0).all()
    square = 4.0 * 0.999 / (1 - 0.999**1001)
    expected = -0.1 * 0.9 / square**0.5
    torch.testing.assert_close(params[1].local, torch.full((16,), expected))
    state["p1"]["exp_avg"].fill_(-1.0)  # moments stay shared
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[1]]["exp_avg"].local, torch.full((16,), -0.9))


@worlds
def test_filling_a_fresh_optimizer_in_place_resumes(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int
) -> None:
    """What a checkpoint does: allocate, write into the tensors, step; the same bits go on."""

    torch.manual_seed(0)
    fulls = [torch.randn(37), torch.randn(3, 5), torch.randn(())]
    grads: list[list[torch.Tensor | None]] = [
        [torch.randn(full.shape) for full in fulls] for _ in range(6)
    ]
    grads[1][1] = None

    def rank(comm: Comm) -> None:
        params = make_params(comm, fulls)
        optimizer = AdamW(params, lr=0.1)
        for step in grads[:3]:
            give_grads(params, step)
            optimizer.step()
        twins = make_params(comm, [p.full_tensor().detach() for p in params])
        resumed = AdamW(twins, lr=0.1)
        template = resumed.state_dict(allocate=True)
        assert all(float(own["step"]) == 0 for own in template["state"].values())
        with torch.no_grad():
            for name, own in optimizer.state_dict()["state"].items():
                for slot, value in own.items():
                    template["state"][name][slot].copy_(value)
        for step in grads[3:]:
            for each, each_params in ((optimizer, params), (resumed, twins)):
                give_grads(each_params, step)
                each.step()
        assert [float(resumed.state[t]["step"]) for t in twins] == [6, 5, 6]
        for param, twin in zip(params, twins, strict=True):
            assert torch.equal(param.full_tensor(), twin.full_tensor())
        assert snapshot(resumed.state_dict()) == snapshot(optimizer.state_dict())

    run_threads(rank, world_size)


def train_torch(values: list[torch.Tensor], **hyper: Any) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(v.clone()) for v in values]
    optimizer = torch.optim.AdamW(params, fused=True, **hyper)
    for step in range(3):
        for i, param in enumerate(params):
            param.grad = torch.full_like(param, 0.1 + i + step)
        optimizer.step()
    return params, optimizer


def test_from_torch_and_back() -> None:
    """A run may change optimizers between steps, in both directions, without a trace."""
    values = [torch.linspace(-1, 1, 32), torch.linspace(0, 1, 48).view(3, 16)]
    params, theirs = train_torch(values, lr=0.1, betas=(0.8, 0.9))
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    ours = AdamW(twins)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["betas"] == (0.8, 0.9)
    assert not {"amsgrad", "fused", "foreach", "maximize"} & set(ours.param_groups[0])
    for every in (params, twins):
        for param in every:
            param.grad = torch.full_like(param, -0.3)
    theirs.step()
    ours.step()
    back = torch.optim.AdamW(twins, fused=True)
    back.load_state_dict(ours.state_dict())
    assert back.param_groups[0]["lr"] == 0.1
    theirs.step()
    back.step()
    assert all(torch.equal(p, t) for p, t in zip(params, twins, strict=True))
    assert float(back.state[twins[0]]["step"]) == 5


@worlds
def test_a_sharded_optimizer_takes_torchs_full_state(
    make_params: MakeParams, world_size: int
) -> None:
    values = [torch.linspace(-1, 1, 37), torch.linspace(0, 1, 15).view(3, 5)]
    trained, theirs = train_torch(values, lr=0.1)

    def rank(comm: Comm) -> None:
        params = make_params(comm, [p.detach() for p in trained])
        optimizer = AdamW(params)
        optimizer.load_state_dict(theirs.state_dict())
        for param, full in zip(params, trained, strict=True):
            for slot in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[param][slot]
                assert isinstance(moment, ShardTensor)
                assert torch.equal(moment.full_tensor(), theirs.state[full][slot])
            assert float(optimizer.state[param]["step"]) == 3

    run_threads(rank, world_size)


def test_torchs_named_state_goes_by_name() -> None:
    """Positions differ, shapes agree: by position each would get the other's moments."""
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    theirs = torch.optim.AdamW([("a", params[0]), ("b", params[1])])
    params[0].grad, params[1].grad = torch.ones(2), torch.full((2,), 10.0)
    theirs.step()
    ours = AdamW([("b", params[1]), ("a", params[0])])
    ours.load_state_dict(theirs.state_dict())
    assert float(ours.state[params[0]]["exp_avg"][0]) == pytest.approx(0.1)
    assert float(ours.state[params[1]]["exp_avg"][0]) == pytest.approx(1.0)
    with pytest.raises(ValueError, match=r"group 0: missing \['c'\], unexpected \['b'\]"):
        AdamW([("a", params[0]), ("c", params[1])]).load_state_dict(theirs.state_dict())


def test_order_within_a_group_does_not_matter() -> None:
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    first = AdamW([("a", params[0]), ("b", params[1])])
    params[0].grad, params[1].grad = torch.ones(2), torch.full((2,), 10.0)
    first.step()
    second = AdamW([("b", params[1]), ("a", params[0])])
    second.load_state_dict(first.state_dict())
    assert float(second.state[params[1]]["exp_avg"][0]) == pytest.approx(1.0)


def test_state_that_is_absent_is_dropped() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = AdamW([param], lr=0.1)
    fresh = optimizer.state_dict()
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(fresh)
    assert param not in optimizer.state
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 1


def test_loading_keeps_memory_and_copies_hyper_parameters() -> None:
    """Moments are filled where they are; a tensor learning rate is not shared afterwards."""
    param = nn.Parameter(torch.zeros(16))
    param.grad = torch.ones(16)
    source, target = (AdamW([param], lr=torch.tensor(0.1)) for _ in range(2))
    source.step()
    target.step()
    address = target.state[param]["exp_avg"].data_ptr()
    target.load_state_dict(source.state_dict())
    assert target.state[param]["exp_avg"].data_ptr() == address
    source.param_groups[0]["lr"].fill_(5.0)
    assert float(target.param_groups[0]["lr"]) == pytest.approx(0.1)


def test_loading_its_own_state_changes_nothing(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    params = make_params(SoloComm(), [torch.ones(5), torch.ones(20)])
    optimizer = AdamW(params, lr=0.1)
    give_grads(params, [torch.ones(5), torch.full((20,), 2.0)])
    optimizer.step()
    before = snapshot(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert snapshot(optimizer.state_dict()) == before


def test_plain_state_survives_torch_save() -> None:
    param = nn.Parameter(torch.zeros(4))
    param.grad = torch.ones(4)
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = AdamW([param])
    other.load_state_dict(torch.load(file, weights_only=True))
    assert snapshot(other.state_dict()) == snapshot(optimizer.state_dict())


def test_names_follow_a_runtime_that_renames() -> None:
    """A shard's name is read when it is needed, not when the optimizer was made."""
    sharded = shard_tensor(torch.ones(4), comm=SoloComm(), name="weight")
    param = nn.Parameter(sharded)
    optimizer = AdamW([param])
    assert isinstance(param, ShardTensor)
    param.spec = type(param.spec)("layers.0.weight", (4,), 0, 4, 0, 4)
    assert optimizer.state_dict()["param_groups"][0]["params"] == ["layers.0.weight"]
