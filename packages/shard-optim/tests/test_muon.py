"""Muon: the bits of one rank on any number of ranks, little traffic, equal loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ParamSpec, ShardTensor, plan_layout, shard_tensor
from shard_optim import AdamW, Muon, _routes
from shard_optim._newton import orthogonalized
from shard_testing import draw_steps, run_ranks, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (40, 24), (2, 3, 4), (24, 40), (), (64, 8), (0, 4)]
HYPER: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, steps)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def train(fulls: Sequence[torch.Tensor], steps: Any, **hyper: Any) -> tuple[list[Any], Muon]:
    return take_steps(partial(Muon, **hyper), fulls, steps)


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape).bfloat16()
    result = orthogonalized(matrix, coefficients=COEFFICIENTS, steps=5, eps=1e-7)
    assert result.shape == shape
    values = torch.linalg.svdvals(result.float())
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix.float(), full_matrices=False)
    assert float((result.float() * (left @ right)).sum()) / min(shape) > 0.8


def test_one_step_of_the_iteration_by_hand() -> None:
    """A diagonal of 3 and 4 has norm 5; 0.6 and 0.8 go through a s + b s**3 + c s**5."""
    result = orthogonalized(
        torch.diag(torch.tensor([3.0, 4.0])).bfloat16(),
        coefficients=(2.0, -1.5, 0.5),
        steps=1,
        eps=0.0,
    )
    expected = [2 * s - 1.5 * s**3 + 0.5 * s**5 for s in (0.6, 0.8)]
    assert result.diagonal().tolist() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    "extra", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"ns_steps": 3}]
)
def test_close_to_torch(extra: dict[str, Any]) -> None:
    """Torch iterates in bfloat16 too; steps agree to what that can tell apart."""
    torch.manual_seed(0)
    values = [torch.randn(7, 5), torch.randn(30, 40), torch.randn(64, 16)]
    ours, theirs = ([nn.Parameter(v.clone()) for v in values] for _ in "ab")
    mine = Muon(ours, lr=0.1, weight_decay=0.1, **extra)
    other = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, **extra)
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        mine.step()
        other.step()
    for a, b, value in zip(ours, theirs, values, strict=True):
        assert float((a - b).detach().norm() / (b.detach() - value).norm()) < 0.02


def test_everything_else_is_adamws() -> None:
    fulls, steps = data(torch.float32, 3)
    params, _ = train(fulls, steps, **HYPER, betas=(0.8, 0.9))
    twins = [nn.Parameter(full.clone()) for full in fulls]
    adamw = AdamW(twins, lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    for grads in steps:
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad
        adamw.step()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin) == (param.ndim != 2 or not param.numel())
    table, whole = nn.Parameter(fulls[2].clone()), nn.Parameter(fulls[2].clone())
    table.grad = whole.grad = steps[0][2]
    Muon([{"params": [table], "elementwise": True, "lr": 0.5}]).step()
    AdamW([whole], lr=0.5, weight_decay=0.1).step()
    assert torch.equal(table, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("round_numel", [1 << 24, 500])
def test_bits_of_one_rank(
    make_params: MakeParams,
    give_grads: GiveGrads,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    world_size: int,
    round_numel: int,
) -> None:
    """In one round and in several, also after a state dictionary on the way."""
    monkeypatch.setattr(_routes, "_ROUND_NUMEL", round_numel)
    fulls, steps = data(dtype, 4)
    params, plain = train(fulls, steps, **HYPER)
    expected = [p.detach() for p in params]
    expected.append(plain.state[params[2]]["momentum_buffer"])

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls)
        first = Muon(sharded, **HYPER)
        for grads in steps[:2]:
            give_grads(sharded, grads)
            first.step()
        twins = make_params(comm, [p.full_tensor().detach() for p in sharded])
        second = Muon(twins)
        second.state_dict(allocate=True)
        second.load_state_dict(first.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            second.step()
        buffer = second.state[twins[2]]["momentum_buffer"].full_tensor()
        return [*(p.full_tensor().detach() for p in twins), buffer]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def decoder_params(comm: Comm, blocks: int) -> list[ShardTensor]:
    """Matrices of a decoder, one layout per block as a runtime makes them, with gradients."""
    shapes = [(96, 32), (32, 32), (128, 32), (128, 32), (32, 128)]
    params: list[ShardTensor] = []
    for block in range(blocks):
        specs = [ParamSpec(f"{block}.{i}", s, torch.float32) for i, s in enumerate(shapes)]
        layout = plan_layout(specs, comm.size)
        for index, piece in enumerate(layout.pieces(comm.rank)):
            spec = layout.shard_spec(comm.rank, index)
            param = nn.Parameter(ShardTensor(torch.ones(piece.numel), spec, comm=comm))
            assert isinstance(param, ShardTensor)
            param.grad = param.like(torch.ones(piece.numel))
            params.append(param)
    return params


@pytest.mark.parametrize("world_size", [2, 4])
def test_traffic_is_counted(world_size: int) -> None:
    """All ranks together send less than twice the bytes of all matrices."""

    def rank(comm: Comm) -> tuple[int, int, int]:
        recorded = Recorded(comm)
        params = decoder_params(recorded, 8)
        optimizer = Muon(params, lr=0.1)
        optimizer.step()
        recorded.reset()
        optimizer.step()
        assert set(recorded.records) == {"all_reduce", "all_to_all"}
        assert recorded.records["all_reduce"].calls == 1
        record = recorded.records["all_to_all"]
        return record.calls, record.payload_bytes, sum(p.numel() * 4 for p in params)

    counts = run_threads(rank, world_size)
    assert {calls for calls, _, _ in counts} == {2}
    assert sum(sent for _, sent, _ in counts) <= 2 * counts[0][2]


def over_gloo(comm: Comm) -> list[float]:
    params = decoder_params(comm, 3)
    optimizer = Muon(params, lr=0.1, weight_decay=0.0)
    for _ in range(2):
        optimizer.step()
    return [float(p.full_tensor().detach().double().sum()) for p in params]


def test_over_processes() -> None:
    alone = over_gloo(SoloComm())
    assert run_ranks(over_gloo, 2) == [alone] * 2
    assert alone[0] != 96 * 32


def test_a_small_language_model(train_decoder: TrainDecoder) -> None:
    def build(params: Sequence[torch.Tensor]) -> Muon:
        groups = [
            {"params": params[1:-1]},
            {"params": [params[0], params[-1]], "elementwise": True, "lr": 0.01},
        ]
        return Muon(groups, lr=0.02, weight_decay=0.0)

    plain = train_decoder(None, build)
    assert plain[-1] < 0.5 * plain[0]
    assert run_threads(train_decoder, 3, build) == [plain] * 3


def test_state_of_torch_goes_on_here() -> None:
    param = nn.Parameter(torch.randn(4, 6))
    theirs = torch.optim.Muon([param], lr=0.3, momentum=0.8)
    param.grad = torch.randn(4, 6)
    theirs.step()
    ours = Muon([param])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["momentum"] == 0.8
    assert torch.equal(ours.state[param]["momentum_buffer"], theirs.state[param]["momentum_buffer"])
    ours.step()
    assert float(ours.state[param]["step"]) == 2


def test_a_gradient_on_some_ranks_only(make_params: MakeParams) -> None:
    def rank(comm: Comm) -> None:
        first, second = make_params(comm, [torch.ones(4, 4), torch.ones(4, 4)])
        first.grad = first.like(torch.ones_like(first.local))
        if comm.rank == 1:
            second.grad = second.like(torch.ones_like(second.local))
        with pytest.raises(ValueError, match=r"^p1: expected a gradient on all ranks"):
            Muon([first, second]).step()
        assert first.local.eq(1).all()

    run_threads(rank, 2)


class Gathering:
    """As much of a comm as a sharded tensor needs."""

    rank, size = 0, 1

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        out.copy_(inp)

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None: ...


def test_bad_input() -> None:
    sharded = nn.Parameter(shard_tensor(torch.ones(2, 2), comm=Gathering(), name="w"))
    with pytest.raises(ValueError, match=r"^w: expected a comm of shard_comm, .* elementwise=True"):
        Muon([sharded])
    Muon([{"params": [sharded], "elementwise": True}])
    with pytest.raises(ValueError, match=r"^v: expected rows side by side in memory, got strides"):
        Muon([("v", nn.Parameter(torch.ones(4, 2).t()))])
    with pytest.raises(TypeError, match=r"expected hyper-parameters among .* got \['beta'\]"):
        Muon([nn.Parameter(torch.ones(2, 2))], beta=0.9)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"momentum": 1.0}, r"expected momentum in \[0, 1\), got 1.0"),
        ({"adjust_lr_fn": "x"}, r"expected adjust_lr_fn to be one of .* got 'x'"),
        ({"ns_steps": 0}, "expected ns_steps >= 1, got 0"),
        ({"ns_coefficients": (1.0,)}, r"expected three ns_coefficients, got \(1.0,\)"),
        ({"adam_eps": -1.0}, "expected adam_eps >= 0, got -1.0"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Muon([nn.Parameter(torch.ones(2, 2))], **hyper)
