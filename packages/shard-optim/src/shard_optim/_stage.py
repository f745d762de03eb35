"""The window that offloaded state passes through while its parameters are updated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shard_optim._state_file import StateFiles

if TYPE_CHECKING:
    from shard_optim._plan import Lane

_PARTS = 3  # one is read, one worked on, one written
_LINE_BYTES = 64
GRAIN = 64
"""Elements that are never parted: whole vectors of any dtype."""


@dataclass(frozen=True)
class Move:
    """Bytes that go from where state lives to a part of the stage and back.

    Attributes:
        host: uint8 ``[n]``, where they live.
        near: uint8 ``[n]``, where a step works on them.
        between: the same in pinned memory, where they come from a file to another device.
    """

    host: torch.Tensor
    near: torch.Tensor
    between: torch.Tensor | None


@dataclass(frozen=True)
class Window:
    """What one lane has at hand.

    Attributes:
        stage: where.
        part: which part of it.
        moves: what is to be brought there and back.
    """

    stage: Stage
    part: int
    moves: list[Move]


class Stage:
    """Memory on one device through which state passes, and two threads that move it.

    While one window is worked on the next one is read and the one before is written. Transfers
    between host and device have a stream for each direction.

    Args:
        device: the parameters'.
        window_bytes: of all parts together.
        files: where state is read from and written to; None where it is in pinned memory.

    **Memory**: ``window_bytes`` on the device, and as much pinned host memory between files and
    another device, as long as the object lives.
    """

    def __init__(
        self, device: torch.device, window_bytes: int, *, files: StateFiles | None = None
    ) -> None:
        self._files = files
        self._part_bytes = window_bytes // _PARTS // _LINE_BYTES * _LINE_BYTES
        self._device = device
        numel = _PARTS * self._part_bytes
        self._near = torch.empty(numel, dtype=torch.uint8, device=device)
        self._between: torch.Tensor | None = None
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
            if files is not None:
                self._between = torch.empty(numel, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._reader = ThreadPoolExecutor(1, "shard_optim-read")
        self._writer = ThreadPoolExecutor(1, "shard_optim-write")

    def numel_of(self, itemsizes: Sequence[int]) -> int:
        """Return how many elements fit into a part with state of these sizes. Local."""
        return (self._part_bytes - _LINE_BYTES * len(itemsizes)) // sum(itemsizes)

    def window(
        self, number: int, columns: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[Window, list[list[torch.Tensor]]]:
        """Plan how state comes to the device.

        Args:
            number: of the lane; those that follow each other have other parts.
            columns: for each slot, tensors ``[n]`` where they live.

        Returns:
            The window, and the same tensors in a part of the stage.

        **Collective**: local.
        """
        part = number % _PARTS
        at = part * self._part_bytes
        near: list[list[torch.Tensor]] = []
        spans: list[list[int]] = []  # where it begins here, bytes
        heads: list[torch.Tensor] = []
        for column in columns:
            near.append([])
            for host in column:
                near[-1].append(self._near[at : at + host.nbytes].view(host.dtype))
                if spans and _is_next(heads[-1], spans[-1], host, at):
                    spans[-1][1] += host.nbytes
                else:
                    heads.append(host)
                    spans.append([at, host.nbytes])
                at += host.nbytes
            at += -at % _LINE_BYTES
        moves = [self._move(head, *span) for head, span in zip(heads, spans, strict=True)]
        return Window(self, part, moves), near

    def each(self, lanes: Sequence[Lane]) -> Iterator[Lane]:
        """Yield lanes one by one, each with its state in its window until the next one. Local.

        Raises:
            RuntimeError: a file could not be read or written; the step is half done.
        """
        windows = [lane.window for lane in lanes if lane.window is not None]
        stored: dict[int, Future[None]] = {}
        loading = self._reader.submit(self._load, windows[0].moves, None)
        try:
            for number, lane in enumerate(lanes):
                loading.result()
                if number + 1 < len(lanes):
                    coming = windows[number + 1]
                    free = stored.get(coming.part)
                    loading = self._reader.submit(self._load, coming.moves, free)
                yield lane
                window = windows[number]
                stored[window.part] = self._writer.submit(self._store, window.moves, self._now())
            for future in stored.values():
                future.result()
        finally:
            wait([loading, *stored.values()])

    def _move(self, head: torch.Tensor, at: int, nbytes: int) -> Move:
        host = torch.empty(0, dtype=torch.uint8, device="cpu")
        start = head.storage_offset() * head.itemsize
        host.set_(head.untyped_storage(), start, (nbytes,))  # type: ignore[call-overload]
        own = slice(at, at + nbytes)
        between = None if self._between is None else self._between[own]
        return Move(host, self._near[own], between)

    def _now(self) -> torch.cuda.Event | None:
        """When all that was launched so far is done."""
        if not self._streams:
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _load(self, moves: Sequence[Move], free: Future[None] | None) -> None:
        if free is not None:
            free.result()
        for move in moves:
            near = move.near if move.between is None else move.between
            if self._files is not None:
                self._files.read(move.host, near)
        if self._streams:
            with torch.cuda.stream(self._streams[0]):
                for move in moves:
                    source = move.host if move.between is None else move.between
                    move.near.copy_(source, non_blocking=True)
            self._streams[0].synchronize()

    def _store(self, moves: Sequence[Move], done: torch.cuda.Event | None) -> None:
        if done is not None:
            done.synchronize()
            with torch.cuda.stream(self._streams[1]):
                for move in moves:
                    target = move.host if move.between is None else move.between
                    target.copy_(move.near, non_blocking=True)
            self._streams[1].synchronize()
        if self._files is not None:
            for move in moves:
                self._files.write(move.host, move.near if move.between is None else move.between)


def _is_next(head: torch.Tensor, span: Sequence[int], host: torch.Tensor, at: int) -> bool:
    """Whether a tensor follows without a gap, both where it lives and on the stage."""
    start, nbytes = span
    return (
        start + nbytes == at
        and head.data_ptr() + nbytes == host.data_ptr()
        and head.untyped_storage().data_ptr() == host.untyped_storage().data_ptr()
    )
