"""Ranks of one host, through memory that all of them map."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shard_comm import _shared_moves as moves
from shard_comm._board import Board, Call
from shard_comm._calls import noted_suffix
from shard_comm._comm import Comm, Work
from shard_comm._engine import Engine
from shard_comm._mapping import LARGE_PAGE, PAGE, make_large, round_up
from shard_comm._shared_array import MarkedArray, SharedArray
from shard_comm._shared_file import (
    Exchange,
    NoSharedMemoryError,
    SharedFile,
    host_name,
    share_file,
)
from shard_comm._solo import SoloComm
from shard_comm._turn import Body, Turn

logger = logging.getLogger("shard_comm")


class SharedMemoryComm(Comm):
    """One rank of a group whose ranks are processes of one host; tensors are CPU tensors.

    Ranks read what they need where it lies. Memory from ``empty`` is read in place: a
    ``reduce_scatter`` reads its slice of every rank's input once and sums in the fixed tree,
    an ``all_gather`` copies each slice once. Other inputs pass through staging memory.

    Nothing runs in the background: an ``async_op`` announces the input and the wait does the
    work. A rank that waits for anything, also in another SharedMemoryComm, meanwhile does its
    part of all that is under way, so works may be waited for in any order. It may not wait for
    others elsewhere (in a GroupComm, say) while they wait for it here.

    A rank that dies makes the others raise within a second. After any error the group is broken:
    every later call on every rank raises the first reason. Ranks that call different collectives
    all raise, and the error says who called what. Where one is missing, the rank that finds
    out logs the last 64 calls of all.

    Make it with ``SharedMemoryComm.join(inner)``.

    **Memory**: one file without a name for the group. It holds what ``empty`` gave out, about
    49 KiB for each rank to talk through, and up to 8 MiB of staging for each collective under
    way whose input is elsewhere (16 MiB for an ``all_reduce``). Freed memory is used again;
    see ``trim``. A forked child inherits none of it: tensors in it must not be touched there,
    and every call of the comm raises.
    """

    reads_own = True

    def __init__(self, engine: Engine, *, timeout_s: float) -> None:
        device = torch.device("cpu")
        super().__init__(engine.rank, engine.size, device=device, timeout_s=timeout_s)
        self._engine = engine
        self._full = False

    @classmethod
    def join(cls, inner: Comm, *, timeout_s: float | None = None) -> SharedMemoryComm:
        """Return the comm of the ranks of ``inner``, which is used to meet and then no more.

        Args:
            inner: a comm of at least two processes for CPU tensors.
            timeout_s: seconds after which a wait raises; by default as in ``inner``.

        Raises:
            ValueError: ``inner`` has one rank, or is not for CPU tensors.
            RuntimeError: the ranks are not on one host, or cannot open memory of one another;
                all of them raise and say which rank failed at what.

        **Collective**.
        """
        if inner.size < 2 or inner.device.type != "cpu":
            raise ValueError(f"expected a comm of two or more ranks for CPU tensors, got {inner!r}")
        hosts = len(set(inner.all_gather_object(host_name())))
        if hosts > 1:
            raise NoSharedMemoryError(f"the {inner.size} ranks are on {hosts} hosts")
        limit_s = inner.timeout_s if timeout_s is None else timeout_s
        comm = cls._of(inner.all_gather_object, inner.rank, inner.size, timeout_s=limit_s)
        comm.process_group = inner.process_group
        return comm

    @classmethod
    def _of(
        cls,
        exchange: Exchange,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        named: bool | None = None,
        numbers: Sequence[int] | None = None,
        whole: int | None = None,
    ) -> SharedMemoryComm:
        def prepare(file: SharedFile) -> Engine:
            file.reserve(PAGE, Board.nbytes(size))
            engine = Engine(file, rank, size, timeout_s=timeout_s, numbers=numbers, whole=whole)
            file.mark_alive(rank)
            return engine

        engine = share_file(
            exchange, rank, Engine.file_bytes(size), prepare=prepare, named=named, numbers=numbers
        )
        engine.begin()
        return cls(engine, timeout_s=timeout_s)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]`` that other ranks read in place. Local.

        Its storage cannot be resized. Where no memory is left to share it is ordinary memory,
        and the log says so once.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        try:
            return self._engine.take(numel, dtype)
        except MemoryError as error:
            if not self._full:
                logger.warning("%s; ordinary memory serves, more slowly", error)
            self._full = True
            return torch.empty(numel, dtype=dtype)

    def trim(self) -> None:
        """Give all memory back that nobody uses. Local."""
        self._engine.trim()

    def close(self) -> None:
        """Give back what nobody uses; ranks that still wait for this one find it gone. Local."""
        super().close()
        self._engine.close(f"this comm is closed {self._where}; make a new one")

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it; errors name the missing ranks."""
        if timeout_s is None and not self.closed:
            self._engine.barrier(self.timeout_s)
        else:
            self._engine.barrier(self._limit_s("barrier", timeout_s))

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data."""
        self._limit_s("all_gather_object", timeout_s)
        packed = pickle.dumps(obj)
        everyone: list[bytes] = []
        call = Call("all_gather_object", label=noted_suffix())
        self._launch(call, lambda turn: moves.collect(turn, packed, everyone), timeout_s).wait()
        return [pickle.loads(theirs) for theirs in everyone]

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order."""
        self._check_open("split")
        colors = self.all_gather_object(color)
        members = [rank for rank, other in enumerate(colors) if other == color]

        def exchange(obj: Any) -> list[Any]:
            everyone = self.all_gather_object(obj)
            return [everyone[rank] for rank in members]

        # Also a rank that stays alone takes part, as every exchange is one of the whole group.
        part = SharedMemoryComm._of(
            exchange,
            members.index(self.rank),
            len(members),
            timeout_s=self.timeout_s,
            named=self._engine.file.named,
        )
        return SoloComm(self.device) if part.size == 1 else part

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        call = call_of("all_gather", inp)
        return self._launch(call, lambda turn: moves.gather(turn, out, inp), timeout_s)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        call, fold = call_of("reduce_scatter", inp, op=op), moves.folding(op)
        return self._launch(call, lambda turn: moves.scatter(turn, out, inp, fold), timeout_s)

    def _sum_parts(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        own: Sequence[torch.Tensor],
        divisor: int,
        donated: bool,
        timeout_s: float | None,
    ) -> Work:
        call = call_of("reduce_scatter", inp, op="sum")

        def body(turn: Turn) -> Body:
            return moves.scatter_sum(turn, out, inp, own, divisor, donated=donated)

        return self._launch(call, body, timeout_s)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        call = call_of("all_reduce", flat, op=op)
        return self._launch(call, lambda turn: moves.reduce_all(turn, flat, op), timeout_s)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        call = call_of("broadcast", flat, src=src)
        return self._launch(call, lambda turn: moves.broadcast(turn, flat, src), timeout_s)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        call = call_of("all_to_all", inp)
        return self._launch(call, lambda turn: moves.exchange(turn, out, inp), timeout_s)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        call, fold = call_of("reduce_scatter", inp, op="sum"), moves.adding(divisor)
        return self._launch(call, lambda turn: moves.scatter(turn, out, inp, fold), timeout_s)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if out.dtype == flat.dtype:  # then both are the same memory
            if divisor != 1:
                flat.div_(divisor)
            return self._all_reduce(flat, "sum", timeout_s)
        call = call_of("all_reduce", flat, op="sum")
        return self._launch(
            call, lambda turn: moves.sum_all_wide(turn, out, flat, divisor), timeout_s
        )

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        what = (numel, str(dtype))
        asked = self.all_gather_object(what)
        if any(other != what for other in asked):
            ranks: dict[tuple[int, str], list[int]] = {}
            for rank, other in enumerate(asked):
                ranks.setdefault(other, []).append(rank)
            got = ", ".join(f"{n} of {kind} on ranks {who}" for (n, kind), who in ranks.items())
            label = f" {name}" if name else ""
            raise RuntimeError(
                f"shared{label}: expected one size and dtype on all ranks, got {got} {self._where}"
            )
        head_bytes, nbytes = 2 * self.size * 64, numel * dtype.itemsize
        start = round_up(PAGE + head_bytes, LARGE_PAGE)

        def prepare(file: SharedFile) -> tuple[SharedFile, memoryview, memoryview]:
            file.reserve(PAGE, head_bytes)
            file.reserve(start, nbytes)
            return file, file.map(PAGE, head_bytes), file.map(start, nbytes)

        try:
            file, head, body = share_file(
                self.all_gather_object,
                self.rank,
                start + nbytes,
                prepare=prepare,
                named=self._engine.file.named,
            )
        except NoSharedMemoryError as error:
            if self.rank == 0:
                logger.warning("no shared array of %d bytes: %s", nbytes, error)
            return None
        file.close()  # the mappings keep the memory
        low, high = (rank * nbytes // self.size for rank in (self.rank, self.rank + 1))
        make_large(body[low // LARGE_PAGE * LARGE_PAGE : high])
        marks = head.cast("q")[: 2 * self.size * 8 : 8]  # a cache line each
        return MarkedArray(
            torch.frombuffer(body, dtype=dtype),
            self.rank,
            published=marks[: self.size],
            released=marks[self.size :],
            wait=self._await_marks,
            changed=self._order,
            name=name,
        )

    def _await_marks(
        self, behind: Callable[[], list[int]], what: str, timeout_s: float | None
    ) -> None:
        limit_s = self._limit_s(what, timeout_s)
        self._engine.check()
        self._engine.wait(lambda: not behind(), behind, what, limit_s)
        self._engine.board.fence()

    def _order(self) -> None:
        self._engine.check()
        self._engine.board.fence()

    def _launch(self, call: Call, body: Callable[[Turn], Body], timeout_s: float | None) -> Work:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return self._engine.launch(call, body, limit_s)


def call_of(kind: str, tensor: torch.Tensor, *, op: str = "", src: int = -1) -> Call:
    """Return the call of a collective on a tensor, with what was noted of it. Local."""
    return Call(kind, tensor.numel(), tensor.dtype, op, src, noted_suffix())
