"""AdamW with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_flat import GatherComm, ShardTensor
from shard_optim._adam import MOMENTS, check_adam, fused_adam
from shard_optim._agree import CollectiveOptimizer
from shard_optim._blocks import (
    BLOCK,
    cut_blocks,
    decode_signed,
    decode_square,
    encode_signed,
    encode_square,
    scale_of,
)
from shard_optim._blocks import (
    CODES as _CODES,
)
from shard_optim._codec import encode_moments
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._plan import Lane
from shard_optim._runs import flat_piece
from shard_optim._slots import Slot
from shard_optim._state import Saved
from shard_optim._wide import adamw_
from shard_optim._window import widened, window_numel

_SMALL_NUMEL = 4096
_WINDOWS = (
    4  # at a time: codes take a quarter of the room, and small steps cost more than they save
)


class AdamW8bit(CollectiveOptimizer):
    """AdamW that keeps moments in 8 bits, with one scale for each 256 elements.

    Blocks are counted from the beginning of each parameter, so results have the same bits however
    parameters are sharded. Where a boundary between ranks cuts a block, its two halves agree on
    the scale. Parameters below 4,096 elements keep moments in their own dtype, as AdamW does.

    Args:
        params: plain or sharded parameters, ``(name, parameter)`` pairs, or groups of either, as
            torch's optimizers take them.
        lr: learning rate, at least 0; a number or a scalar tensor.
        betas: decay of the first and second moment, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: decoupled decay, at least 0.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point.

    **Collective**: a step takes three small all_reduces per comm, of a few numbers for each
    parameter of which a boundary between ranks cuts a block; none where no block is cut, as with
    ``ParamSpec(..., block=256)``. State dictionaries are local, but for loading what AdamW holds in
    pieces: one all_reduce for each of those parameters.

    **Memory**: 2 bytes per element of each parameter's piece and 8 per block of 256 that begins in
    it, 2.03 in all; two moments in their own dtype for parameters below 4,096 elements. A step
    takes at most eight windows in float32, each of four times the usual size. There is no
    ``offload``.

    **Source**: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022; the codes
    here are powers instead of a table.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, hyper)

    def _check_hyper(self, group: Group, where: str) -> None:
        check_adam(group, where)

    def _slots_of(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return MOMENTS if param.numel() < _SMALL_NUMEL else _CODES

    def _other_slots(self, group: Group, param: torch.Tensor) -> tuple[Slot, ...]:
        return MOMENTS

    def _fill(self, param: torch.Tensor, source: Saved, slots: tuple[Slot, ...]) -> None:
        if slots is _CODES and source["exp_avg"].is_floating_point():
            self._fill_step(param, source)
            encode_moments(param, self.state[param], source)
        else:
            super()._fill(param, source, slots)

    def _is_shared(self, group: Group, param: ShardTensor) -> bool:
        return param.numel() >= _SMALL_NUMEL and bool(cut_blocks(param.spec, param.comm.size))

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        fused_adam(lane, grads, job.group, decoupled=True)

    def _advance(self, jobs: Sequence[Job]) -> None:
        coded = [job for job in jobs if job.slots is _CODES]
        for job in jobs:
            if job.slots is not _CODES:
                self._apply(job)
        for job in coded:
            job.plan.count()
        members = [
            _Member.of(param, grad, self.state[param], job.group)
            for job in coded
            for param, grad in zip(job.members, job.grads, strict=True)
        ]
        cuts = _Cuts.of(members)
        cuts.exchange([m.own_scales for m in members])
        old = cuts.scales
        cuts.exchange([_new_scales(m, cuts, old[i]) for i, m in enumerate(members)])
        for member, before, after in zip(members, old, cuts.scales, strict=True):
            for first, last in member.windows():
                member.update(first, last, before, after)
        for job in coded:
            torch.autograd.graph.increment_version(job.plan.touched)


_Scales = dict[int, torch.Tensor]  # block to [2], of both moments


@dataclass(frozen=True)
class _Member:
    """One rank's piece of a parameter, its codes and its scales."""

    param: torch.Tensor
    piece: torch.Tensor  # [n]
    grad: torch.Tensor  # [n]
    codes: tuple[torch.Tensor, torch.Tensor]  # [n] each
    scales: tuple[torch.Tensor, torch.Tensor]  # one per block that begins here
    start: int
    step: int
    group: Group

    @classmethod
    def of(
        cls, param: torch.Tensor, grad: torch.Tensor, own: dict[str, Any], group: Group
    ) -> _Member:
        first, second, *scales = (flat_piece(own[slot.name]).view(-1) for slot in _CODES)
        return cls(
            param=param,
            piece=flat_piece(param).view(-1),
            grad=grad.view(-1),
            codes=(first, second),
            scales=(scales[0], scales[1]),
            start=param.spec.start if isinstance(param, ShardTensor) else 0,
            step=int(own["step"]),
            group=group,
        )

    @property
    def stop(self) -> int:
        return self.start + self.piece.numel()

    @property
    def first_own(self) -> int:
        """The first block that begins here."""
        return -(-self.start // BLOCK)

    def holds(self, block: int) -> bool:
        """Whether an element of the block is here."""
        return self.start < (block + 1) * BLOCK and block * BLOCK < self.stop

    def own_scales(self, block: int) -> torch.Tensor | None:
        """Both scales of a block that begins here."""
        row = block - self.first_own
        if not 0 <= row < self.scales[0].numel():
            return None
        return torch.stack([scale[row] for scale in self.scales])

    def windows(self) -> Iterator[tuple[int, int]]:
        """Ranges of blocks that are worked on at a time."""
        size = _WINDOWS * window_numel(self.piece.device) // BLOCK
        end = -(-self.stop // BLOCK) if self.stop > self.start else 0
        for first in range(self.start // BLOCK, end, size):
            yield first, min(first + size, end)

    def computed(self, first: int, last: int, before: _Scales) -> tuple[torch.Tensor, ...]:
        """Parameter and both moments after the step, float32 ``[blocks, BLOCK]``."""
        count = last - first
        scales = torch.zeros(2, count, device=self.piece.device)
        low = max(first, self.first_own)
        for row, own in zip(scales, self.scales, strict=True):
            row[low - first :].copy_(own[low - self.first_own : last - self.first_own])
        for block in range(first, low):  # begins on another rank
            scales[:, block - first] = before[block]
        moments = (
            decode_signed(self._rows(self.codes[0], first, last), scales[0]),
            decode_square(self._rows(self.codes[1], first, last), scales[1]),
        )
        param, grad = (widened(self._rows(flat, first, last)) for flat in (self.piece, self.grad))
        adamw_(param, grad, moments, self.group, self.step)
        return (param, *moments)

    def update(self, first: int, last: int, before: _Scales, after: _Scales) -> None:
        """Do the step on blocks ``[first, last)``."""
        param, *moments = self.computed(first, last, before)
        self._put(self.piece, param, first)
        for which, encode in enumerate((encode_signed, encode_square)):
            scales = scale_of(moments[which])
            for block in after:
                if first <= block < last:
                    scales[block - first] = after[block][which]
            self._put(self.codes[which], encode(moments[which], scales), first)
            low = max(first, self.first_own)
            own = self.scales[which][low - self.first_own : last - self.first_own]
            own.copy_(scales[low - first :])

    def _rows(self, flat: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Elements of blocks ``[first, last)``, zero where they are on other ranks."""
        low, high = max(first * BLOCK, self.start), min(last * BLOCK, self.stop)
        held = flat[low - self.start : high - self.start]
        if held.numel() == (last - first) * BLOCK:
            return held.view(last - first, BLOCK)
        rows = torch.zeros((last - first) * BLOCK, dtype=flat.dtype, device=flat.device)
        rows[low - first * BLOCK : high - first * BLOCK].copy_(held)
        return rows.view(last - first, BLOCK)

    def _put(self, flat: torch.Tensor, rows: torch.Tensor, first: int) -> None:
        low = max(first * BLOCK, self.start)
        high = min(first * BLOCK + rows.numel(), self.stop)
        flat[low - self.start : high - self.start].copy_(
            rows.view(-1)[low - first * BLOCK : high - first * BLOCK]
        )


@dataclass
class _Cuts:
    """Blocks that boundaries between ranks cut, and the scales that all ranks have of them."""

    entries: dict[GatherComm, list[tuple[int, int]]]  # index of the member, block
    scales: list[_Scales]
    device: torch.device

    @classmethod
    def of(cls, members: Sequence[_Member]) -> _Cuts:
        entries: dict[GatherComm, list[tuple[int, int]]] = {}
        for index, member in enumerate(members):
            if isinstance(member.param, ShardTensor):
                comm = member.param.comm
                for block in cut_blocks(member.param.spec, comm.size):
                    entries.setdefault(comm, []).append((index, block))
        device = members[0].piece.device if members else torch.device("cpu")
        return cls(entries, [{} for _ in members], device)

    def exchange(self, parts: Sequence[Any]) -> None:
        """Take the largest scale that any rank has; ``parts`` give what is known here, or None."""
        scales: list[_Scales] = [{} for _ in self.scales]
        for comm, entries in self.entries.items():
            table = torch.zeros(len(entries), 2, device=self.device)
            for row, (index, block) in zip(table, entries, strict=True):
                known = parts[index](block)
                if known is not None:
                    row.copy_(known)
            comm.all_reduce(table, op="max")
            for row, (index, block) in zip(table, entries, strict=True):
                scales[index][block] = row
        self.scales = scales


def _new_scales(member: _Member, cuts: _Cuts, before: _Scales) -> Any:
    def known(block: int) -> torch.Tensor | None:
        if not member.holds(block):
            return None
        _, *moments = member.computed(block, block + 1, before)
        return torch.cat([scale_of(rows) for rows in moments])

    return known
