"""AdamW in float32 over windows, for parameters and moments that are kept in fewer bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from shard_optim._groups import Group
from shard_optim._noise import noise, round_stochastically, seed_of
from shard_optim._plan import Lane
from shard_optim._window import widened, window_numel, windows


def adamw_(
    param: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[torch.Tensor, torch.Tensor],
    group: Group,
    step: int,
) -> None:
    """Do one step of AdamW in place, one rounding per operation.

    Args:
        param: float32 or wider, any shape.
        grad: the same; used up.
        moments: first and second, the same.
        group: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        step: this one, from 1 on.

    **Collective**: local. **Memory**: once ``param``, for the call.
    """
    beta1, beta2 = group["betas"]
    first, second = moments
    first.mul_(beta1).add_(grad * (1 - beta1))
    second.mul_(beta2).add_(grad.mul_(grad).mul_(1 - beta2))
    scale = torch.sqrt(second, out=grad).div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    lr = group["lr"]
    param.mul_(1 - lr * group["weight_decay"])
    param.sub_(torch.div(first, scale, out=scale).mul_(lr / (1 - beta1**step)))


def kahan_adamw(lane: Lane, grads: Sequence[torch.Tensor], group: Group, age: int) -> None:
    """Update one lane; what rounding takes from a parameter is kept and given back.

    Args:
        lane: with slots ``exp_avg``, ``exp_avg_sq`` and ``compensation``.
        grads: the members' gradients.
        group: hyper-parameters.
        age: steps counted since the lane was planned.

    **Collective**: local. **Memory**: a few windows, for the call.

    **Source**: Kahan, "Further remarks on reducing truncation errors", 1965.
    """
    names = ("param", "exp_avg", "exp_avg_sq", "compensation")
    columns = zip(*(lane.flats[name] for name in names), strict=True)
    for flats, grad, count in zip(columns, lane.flat_grads(grads), lane.counts, strict=True):
        for param, first, second, lost, slope in windows([*flats, grad]):
            exact = widened(param).add_(widened(lost))
            moments = widened(first), widened(second)
            adamw_(exact, widened(slope), moments, group, int(count) + age)
            first.copy_(moments[0])
            second.copy_(moments[1])
            param.copy_(exact)
            lost.copy_(exact.sub_(widened(param)))


def stochastic_adamw(
    lane: Lane,
    grads: Sequence[torch.Tensor],
    group: Group,
    age: int,
    names: Mapping[torch.Tensor, str],
) -> None:
    """Update one lane of bfloat16, rounding parameters and moments stochastically.

    Args:
        lane: with slots ``exp_avg`` and ``exp_avg_sq``.
        grads: the members' gradients.
        group: hyper-parameters.
        age: steps counted since the lane was planned.
        names: what parameters are called; random bits depend on it.

    **Collective**: local. **Memory**: a few windows, for the call.
    """
    columns = zip(*(lane.flats[name] for name in ("param", "exp_avg", "exp_avg_sq")), strict=True)
    for index, (flats, grad) in enumerate(zip(columns, lane.flat_grads(grads), strict=True)):
        step = int(lane.counts[index]) + age
        ranges = [(seed_of(names[m], step), start, stop) for m, start, stop in lane.ranges(index)]
        drawn = _segments(ranges, window_numel(grad.device))
        for (param, first, second, slope), segments in zip(
            windows([*flats, grad]), drawn, strict=True
        ):
            exact, moments = widened(param), (widened(first), widened(second))
            adamw_(exact, widened(slope), moments, group, step)
            bits = noise(segments, grad.device)
            round_stochastically(param, exact, bits)
            round_stochastically(first, moments[0], bits, high=True)
            round_stochastically(second, moments[1], bits, high=True)


def _segments(
    ranges: Sequence[tuple[int, int, int]], size: int
) -> Iterator[list[tuple[int, int, int]]]:
    """For each window of a run, which elements of which parameters are in it."""
    room, found = size, []
    for seed, start, stop in ranges:
        while start < stop:
            taken = min(stop - start, room)
            found.append((seed, start, start + taken))
            start, room = start + taken, room - taken
            if not room:
                yield found
                room, found = size, []
    if found:
        yield found
