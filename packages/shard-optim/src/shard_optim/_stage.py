"""The window that offloaded state passes through while a step works on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import repeat

import torch

from shard_optim._state_file import BLOCK_BYTES, StateFiles

PARTS = 3
"""One is read, one worked on, one written."""

LINE_BYTES = 64
"""Where the state of a slot begins in a part."""

_EDGES = 2  # blocks that a stretch of a file may have a part of
GRAIN = 64
"""Elements that are never parted: whole vectors of any dtype."""


@dataclass(frozen=True)
class Move:
    """Bytes that a step needs at hand.

    Attributes:
        host: uint8 ``[n]``, where they live.
        between: the same in memory that a device can read, which ``host`` may be.
        near: the same where a step works on them, which ``host`` may be.
    """

    host: torch.Tensor
    between: torch.Tensor
    near: torch.Tensor


@dataclass(frozen=True)
class Window:
    """State that is at hand at the same time.

    Attributes:
        stage: where.
        part: which part of it.
        moves: what is to be brought there and back.
    """

    stage: Stage
    part: int
    moves: list[Move]


class Stage(ABC):
    """A bounded amount of state that a step has at hand, and two threads that see to it.

    While one part is worked on the next one is read and the one before is written.

    Args:
        window_bytes: of all parts together.

    Attributes:
        part_bytes: of one of them.
    """

    def __init__(self, window_bytes: int) -> None:
        self.part_bytes = window_bytes // PARTS // LINE_BYTES * LINE_BYTES
        self._edge_bytes = LINE_BYTES  # what the state of one slot may take besides
        self._reader = ThreadPoolExecutor(1, "shard_optim-read")
        self._writer = ThreadPoolExecutor(1, "shard_optim-write")

    def numel_of(self, itemsizes: Sequence[int]) -> int:
        """Return how many elements fit into a part with state of these sizes. Local."""
        return (self.part_bytes - self._edge_bytes * len(itemsizes)) // sum(itemsizes)

    def window(
        self, number: int, columns: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[Window, list[list[torch.Tensor]]]:
        """Plan how state comes to hand.

        Args:
            number: of the window; those that follow each other have other parts.
            columns: for each slot, tensors ``[n]`` where they live.

        Returns:
            The window, and the same tensors where a step works on them.

        **Collective**: local.
        """
        part = number % PARTS
        at = part * self.part_bytes
        near: list[list[torch.Tensor]] = []
        spans: list[list[int]] = []  # where it begins in all parts, and bytes
        heads: list[tuple[torch.Tensor, torch.Tensor]] = []
        for column in columns:
            near.append([])
            for host in column:
                near[-1].append(self._near_of(host, at))
                pair = host, near[-1][-1]
                if spans and all(map(_is_next, heads[-1], pair, repeat(spans[-1][1]))):
                    spans[-1][1] += host.nbytes
                elif host.nbytes:
                    heads.append(pair)
                    spans.append([at, host.nbytes])
                at += host.nbytes
            at += -at % LINE_BYTES
        moves = [self._move(host, *span) for (host, _), span in zip(heads, spans, strict=True)]
        return Window(self, part, moves), near

    def each(self, windows: Sequence[Window]) -> Generator[int, None, None]:
        """Yield the indices of windows one by one, each at hand until the next one. Local.

        Raises:
            StateLost: a file could not be read or written; the step is half done.
        """
        stored: dict[int, Future[None]] = {}
        loading = self._reader.submit(self._load, windows[0].moves, None)
        try:
            for number, window in enumerate(windows):
                loading.result()
                if number + 1 < len(windows):
                    coming = windows[number + 1]
                    free = stored.get(coming.part)
                    loading = self._reader.submit(self._load, coming.moves, free)
                yield number
                stored[window.part] = self._writer.submit(self._store, window.moves, self._now())
            for future in stored.values():
                future.result()
        finally:
            wait([loading, *stored.values()])

    def _near_of(self, host: torch.Tensor, at: int) -> torch.Tensor:
        """Where a step works on a tensor."""
        return host

    def _move(self, head: torch.Tensor, at: int, nbytes: int) -> Move:
        host = torch.empty(0, dtype=torch.uint8, device="cpu")
        start = head.storage_offset() * head.itemsize
        host.set_(head.untyped_storage(), start, (nbytes,))  # type: ignore[call-overload]
        return Move(host, host, host)

    def _now(self) -> torch.cuda.Event | None:
        """When all that was launched so far is done."""
        return None

    def _load(self, moves: Sequence[Move], free: Future[None] | None) -> None:
        if free is not None:
            free.result()
        self._bring(moves)

    def _store(self, moves: Sequence[Move], done: torch.cuda.Event | None) -> None:
        if done is not None:
            done.synchronize()
        self._take(moves)

    @abstractmethod
    def _bring(self, moves: Sequence[Move]) -> None:
        """Bring state to hand, in the reader's thread."""

    @abstractmethod
    def _take(self, moves: Sequence[Move]) -> None:
        """Take state back, in the writer's thread."""


class MappedStage(Stage):
    """State in files, which a step on the CPU works on where it is mapped.

    Args:
        files: those files.
        window_bytes: of all parts together.

    **Memory**: ``window_bytes`` of the files' pages during a step. The system brings them in blocks
    of up to 2 MiB; a window below 48 MiB has no room for the two that each slot has a part of, and
    takes up to 4 MiB more for each stretch and part. Nothing keeps a part from being larger.
    """

    def __init__(self, files: StateFiles, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self._files = files
        if self.part_bytes >= 4 * _EDGES * BLOCK_BYTES:
            self._edge_bytes = _EDGES * BLOCK_BYTES

    def _bring(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._files.bring(move.host)

    def _take(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._files.drop(move.host)


class DeviceStage(Stage):
    """State in host memory or in files, which a step works on in memory of a CUDA device.

    Transfers have a stream for each direction.

    Args:
        device: the parameters'.
        window_bytes: of all parts together.
        files: where state is mapped from; None where it is in pinned memory.

    **Memory**: ``window_bytes`` on the device, as long as the object lives. With files as much
    pinned host memory, and as much of the files' pages during a step.
    """

    def __init__(
        self, device: torch.device, window_bytes: int, *, files: StateFiles | None = None
    ) -> None:
        super().__init__(window_bytes)
        self._files = files
        self._device = device
        numel = PARTS * self.part_bytes
        self._near = torch.empty(numel, dtype=torch.uint8, device=device)
        self._between: torch.Tensor | None = None
        if files is not None:
            self._between = torch.empty(numel, dtype=torch.uint8, device="cpu", pin_memory=True)
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def _near_of(self, host: torch.Tensor, at: int) -> torch.Tensor:
        return self._near[at : at + host.nbytes].view(host.dtype)

    def _move(self, head: torch.Tensor, at: int, nbytes: int) -> Move:
        own = slice(at, at + nbytes)
        host = super()._move(head, at, nbytes).host
        return Move(host, host if self._between is None else self._between[own], self._near[own])

    def _now(self) -> torch.cuda.Event | None:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def _bring(self, moves: Sequence[Move]) -> None:
        with torch.cuda.stream(self._inward):
            for move in moves:
                self._copy(move.between, move.host)
                move.near.copy_(move.between, non_blocking=True)
        self._inward.synchronize()

    def _take(self, moves: Sequence[Move]) -> None:
        with torch.cuda.stream(self._outward):
            for move in moves:
                move.between.copy_(move.near, non_blocking=True)
        self._outward.synchronize()
        for move in moves:
            self._copy(move.host, move.between)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between a file and pinned memory; where there is no file they are the same."""
        if self._files is not None:
            mapped = target if self._files.holds(target) else source
            self._files.bring(mapped)
            target.copy_(source)
            self._files.drop(mapped)


def _is_next(head: torch.Tensor, tensor: torch.Tensor, nbytes: int) -> bool:
    """Whether a tensor follows so many bytes from another one on without a gap."""
    return (
        head.data_ptr() + nbytes == tensor.data_ptr()
        and head.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    )
