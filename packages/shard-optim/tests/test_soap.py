"""SOAP: Adam in another basis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_optim import SOAP, Adam, AdamW


def test_it_is_adam_in_the_basis_of_the_gradients() -> None:
    """Gradients that one rotation of each side makes diagonal: Adam on the diagonals, rotated."""
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(6, 6))
    right, _ = torch.linalg.qr(torch.randn(6, 6))
    sizes = torch.arange(1.0, 7.0)
    param, diagonal = nn.Parameter(torch.zeros(6, 6)), nn.Parameter(torch.zeros(6))
    hyper: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0, "eps": 1e-2}
    soap, adam = SOAP([param], precondition_frequency=2, **hyper), Adam([diagonal], **hyper)
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
    soap = SOAP([param], lr=0.1, max_preconditioner_dim=4)
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
    half = SOAP([param], max_preconditioner_dim=6)
    half.step()
    assert half.state[param]["left_basis"].shape == (5, 5)
    assert "right" not in half.state[param]


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"precondition_frequency": 0}, "expected precondition_frequency >= 1, got 0"),
        ({"shampoo_beta": 1.0}, r"expected shampoo_beta in \[0, 1\)"),
        ({"betas": (0.9,)}, r"expected two betas, got \(0.9,\)"),
        ({"max_preconditioner_dim": -1}, "expected max_preconditioner_dim >= 0, got -1"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        SOAP([nn.Parameter(torch.ones(2, 2))], **hyper)
    with pytest.raises(TypeError, match=r"got \['beta'\]"):
        SOAP([nn.Parameter(torch.ones(2, 2))], beta=1)
