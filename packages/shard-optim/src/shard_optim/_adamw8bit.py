"""AdamW with moments of 8 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shard_flat import GatherComm, ShardTensor
from shard_optim._adam import MOMENTS, check_adam, fused_adam
from shard_optim._agree import CollectiveOptimizer, sharing
from shard_optim._blocks import (
    BLOCK,
    decode_signed,
    decode_square,
    encode_signed,
    encode_square,
)
from shard_optim._blocks import CODES as _CODES
from shard_optim._codec import encode_moments
from shard_optim._cuts import Cuts, Scales, cut_blocks
from shard_optim._flat import Job
from shard_optim._groups import Group
from shard_optim._homes import Home, Unit
from shard_optim._offload import Offload
from shard_optim._plan import Lane
from shard_optim._runs import flat_piece
from shard_optim._slots import Slot
from shard_optim._state import Saved
from shard_optim._together import counted, members_of
from shard_optim._window import Scratch, widened, window_numel

_SMALL_NUMEL = 4096


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
        offload: where codes live between steps: with the parameters by default, or ``"cpu"``,
            ``"disk"`` or an ``Offload``. They are brought in whole blocks; scales stay, 8 bytes of
            a block. Results have the same bits.

    Raises:
        TypeError: a parameter is no tensor, or one of torch's own DTensors; a hyper-parameter is no
            number.
        ValueError: a hyper-parameter is out of range; there are no parameters; one is listed
            twice, shares memory with another, is no leaf, has holes between its elements or is
            not floating point; there is no such place to offload to.

    **Collective**: a step takes three small all_reduces per comm, of a few numbers for each
    parameter of which a boundary between ranks cuts a block, and a fourth where codes are on disk;
    none where no block is cut, as with ``ParamSpec(..., block=256)``. State dictionaries are local,
    but for loading what AdamW holds in pieces: one all_reduce for each of those parameters.

    **Memory**: 2.03 bytes per element of each parameter's piece, and a few windows during a step.
    Offloaded, 2 of those bytes are elsewhere, and ``Offload.window_bytes`` here from the first step
    on.

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
        offload: str | Offload | None = None,
    ) -> None:
        hyper = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, hyper, offload=offload)

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

    def _ranks_of(self, group: Group, param: torch.Tensor) -> GatherComm | None:
        comm = sharing(param)
        if comm is None or not isinstance(param, ShardTensor) or param.numel() < _SMALL_NUMEL:
            return None
        return comm if cut_blocks(param.spec, comm.size) else None

    def _update(self, lane: Lane, grads: Sequence[torch.Tensor], job: Job) -> None:
        fused_adam(lane, grads, job.group, decoupled=True, copies=job.copies)

    def _advance(self, jobs: Sequence[Job]) -> None:
        coded = [job for job in jobs if job.slots is _CODES]
        with counted(coded):
            room = Scratch()
            members = members_of(coded, self.state, _Member.of)
            cuts = Cuts.of([member.param for member in members])
            cuts.exchange([member.own_scales for member in members])
            old = cuts.scales
            cuts.exchange([new.get for new in self._cut_scales(members, old, room)])
            work = [
                (part, before, after)
                for member, before, after in zip(members, old, cuts.scales, strict=True)
                for part in member.parts(self._home)
            ]
            with self._home.streaming([part.unit for part, _, _ in work]) as states:
                for (part, before, after), codes in zip(work, states, strict=True):
                    near = replace(part, codes=codes)
                    for first, last in near.windows():
                        near.update(first, last, before, after, room)
        for job in jobs:
            if job.slots is not _CODES:
                self._apply(job)

    def _cut_scales(
        self, members: Sequence[_Member], before: Sequence[Scales], room: Scratch
    ) -> list[Scales]:
        """Scales after the step of each member's blocks that are cut, as far as they are here."""
        found: list[Scales] = [{} for _ in members]
        work = [
            (member.part(block, block + 1), index, block)
            for index, member in enumerate(members)
            for block in before[index]
            if member.holds(block)
        ]
        with self._home.streaming([part.unit for part, _, _ in work]) as states:
            for (part, index, block), codes in zip(work, states, strict=True):
                near = replace(part, codes=codes)
                found[index][block] = near.new_scales(before[index], room, block)
        return found


@dataclass(frozen=True)
class _Member:
    """One rank's piece of a parameter, its codes and its scales."""

    param: torch.Tensor
    piece: torch.Tensor  # [n]
    grad: torch.Tensor  # [n]
    codes: Sequence[torch.Tensor]  # [n] each
    scales: Sequence[torch.Tensor]  # one per block that begins here
    start: int
    step: torch.Tensor  # of how many this is
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
            step=own["step"],
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

    @property
    def unit(self) -> Unit:
        return self.piece.device, self.codes

    def part(self, first: int, last: int) -> _Member:
        """What there is here of blocks ``[first, last)``."""
        low, high = max(first * BLOCK, self.start), min(last * BLOCK, self.stop)
        held = slice(low - self.start, high - self.start)
        own = slice(max(first, self.first_own) - self.first_own, last - self.first_own)
        return replace(
            self,
            piece=self.piece[held],
            grad=self.grad[held],
            codes=[each[held] for each in self.codes],
            scales=[each[own] for each in self.scales],
            start=low,
        )

    def parts(self, home: Home) -> Iterator[_Member]:
        """What is at hand at a time."""
        most = home.numel_of(self.piece.device, [1, 1], self.piece.numel() + 2 * BLOCK)
        for first, last in self.windows(most // BLOCK * BLOCK):
            yield self.part(first, last)

    def windows(self, numel: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of blocks that are worked on at a time."""
        size = (numel or window_numel(self.piece.device)) // BLOCK
        end = -(-self.stop // BLOCK) if self.stop > self.start else 0
        for first in range(self.start // BLOCK, end, size):
            yield first, min(first + size, end)

    def new_scales(self, before: Scales, room: Scratch, block: int) -> torch.Tensor:
        """Both scales of a block after the step, as far as its elements are here."""
        param = widened(self._rows(self.piece, block, block + 1))
        first, second = self._step(param, block, block + 1, before, room)
        return torch.cat([first.abs().amax(1), second.amax(1)])

    def update(self, first: int, last: int, before: Scales, after: Scales, room: Scratch) -> None:
        """Do the step on blocks ``[first, last)``."""
        rows = self._rows(self.piece, first, last)
        param = room.wide("param", rows)
        moments = self._step(param, first, last, before, room)
        self._put(self.piece, param, first)
        spare = torch.abs(moments[0], out=room.take("spare", rows, param.dtype))
        codes = [self._rows(flat, first, last) for flat in self.codes]
        scales = self._settled(first, last, spare.amax(1), after, 0)
        encode_signed(moments[0], spare, scales, codes[0])
        scales = self._settled(first, last, moments[1].amax(1), after, 1)
        short = room.take("short", rows, torch.int16)
        encode_square(moments[1], scales, codes[1], spare=spare, short=short)
        for flat, new in zip(self.codes, codes, strict=True):
            self._put(flat, new, first)

    def _step(
        self, param: torch.Tensor, first: int, last: int, before: Scales, room: Scratch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Move a parameter's blocks, and return both moments after that.

        Blocks fill whole vectors, so the kernel treats an element alike wherever it is.
        """
        wide = param.dtype
        spare, *moments = (room.take(name, param, wide) for name in ("spare", "first", "second"))
        scales = self._known(first, last, before)
        decode_signed(self._rows(self.codes[0], first, last), scales[0], moments[0], spare)
        decode_square(self._rows(self.codes[1], first, last), scales[1], moments[1])
        lr, (beta1, beta2) = self.group["lr"], self.group["betas"]
        torch._fused_adamw_(
            [param],
            [room.wide("grad", self._rows(self.grad, first, last))],
            [moments[0]],
            [moments[1]],
            [],
            [self.step],
            lr=lr.to(param.device) if isinstance(lr, torch.Tensor) else lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=self.group["weight_decay"],
            eps=self.group["eps"],
            amsgrad=False,
            maximize=False,
        )
        return moments[0], moments[1]

    def _known(self, first: int, last: int, before: Scales) -> torch.Tensor:
        """Scales of both moments, also of a block that begins on another rank, ``[2, blocks]``."""
        scales = torch.empty(2, last - first, device=self.piece.device)
        low = max(first, self.first_own)
        for row, own in zip(scales, self.scales, strict=True):
            row[low - first :].copy_(own[low - self.first_own : last - self.first_own])
        for block in range(first, low):
            scales[:, block - first] = before[block]
        return scales

    def _settled(
        self, first: int, last: int, scales: torch.Tensor, after: Scales, which: int
    ) -> torch.Tensor:
        """Keep the scales of blocks that begin here, and return all, agreed where cut."""
        for block in after:
            if first <= block < last:
                scales[block - first] = after[block][which]
        low = max(first, self.first_own)
        own = self.scales[which][low - self.first_own : last - self.first_own]
        own.copy_(scales[low - first :])
        return scales

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
        held = flat[low - self.start : high - self.start]
        part = rows.view(-1)[low - first * BLOCK : high - first * BLOCK]
        if held.data_ptr() != part.data_ptr():
            held.copy_(part)
