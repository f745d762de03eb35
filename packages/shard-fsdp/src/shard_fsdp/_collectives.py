"""A unit's two collectives: ours, or what a program puts in their place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shard_comm import Comm, GroupComm, Work
from shard_fsdp._policy import UnitSettings


class Allocator(Protocol):
    """Where a custom collective's memory comes from."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return uninitialised memory of shape ``size``."""


class AllGather(Allocator, Protocol):
    """A custom gather; the names and meaning of torch's FSDP2."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[size * n]``; the input ``[n]`` is this rank's slice of it."""


class ReduceScatter(Allocator, Protocol):
    """A custom reduction; the names and meaning of torch's FSDP2."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` ``[size * n]`` and keep this rank's slice ``[n]``."""


def all_gather(
    comm: Comm, out: torch.Tensor, inp: torch.Tensor, settings: UnitSettings, *, name: str
) -> Work:
    """Start filling ``out`` from every rank's ``inp``; errors call it ``name``.

    **Collective**: all ranks of ``comm``. **Memory**: with a custom gather, another ``out`` until
    the work is waited for, which it allocates.
    """
    custom = settings.all_gather
    if custom is None or comm.size == 1:
        return comm.all_gather(out, inp, async_op=True, name=name)
    with torch.no_grad():
        staged = custom.allocate((out.numel(),), dtype=out.dtype, device=out.device)
        mine = staged[comm.rank * inp.numel() : (comm.rank + 1) * inp.numel()]
        mine.copy_(inp)
        work = custom(staged, mine, group=group_of(comm), async_op=True)

    def finish() -> None:
        if work is not None:
            work.wait()
        out.copy_(staged)

    return Work(finish)


def reduce_scatter(
    comm: Comm,
    out: torch.Tensor,
    inp: torch.Tensor,
    settings: UnitSettings,
    *,
    op: str,
    own: Sequence[torch.Tensor],
    name: str,
) -> Work:
    """Start reducing ``inp`` over ranks into this rank's slice ``out``; errors call it ``name``.

    Numbers are added in ``out``'s dtype, which may be wider than ``inp``'s. ``inp`` is given
    away. A custom reduction sums, and knows nothing of ``own``.

    **Collective**: all ranks of ``comm``. **Memory**: with a custom reduction, another ``inp`` and
    ``out`` until the work is waited for, which it allocates.
    """
    comm = settings.reduce_comm or comm
    custom = settings.reduce_scatter
    if custom is None or comm.size == 1:
        wide = None if out.dtype == inp.dtype else out.dtype
        return comm.reduce_scatter(
            out, inp, op=op, sum_dtype=wide, own=own, async_op=True, name=name
        )
    with torch.no_grad():
        staged = custom.allocate((inp.numel(),), dtype=inp.dtype, device=inp.device)
        result = custom.allocate((out.numel(),), dtype=out.dtype, device=out.device)
        staged.copy_(inp)
        work = custom(result, staged, group=group_of(comm), op=dist.ReduceOp.SUM, async_op=True)

    def finish(staged: torch.Tensor = staged) -> None:  # the input lives as long as the work
        if work is not None:
            work.wait()
        out.copy_(result)

    return Work(finish)


def group_of(comm: Comm) -> dist.ProcessGroup:
    """Return the process group behind a comm. Local.

    Raises:
        ValueError: it has none to hand to others.
    """
    if comm.process_group is None:
        raise ValueError(
            f"custom collectives need a comm with a process group of its own, got {comm!r}; pass "
            f"mesh= a DeviceMesh whose backend serves the parameters' device"
        )
    return comm.process_group


class _GroupMemory:
    """Memory from a process group's own allocator."""

    def __init__(self, comm: GroupComm) -> None:
        self._backend: Any = comm.group._get_backend(comm.device)

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        (numel,) = size
        found: torch.Tensor = self._backend.allocate_tensor(numel, dtype=dtype, device=device)
        return found


class GroupMemoryAllGather(_GroupMemory):
    """The group's own gather, in the group's own memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: dist.Work | None = gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class GroupMemoryReduceScatter(_GroupMemory):
    """The group's own reduction, in the group's own memory."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work: dist.Work | None = reduce(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )
        return work


def allocates_tensors(comm: Comm) -> bool:
    """Whether the group behind a comm has an allocator for the comm's device. Local."""
    if not isinstance(comm, GroupComm):
        return False
    backend: Any = comm.group._get_backend(comm.device)
    return bool(backend.supports_tensor_alloc(comm.device))
