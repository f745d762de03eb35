"""What one rank does in each collective of several hosts, step by step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

from shard_comm import _shared_moves as moves
from shard_comm._board import Call
from shard_comm._group import GroupComm, bytes_of
from shard_comm._hosts import Hosts
from shard_comm._shared_memory import SharedMemoryComm
from shard_comm._shared_moves import Fold
from shard_comm._tree import join_subtrees
from shard_comm._turn import Body, Turn


class Clock:
    """What is left of the time that one collective may take.

    Args:
        limit_s: seconds from now on.
    """

    def __init__(self, limit_s: float) -> None:
        self._end = time.monotonic() + limit_s

    def left_s(self) -> float:
        """Return the seconds left, in tenths, and a tenth where there are none."""
        return max(math.ceil(10 * (self._end - time.monotonic())), 1) / 10


class Relay:
    """The steps of one rank: over memory inside its host, and to its counterparts elsewhere.

    All ranks take the same steps in the same order. What moves between hosts moves as bytes.

    Args:
        local: the ranks of this host.
        net: all ranks.
        hosts: where they are.
    """

    def __init__(self, local: SharedMemoryComm, net: GroupComm, hosts: Hosts) -> None:
        self.rank = net.rank
        self.size = net.size
        self.hosts = hosts
        self._local = local
        self._net = net
        self._peers = hosts.members[hosts.of[self.rank]]
        self._charges = {rank: hosts.charges(rank) for rank in self._peers}
        self._counterparts = hosts.counterparts(self.rank)

    def gather(self, call: Call, out: torch.Tensor, inp: torch.Tensor, clock: Clock) -> None:
        """Take in the slices of this rank's charges, then read what each rank of the host has."""
        mine, charges = bytes_of(inp), self._charges[self.rank]
        rows = bytes_of(writable(out)).view(self.size, mine.numel())
        count = 1 + max(len(theirs) for theirs in self._charges.values())
        block = self._take(count, mine.numel(), dtype=torch.uint8)
        block[0].copy_(mine)
        self._exchange(
            block[1 : 1 + len(charges)].view(-1),
            mine.repeat(len(self._counterparts)),
            received=dict.fromkeys(charges, mine.numel()),
            sent=dict.fromkeys(self._counterparts, mine.numel()),
            call=call,
            tensor=inp,
            clock=clock,
        )

        def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
            for place, peer in enumerate(self._peers):
                for row, rank in enumerate([peer, *self._charges[peer]]):
                    if rows[rank].data_ptr() != mine.data_ptr():
                        rows[rank, low:high].copy_(theirs(place)[row, :])

        self._locally(call, lambda turn: moves.by_columns(turn, block, read, showing=True), clock)

    def scatter(
        self, call: Call, out: torch.Tensor, inp: torch.Tensor, fold: Fold, clock: Clock
    ) -> None:
        """Reduce inside the host for this rank and its charges, then join what hosts came to."""
        numel, parts = out.numel(), self.hosts.subtrees[self.hosts.of[self.rank]]
        wanted = [self.rank, *self._charges[self.rank]]
        reduced = self._take(len(wanted), len(parts), numel, dtype=out.dtype)
        places = self.hosts.places

        def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
            for rank, results in zip(wanted, reduced, strict=True):
                for (start, stop), result in zip(parts, results, strict=True):
                    terms = [theirs(places[peer])[rank] for peer in range(start, stop)]
                    fold(terms, result[low:high])

        rows = inp.view(self.size, numel)

        def body(turn: Turn) -> Body:
            return moves.by_columns(turn, rows, read, showing=True, unread=self.rank)

        self._locally(call, body, clock)
        theirs = {rank: self.hosts.subtrees[self.hosts.of[rank]] for rank in self._counterparts}
        arriving = [part for parts in theirs.values() for part in parts]
        received = self._take(len(arriving), numel, dtype=out.dtype)
        row_bytes = numel * out.itemsize
        self._exchange(
            bytes_of(received),
            bytes_of(reduced[1:]),
            received={rank: len(parts) * row_bytes for rank, parts in theirs.items()},
            sent=dict.fromkeys(wanted[1:], len(parts) * row_bytes),
            call=call,
            tensor=inp,
            clock=clock,
        )
        found = dict(zip([*parts, *arriving], [*reduced[0], *received], strict=True))
        writable(out).view(-1).copy_(join_subtrees(found, call.op))

    def reduce_large(
        self, call: Call, out: torch.Tensor, flat: torch.Tensor, fold: Fold, clock: Clock
    ) -> None:
        """Reduce a part each, and gather the parts."""
        numel = -(-flat.numel() // self.size)
        padded = self._take(numel * self.size, dtype=flat.dtype)
        padded[: flat.numel()].copy_(flat)
        padded[flat.numel() :].zero_()
        part = self._take(numel, dtype=out.dtype)
        self.scatter(call, part, padded, fold, clock)
        whole = self._take(numel * self.size, dtype=out.dtype)
        self.gather(call, whole, part, clock)
        out.copy_(whole[: flat.numel()])

    def spread(self, call: Call, flat: torch.Tensor, src: int, clock: Clock) -> None:
        """Send each rank of each other host a chunk; inside the host read all of it."""
        whole = bytes_of(writable(flat))
        chunks = {rank: self._chunk(rank, whole) for rank in range(self.size)}
        here, there = self.hosts.of[self.rank], self.hosts.of[src]
        remote = [rank for rank in range(self.size) if self.hosts.of[rank] != there]
        sizes = {rank: chunks[rank].numel() for rank in remote}
        width = -(-whole.numel() // len(self._peers))
        block = self._take(width, dtype=torch.uint8)
        self._exchange(
            block[: sizes.get(self.rank, 0)],
            torch.cat([whole[:0], *(chunks[rank] for rank in remote if self.rank == src)]),
            received={src: sizes[self.rank]} if here != there else {},
            sent=sizes if self.rank == src else {},
            call=call,
            tensor=flat,
            clock=clock,
        )

        def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
            for place, peer in enumerate(self._peers):
                into = chunks[peer][low:high]
                into.copy_(theirs(place)[0, : into.numel()])

        def body(turn: Turn) -> Body:
            if here == there:
                return moves.broadcast(turn, whole, self.hosts.places[src])
            return moves.by_columns(turn, block.view(1, -1), read, showing=True)

        self._locally(call, body, clock)

    def _take(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the host, which is warm when it is taken again."""
        return self._local.empty(torch.Size(shape).numel(), dtype).view(shape)

    def _chunk(self, rank: int, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of all bytes that a rank takes in for its host."""
        width = -(-whole.numel() // len(self.hosts.members[self.hosts.of[rank]]))
        place = self.hosts.places[rank]
        return whole[place * width : (place + 1) * width]

    def _exchange(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        received: dict[int, int],
        sent: dict[int, int],
        call: Call,
        tensor: torch.Tensor,
        clock: Clock,
    ) -> None:
        """Move so many bytes from and to these ranks."""
        sizes = [[nbytes.get(rank, 0) for rank in range(self.size)] for nbytes in (received, sent)]
        op = f"{call.kind} {call.op}" if call.op else call.kind
        self._net._exchange(
            out, inp, (sizes[0], sizes[1]), op=op, tensor=tensor, timeout_s=clock.left_s()
        ).wait()

    def _locally(self, call: Call, body: Callable[[Turn], Body], clock: Clock) -> None:
        self._local._launch(call, body, clock.left_s()).wait()


def writable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that may be written outside of inference mode."""
    if not tensor.is_inference() or tensor.numel() == 0:
        return tensor
    alias = from_dlpack(bytes_of(tensor))
    return alias.view(tensor.dtype).view(tensor.shape)
