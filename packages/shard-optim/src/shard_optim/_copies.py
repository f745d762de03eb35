"""Copies of parameters in another dtype that somebody else wants, written in a step's own pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shard_flat import Shadow, shadow_of
from shard_optim._plan import Lane
from shard_optim._window import windows

# Few enough for a cache to hold, and so many that beginning a call takes no time beside it.
_CALL_NUMEL = 1 << 20


class Copies:
    """The copies that one step of a plan writes: what the shadows of its shards lend.

    Args:
        bases: a piece of each shard that the step changes.
    """

    def __init__(self, bases: Sequence[torch.Tensor] = ()) -> None:
        self._lent: dict[Shadow, torch.Tensor] = {}
        self._keeps_up = False  # copies of the lane that is updated are written on the way
        for base in bases:
            shadow = shadow_of(base)
            copy = shadow.lend() if shadow is not None else None
            if shadow is not None and copy is not None:
                self._lent[shadow] = copy

    def calls(
        self, lane: Lane, *columns: list[torch.Tensor]
    ) -> Iterator[Sequence[list[torch.Tensor]]]:
        """Yield what a kernel is to be called with to update a lane: all at once, or in turns.

        After each call its copies are written. Parts fill whole vectors, and so do their cuts.

        Args:
            lane: what is changed.
            columns: beside each part of its parameters whatever else the kernel takes.

        **Collective**: local.
        """
        columns = (lane.params.parts, *columns)
        self._keeps_up = True
        calls = list(_cut(columns, _CALL_NUMEL)) if self._lent else [columns]
        # All is found before the first call: each one drives this code out of the cache.
        pairs = [[pair for part in call[0] for pair in self._pairs(part)] for call in calls]
        with lane.changing():
            for call, copied in zip(calls, pairs, strict=True):
                yield call
                for copy, part in copied:
                    copy.copy_(part)
        self._follow(lane.params.ends)

    def windows(self, flats: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield windows of a parameter and what goes with it, and copy each after its change."""
        self._keeps_up = True
        for window in windows(flats):
            yield window
            self._follow(window[:1])

    def finish(self, lane: Lane) -> None:
        """Write the copies of a lane that were not written on the way. Local."""
        if not self._keeps_up:
            self._follow(lane.flats["param"])
        self._keeps_up = False

    def settle(self) -> None:
        """Give the copies back, once all is changed and counted. Local."""
        for shadow in self._lent:
            shadow.settle()

    def _follow(self, flats: Sequence[torch.Tensor]) -> None:
        for flat in flats:
            for copy, part in self._pairs(flat):
                copy.copy_(part)

    def _pairs(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The place of a part's copy, and the part, if there is one."""
        shadow = shadow_of(flat) if self._lent else None
        if shadow in self._lent:
            start = flat.storage_offset()
            yield self._lent[shadow][start : start + flat.numel()], flat


def _cut(columns: Sequence[list[torch.Tensor]], room: int) -> Iterator[list[list[torch.Tensor]]]:
    """Cut columns of tensors into calls of so many elements; numbers go with each part.

    Worked example: parts of 300, 100 and 64 elements and room for 256 make a call with 256 and one
    with 44, 100 and 64.
    """
    call: list[list[torch.Tensor]] = [[] for _ in columns]
    left = room
    for row in zip(*columns, strict=True):
        start, total = 0, row[0].numel()
        while start < total:
            stop = min(start + left, total)
            for column, tensor in zip(call, row, strict=True):
                is_whole = tensor.ndim == 0 or stop - start == total
                column.append(tensor if is_whole else tensor.view(-1)[start:stop])
            start, left = stop, left - (stop - start)
            if not left:
                yield call
                call, left = [[] for _ in columns], room
    if call[0]:
        yield call
