"""One collective of one rank, and the memory it reads and shows."""

from __future__ import annotations

from collections.abc import Generator

import torch

from shard_comm._arena import Arena, Place
from shard_comm._board import Board, Call
from shard_comm._shared_file import SharedFile

Body = Generator[int, None, "torch.Tensor | None"]
"""Yields the step that every rank must reach before it goes on. Returns memory of this rank
that others may still read, after everything that the caller owns is free."""


class Windows:
    """The parts of the file that other ranks put data in, mapped when first read."""

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._maps: dict[int, torch.Tensor] = {}

    def bytes_at(self, place: Place, start: int, nbytes: int) -> torch.Tensor:
        """Return ``[nbytes]`` bytes that begin ``start`` after the place."""
        window = self._maps.get(place.segment)
        if window is None:
            view = self._file.map(place.segment, place.segment_bytes)
            window = torch.frombuffer(view, dtype=torch.uint8)
            self._maps[place.segment] = window
        begin = place.offset - place.segment + start
        return window[begin : begin + nbytes]


class Turn:
    """One collective of one rank.

    Attributes:
        seq: its number.
        call: what the caller called.
        need: the step that all ranks must reach before the body goes on.
        body: what is left to do; None when it is done.
        exposed: whether memory is read that its owner's caller writes once the owner gives up.
    """

    def __init__(self, seq: int, call: Call, *, board: Board, arena: Arena, windows: Windows):
        self.seq = seq
        self.call = call
        self.need = 0
        self.body: Body | None = None
        self.exposed = False
        self.rank = board.rank
        self.size = board.size
        self._board = board
        self._arena = arena
        self._windows = windows

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor lies in this rank's shared memory, if it does."""
        return self._arena.find(tensor.data_ptr())

    def enlarge(self, tensor: torch.Tensor) -> None:
        """Put what a tensor holds on large pages, if it lies in this rank's shared memory."""
        self._arena.enlarge(tensor.data_ptr(), tensor.nbytes)

    def stage(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new shared memory."""
        return self._arena.take(torch.Size(shape).numel(), dtype).view(shape)

    def arrive(self, place: Place | None = None, *, note: int = 0) -> None:
        """Announce the call, where its data lie, and a number to go with it."""
        self._board.post(self.seq, self.call, place, note)

    def reach(self, step: int) -> None:
        """Announce that this rank is that far."""
        self._board.reach(self.seq, step)

    def note(self, rank: int) -> int:
        """Return the number that another rank gave to ``arrive``."""
        return self._board.note(rank, self.seq)

    def theirs(self, rank: int, dtype: torch.dtype, *shape: int, skip: int = 0) -> torch.Tensor:
        """Return data of another rank, ``skip`` elements after where it put them."""
        place = self._board.place(rank, self.seq)
        if place is None:
            raise RuntimeError(f"rank {rank} of {self.size} offers no data for {self.call}")
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        data = self._windows.bytes_at(place, skip * dtype.itemsize, nbytes)
        return data.view(dtype).view(shape)
