"""Steps that are taken for all jobs together, since they talk to other ranks in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._slots import State

M = TypeVar("M")


@contextmanager
def counted(jobs: Sequence[Job]) -> Iterator[None]:
    """Count a step of each job before what is done inside, and tell autograd after it. Local."""
    with ExitStack() as stack:
        for job in jobs:
            job.plan.count()
            stack.enter_context(job.plan.telling())
        yield


def members_of(
    jobs: Sequence[Job],
    state: State,
    make: Callable[[torch.Tensor, torch.Tensor, dict[str, Any], Group], M],
) -> list[M]:
    """Return what is made of each parameter, its gradient, its state and its group. Local."""
    return [
        make(param, grad, state[param], job.group)
        for job in jobs
        for param, grad in zip(job.members, job.grads, strict=True)
    ]
