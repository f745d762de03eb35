"""ZeRO-1: any element-wise optimizer, its state cut over ranks that hold the same parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor, shard_tensor
from shard_optim import EMA, SOAP, Adafactor, AdamW, GradScaler, Lion, ShardedOptimizer
from shard_testing import TinyDecoder, run_ranks, run_threads, token_batches

SHAPES: list[tuple[int, ...]] = [(7, 5), (3,), (64,), (), (2, 3, 4), (0, 3)]

KINDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "foreach": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "centered": True, "foreach": False}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1, "foreach": False}),
    "ours": (AdamW, {"lr": 0.1}),
    "lion": (Lion, {"lr": 0.1}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
worlds = pytest.mark.parametrize("world_size", [1, 2, 3])


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(value) for value in values(0)]


def give(params: Sequence[torch.Tensor], step: int) -> None:
    for index, (param, grad) in enumerate(zip(params, values(step + 1), strict=True)):
        param.grad = None if (step, index) in ((1, 0), (0, 2)) else grad


def train(params: Sequence[torch.Tensor], optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        give(params, step)
        optimizer.step()


def groups_of(params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": [("a", params[0]), ("b", params[1])]},
        {"params": [(f"c{i}", p) for i, p in enumerate(params[2:])], "lr": 0.02},
    ]


@kinds
@worlds
def test_results_of_the_optimizer_by_itself(kind: str, world_size: int) -> None:
    cls, hyper = KINDS[kind]
    alone = parameters()
    reference = cls(groups_of(alone), **hyper)
    train(alone, reference, range(4))

    def rank(comm: Comm) -> list[torch.Tensor]:
        params = parameters()
        before = [id(p) for p in params]
        optimizer = ShardedOptimizer(groups_of(params), cls, comm=comm, **hyper)
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == before
        train(params, optimizer, range(4))
        return [p.detach().clone() for p in params]

    ranks = run_threads(rank, world_size)
    for found in ranks:
        for a, b, c in zip(found, alone, ranks[0], strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)
            assert torch.equal(a, c)


@kinds
@worlds
def test_state_by_name_resumes(kind: str, world_size: int) -> None:
    """Through the optimizer's own dictionary, and from that of the optimizer by itself."""
    cls, hyper = KINDS[kind]
    alone = parameters()
    reference = cls(groups_of(alone), **hyper)
    train(alone, reference, range(2))
    whole = copy.deepcopy(reference.state_dict())
    values_then = [p.detach().clone() for p in alone]
    train(alone, reference, range(2, 4))

    def rank(comm: Comm, through: bool) -> list[torch.Tensor]:
        params = [nn.Parameter(v.clone()) for v in values_then]
        optimizer = ShardedOptimizer(groups_of(params), cls, comm=comm, **hyper)
        optimizer.load_state_dict(whole)
        if through:
            saved = optimizer.state_dict()
            assert sorted(saved["state"]) == ["a", "b", "c0", "c1", "c2", "c3"]
            assert saved["param_groups"][1]["lr"] == 0.02
            optimizer = ShardedOptimizer(groups_of(params), cls, comm=comm, **hyper)
            template = optimizer.state_dict(allocate=True)
            assert sorted(template["state"]["a"]) == sorted(saved["state"]["a"])
            optimizer.load_state_dict(saved)
        train(params, optimizer, range(2, 4))
        return [p.detach() for p in params]

    for through in (False, True):
        for found in run_threads(rank, world_size, through):
            for a, b in zip(found, alone, strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-6, atol=1e-6)


@kinds
def test_reading_changes_nothing(kind: str) -> None:
    """Templates of all parameters made before the first step are none of the optimizer's."""
    cls, hyper = KINDS[kind]

    def rank(comm: Comm, read: bool) -> list[torch.Tensor]:
        params = parameters()
        optimizer = ShardedOptimizer(groups_of(params), cls, comm=comm, **hyper)
        if read:
            template = optimizer.state_dict(allocate=True)
            assert sorted(template["state"]) == ["a", "b", "c0", "c1", "c2", "c3"]
        train(params, optimizer, range(3))
        return [p.detach().clone() for p in params]

    read, unread = (run_threads(rank, 2, each)[0] for each in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(read, unread, strict=True))


def test_templates_hold_what_is_to_be_trained() -> None:
    for cls in (torch.optim.Adam, AdamW):
        params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        named = list(zip("abc", params, strict=True))
        optimizer = ShardedOptimizer(named, cls, comm=SoloComm())
        params[0].requires_grad_(False)  # also after the optimizer was made
        params[1].requires_grad_(False)
        assert sorted(optimizer.state_dict(allocate=True)["state"]) == ["c"]
        assert sorted(optimizer.state_dict(allocate=["b"])["state"]) == ["b", "c"]


@worlds
def test_each_rank_holds_its_share_of_the_state(world_size: int) -> None:
    def rank(comm: Comm) -> tuple[int, dict[str, tuple[int, int]]]:
        recorded = Recorded(comm)
        params = [nn.Parameter(torch.zeros(48, 10)), nn.Parameter(torch.zeros(480))]
        optimizer = ShardedOptimizer(params, torch.optim.AdamW, comm=recorded, lr=0.1)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        held = [
            value.local.untyped_storage().nbytes()
            for own in optimizer.state.values()
            for value in own.values()
            if isinstance(value, ShardTensor)
        ]
        counts = {op: (r.calls, r.payload_bytes) for op, r in recorded.records.items()}
        return sum(held), counts

    gather = {} if world_size == 1 else {"all_gather": (1, 960 * 4)}
    assert run_threads(rank, world_size) == [(2 * 960 * 4 // world_size, gather)] * world_size


@worlds
def test_in_a_training_loop(world_size: int) -> None:
    """Schedulers, a group added later, a closure, values copied in from outside."""

    def loop(params: Sequence[torch.Tensor], optimizer: Any) -> list[torch.Tensor]:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for step in range(2):
            give(params, step)
            optimizer.step()
            schedule.step()
        extra = nn.Parameter(torch.ones(5))
        optimizer.add_param_group({"params": [extra], "lr": 0.3})

        def closure() -> float:
            optimizer.zero_grad()
            loss = torch.stack([(p * p).sum() for p in [*params, extra]]).sum()
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure) > 0
        with torch.no_grad():
            params[0].fill_(2.0)
        optimizer.step(closure)
        return [p.detach().clone() for p in [*params, extra]]

    alone = parameters()
    expected = loop(alone, torch.optim.AdamW(alone, lr=0.1))

    def rank(comm: Comm) -> list[torch.Tensor]:
        params = parameters()
        return loop(params, ShardedOptimizer(params, torch.optim.AdamW, comm=comm, lr=0.1))

    for found in run_threads(rank, world_size):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_saved_tensors_notice_the_step() -> None:
    param = nn.Parameter(torch.ones(4))
    optimizer = ShardedOptimizer([param], torch.optim.SGD, comm=SoloComm(), lr=0.1)
    loss = (param * param).sum()
    param.grad = torch.ones(4)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def under_ddp(comm: Comm) -> list[float]:
    model = TinyDecoder(width=16)
    replica: Any = nn.parallel.DistributedDataParallel(model) if comm.size > 1 else model
    optimizer = ShardedOptimizer(model.named_parameters(), AdamW, comm=comm, lr=1e-2)
    average, scaler = EMA(model.named_parameters(), 0.5), GradScaler("cpu", 8.0, comm=comm)
    losses = []
    (batch,) = token_batches(1, 1)[0]
    for _ in range(4):
        optimizer.zero_grad()
        logits = replica(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update()
        losses.append(float(loss.detach()))
    with average.swapped_in():
        losses.append(float(model.loss(batch).detach()))
    return losses


def test_under_ddp_over_processes() -> None:
    alone = under_ddp(SoloComm())
    assert alone[-2] < 0.9 * alone[0]
    for losses in run_ranks(under_ddp, 2):
        assert losses == pytest.approx(alone, rel=1e-5)


class Own(torch.optim.Muon):
    """An optimizer of matrices by another name."""


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (torch.optim.Muon, "Muon; Muon of shard_optim takes these parameters and comm= itself"),
        (Own, "Own; Muon of shard_optim takes these parameters and comm= itself"),
        (SOAP, "SOAP; SOAP of shard_optim takes these parameters"),
        (torch.optim.Adafactor, "Adafactor; shard .* give them to Adafactor of shard_optim"),
        (Adafactor, "Adafactor; shard .* to Adafactor of shard_optim, or give it these"),
        (torch.optim.LBFGS, "LBFGS; shard_optim has none that does what LBFGS does"),
    ],
)
def test_optimizers_of_whole_tensors_are_refused(cls: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^expected an element-wise optimizer, got {message}"):
        ShardedOptimizer([nn.Parameter(torch.ones(2, 2))], cls, comm=SoloComm())


def test_bad_input() -> None:
    comm, param = SoloComm(), nn.Parameter(torch.ones(2, 2))
    sharded = nn.Parameter(shard_tensor(torch.ones(2), comm=comm, name="w"))
    with pytest.raises(ValueError, match=r"^w: expected a plain parameter, got a ShardTensor"):
        ShardedOptimizer([sharded], torch.optim.SGD, comm=comm)
    with pytest.raises(ValueError, match="expected at least one parameter, got none"):
        ShardedOptimizer([], torch.optim.SGD, comm=comm)
    with pytest.raises(ValueError, match=r"^0\.1: the parameter is already there as 0\.0"):
        ShardedOptimizer([param, param], torch.optim.SGD, comm=comm)
    optimizer = ShardedOptimizer([("w", param)], torch.optim.SGD, comm=comm, lr=0.1)
    with pytest.raises(TypeError, match="expected a collection of names, got 'w'"):
        optimizer.state_dict(allocate="w")
    with pytest.raises(TypeError, match="does not copy or pickle"):
        copy.deepcopy(optimizer)
    param.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=r"^w: expected a dense gradient of torch.float32"):
        optimizer.step()
    param.grad = torch.ones(2, 2)
    param.data = torch.zeros(2, 2)
    with pytest.raises(RuntimeError, match=r"^w: its memory was replaced after the optimizer was"):
        optimizer.step()


def test_state_that_does_not_fit() -> None:
    def rank(comm: Comm) -> dict[str, Any]:
        params = [nn.Parameter(torch.ones(8))]
        optimizer = ShardedOptimizer([("w", params[0])], torch.optim.AdamW, comm=comm)
        params[0].grad = torch.ones(8)
        optimizer.step()
        return optimizer.state_dict()

    halves = run_threads(rank, 2)[1]
    param = nn.Parameter(torch.ones(8))
    optimizer = ShardedOptimizer([("w", param)], torch.optim.AdamW, comm=SoloComm())
    with pytest.raises(ValueError, match=r"^w: exp_avg is a piece \[4, 8\) of another sharding"):
        optimizer.load_state_dict(halves)
    own = {"exp_avg": torch.ones(3), "step": torch.ones(())}
    wrong = {"state": {"w": own}, "param_groups": [{"params": ["w"]}]}
    with pytest.raises(ValueError, match=r"^w: expected exp_avg of shape \(8,\), got \(3,\)"):
        optimizer.load_state_dict(wrong)
    with pytest.raises(ValueError, match=r"missing \['w'\], unexpected \['v'\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": ["v"]}]})
    with pytest.raises(ValueError, match="expected 1 parameter groups, got 0; build the optimizer"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert not optimizer.state_dict()["state"]
