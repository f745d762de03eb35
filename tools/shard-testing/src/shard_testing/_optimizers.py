"""Parameters and gradients by chance, and an optimizer that steps through them in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


def draw_steps(
    shapes: Sequence[int | tuple[int, ...]],
    dtype: torch.dtype,
    steps: int,
    *,
    seed: int = 0,
    drawn: torch.dtype = torch.float32,
) -> tuple[list[torch.Tensor], list[list[Any]]]:
    """Return values of parameters, and for each step their gradients, the same every time.

    Args:
        shapes: of the parameters; a number is that of a vector.
        dtype: of what comes back.
        steps: how many lists of gradients.
        seed: another one gives other numbers.
        drawn: the dtype that numbers are drawn in before they are cast.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw() -> list[Any]:
        return [torch.randn(s, generator=generator, dtype=drawn).to(dtype) for s in shapes]

    return draw(), [draw() for _ in range(steps)]


def take_steps(
    make: Callable[[list[nn.Parameter]], Any],
    values: Sequence[torch.Tensor],
    steps: Sequence[Sequence[torch.Tensor | None]],
) -> tuple[list[nn.Parameter], Any]:
    """Return plain parameters after steps with these gradients, and the optimizer.

    Args:
        make: from parameters to the optimizer.
        values: of the parameters; they are copied.
        steps: for each step one gradient per parameter, or None.
    """
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(params)
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return params, optimizer
