"""Shampoo: what plain torch makes of its paper, the bits of one rank on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import SOAP, AdamW, Shampoo
from shard_optim._eigen import eigen
from shard_optim._factors import FactorSlot, blocks_of, inverse_root, split_evenly
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SHAPES: list[tuple[int, ...]] = [(7, 5), (33,), (16, 24), (2, 3, 4), (24, 10), (), (0, 4)]
HYPER: dict[str, Any] = {
    "lr": 0.02,
    "weight_decay": 0.1,
    "precondition_frequency": 2,
    "max_preconditioner_dim": 10,
}


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, steps)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def train(fulls: Sequence[torch.Tensor], steps: Any, **hyper: Any) -> tuple[list[Any], Shampoo]:
    return take_steps(partial(Shampoo, **hyper), fulls, steps)


def test_worked_example() -> None:
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = Shampoo(
        [param],
        lr=1.0,
        betas=(0.0, 0.0),
        weight_decay=0.0,
        precondition_frequency=1,
        grafting=None,
        shampoo_beta=1,
        ridge=0.0,
    )
    for expected in (1.0, 1 + 2**-0.5):
        param.grad = torch.diag(torch.tensor([2.0, 3.0]))
        optimizer.step()
        torch.testing.assert_close(param.detach(), -expected * torch.eye(2))
    torch.testing.assert_close(
        optimizer.state[param]["left"][0], torch.diag(torch.tensor([8.0, 18]))
    )


def reference(
    value: torch.Tensor, grads: Sequence[torch.Tensor], *, grafting: str | None
) -> torch.Tensor:
    """Shampoo of one matrix in float64 as its papers say it, with roots at steps 1, 2, 4, ..."""
    value, first = value.double(), torch.zeros_like(value, dtype=torch.float64)
    left, right = (torch.zeros(n, n).double() for n in value.shape)
    second = torch.zeros_like(first)
    roots: list[torch.Tensor] = []
    for t, grad in enumerate((g.double() for g in grads), 1):
        first = 0.8 * first + 0.2 * grad
        second = 0.9 * second + 0.1 * grad**2
        left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
        if t == 1 or t % 2 == 0:
            roots = []
            for square in (left, right):
                u, s, _ = torch.linalg.svd(square / (1 - 0.95**t))
                roots.append(u @ torch.diag((s + 1e-3 * s.max()) ** -0.25) @ u.T)
        mean = first / (1 - 0.8**t)
        step = roots[0] @ mean @ roots[1]
        if grafting is not None:
            scale = ((second / (1 - 0.9**t)).sqrt() + 1e-8) if grafting == "adam" else 1.0
            step *= (mean / scale).norm() / step.norm()
        value = value * (1 - 0.1 * 0.2) - 0.1 * step
    return value


@pytest.mark.parametrize("grafting", ["adam", "sgd", None])
def test_it_is_what_the_papers_say(grafting: str | None) -> None:
    (value,), steps = draw_steps([(9, 6)], torch.float32, 5)
    params, _ = take_steps(
        partial(
            Shampoo,
            lr=0.1,
            betas=(0.8, 0.9),
            weight_decay=0.2,
            precondition_frequency=2,
            shampoo_beta=0.95,
            grafting=grafting,
            ridge=1e-3,
        ),
        [value],
        steps,
    )
    expected = reference(value, [grads[0] for grads in steps], grafting=grafting)
    torch.testing.assert_close(params[0].detach(), expected.float(), rtol=1e-4, atol=1e-4)


def test_blocks_are_matrices_of_their_own() -> None:
    """A matrix of 10x7 in blocks of at most 4 moves as its six parts do by themselves."""
    (whole,), steps = draw_steps([(10, 7)], torch.float32, 4)
    hyper: dict[str, Any] = {"lr": 0.1, "max_preconditioner_dim": 4, "precondition_frequency": 2}
    params, optimizer = take_steps(partial(Shampoo, **hyper), [whole], steps)
    blocks = list(blocks_of((10, 7), 4))
    assert [block.shape for block in blocks] == [(4, 4), (4, 3), (3, 4), (3, 3), (3, 4), (3, 3)]
    parts, _ = take_steps(
        partial(Shampoo, **hyper),
        [block.of(whole) for block in blocks],
        [[block.of(grads[0]) for block in blocks] for grads in steps],
    )
    for block, part in zip(blocks, parts, strict=True):
        torch.testing.assert_close(block.of(params[0]).detach(), part.detach())
    own = optimizer.state[params[0]]
    assert own["left"].shape == own["left_root"].shape == (2, 10, 4)
    assert own["right"].shape == own["right_root"].shape == (3, 7, 4)


def test_lengths_of_blocks() -> None:
    assert split_evenly(10, 4) == [4, 3, 3]
    assert split_evenly(8, 4) == [4, 4]
    assert split_evenly(3, 4) == [3]
    assert split_evenly(0, 4) == [0]
    param = torch.zeros(5, 4)
    assert FactorSlot("left", side=0, most=3).shape_of(param) == (2, 5, 3)
    assert FactorSlot("right", side=1, most=3).shape_of(param) == (2, 4, 2)


def test_inverse_roots() -> None:
    """By hand, with a ridge, of zeros, and of what is no number."""
    diagonal = torch.diag(torch.tensor([16.0, 81.0]))
    expected = torch.diag(torch.tensor([1 / 2, 1 / 3]))
    torch.testing.assert_close(inverse_root(diagonal, root=4, ridge=0.0), expected)
    singular = torch.diag(torch.tensor([0.0, 1.0]))
    found = inverse_root(singular, root=4, ridge=1e-4)
    torch.testing.assert_close(found, torch.diag(torch.tensor([10.0, 1.0])), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(inverse_root(torch.zeros(3, 3), root=4, ridge=1e-6), torch.eye(3))
    assert inverse_root(diagonal * torch.nan, root=4, ridge=0.0).isnan().all()


def test_what_float32_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.linalg.eigh

    def eigh(matrix: torch.Tensor) -> Any:
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("not settled")  # type: ignore[attr-defined]
        return exact(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    values, vectors = eigen(torch.diag(torch.tensor([3.0, 2.0])))
    assert values.tolist() == [2.0, 3.0]
    assert vectors.dtype == torch.float32


def test_everything_else_is_adamws() -> None:
    """Also tensors of three dimensions."""
    fulls, steps = data(torch.float32, 3)
    params, _ = train(fulls, steps, **HYPER)
    twins, _ = take_steps(partial(AdamW, lr=0.02, weight_decay=0.1), fulls, steps)
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin) == (param.ndim != 2 or not param.numel())
    table, _ = train([fulls[2]], [[grads[2]] for grads in steps], elementwise=True)
    other, _ = take_steps(AdamW, [fulls[2]], [[grads[2]] for grads in steps])
    assert torch.equal(table[0], other[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_bits_of_one_rank(
    make_params: MakeParams, give_grads: GiveGrads, dtype: torch.dtype, world_size: int
) -> None:
    """Also after a state dictionary on the way."""
    fulls, steps = data(dtype, 5)
    params, plain = train(fulls, steps, **HYPER)
    expected = [p.detach() for p in params] + [plain.state[params[2]]["left_root"]]

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls)
        first = Shampoo(sharded, **HYPER)
        for grads in steps[:2]:
            give_grads(sharded, grads)
            first.step()
        twins = make_params(comm, [p.full_tensor().detach() for p in sharded])
        second = Shampoo(twins, max_preconditioner_dim=10)
        second.state_dict(allocate=True)
        second.load_state_dict(first.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            second.step()
        root = second.state[twins[2]]["left_root"].full_tensor()
        return [*(p.full_tensor().detach() for p in twins), root]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_state_lives_with_owners(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """Four like matrices over two ranks: two each, whole, and nothing on the other one."""
    fulls = [torch.ones(8, 4)] * 4

    def rank(comm: Comm) -> tuple[list[int], int]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        optimizer = Shampoo(params)
        give_grads(params, fulls)
        optimizer.step()
        states = [optimizer.state[p] for p in params]
        held = [sum(v.local.numel() for k, v in own.items() if k != "step") for own in states]
        return held, recorded.records["all_to_all"].calls

    (first, calls), (second, _) = run_threads(rank, 2)
    each = 2 * 32 + 2 * (64 + 16)
    assert sorted(zip(first, second, strict=True)) == [(0, each)] * 2 + [(each, 0)] * 2
    assert calls == 2


@pytest.mark.parametrize("kind", [Shampoo, SOAP])
def test_gradients_that_are_no_numbers(
    make_params: MakeParams, give_grads: GiveGrads, kind: type[Any]
) -> None:
    """They make parameters NaN on all ranks, as element-wise optimizers do; nobody waits."""

    def rank(comm: Comm) -> bool:
        params = make_params(comm, [torch.ones(6, 4)])
        optimizer = kind(params)
        for _ in range(2):
            give_grads(params, [torch.full((6, 4), torch.inf)])
            optimizer.step()
        return bool(params[0].full_tensor().isnan().all())

    assert run_threads(rank, 2) == [True, True]


def test_a_small_language_model(train_decoder: TrainDecoder) -> None:
    def build(params: Sequence[torch.Tensor]) -> Shampoo:
        return Shampoo(params, lr=0.01, precondition_frequency=5)

    plain = train_decoder(None, build)
    assert plain[-1] < 0.6 * plain[0]
    assert run_threads(train_decoder, 3, build) == [plain] * 3


def test_state_of_another_number_of_ranks(make_params: MakeParams) -> None:
    halves = run_threads(
        lambda comm: Shampoo(make_params(comm, [torch.ones(4, 4)] * 2)).state_dict(allocate=True), 2
    )
    whole = make_params(SoloComm(), [torch.ones(4, 4)] * 2)
    with pytest.raises(ValueError, match=r"^p[01]: exp_avg is a piece .* of another sharding"):
        Shampoo(whole).load_state_dict(halves[1])


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"precondition_frequency": 0}, "expected precondition_frequency >= 1, got 0"),
        ({"max_preconditioner_dim": 0}, "expected max_preconditioner_dim >= 1, got 0"),
        ({"shampoo_beta": 1.1}, r"expected shampoo_beta in \[0, 1\], or None, got 1.1"),
        ({"betas": (0.9,)}, r"expected two betas in \[0, 1\)"),
        ({"ridge": -1.0}, "expected ridge >= 0, got -1.0"),
        ({"grafting": "x"}, r"expected grafting to be one of .* got 'x'"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Shampoo([nn.Parameter(torch.ones(2, 2))], **hyper)
    with pytest.raises(TypeError, match=r"got \['beta'\]"):
        Shampoo([nn.Parameter(torch.ones(2, 2))], beta=1)
