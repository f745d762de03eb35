"""Shampoo: what plain torch makes of its paper."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shard_optim import Shampoo
from shard_optim._eigen import eigen
from shard_optim._factors import FactorSlot, blocks_of, inverse_root, split_evenly
from shard_testing import draw_steps, take_steps


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


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"precondition_frequency": 0}, "expected precondition_frequency >= 1, got 0"),
        ({"max_preconditioner_dim": 0}, "expected max_preconditioner_dim >= 1, got 0"),
        ({"shampoo_beta": 1.1}, r"expected shampoo_beta in \[0, 1\], or None, got 1.1"),
        ({"betas": (0.9,)}, r"expected two betas, got \(0.9,\)"),
        ({"ridge": -1.0}, "expected ridge >= 0, got -1.0"),
        ({"grafting": "x"}, r"expected grafting to be one of .* got 'x'"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Shampoo([nn.Parameter(torch.ones(2, 2))], **hyper)
    with pytest.raises(TypeError, match=r"got \['beta'\]"):
        Shampoo([nn.Parameter(torch.ones(2, 2))], beta=1)
