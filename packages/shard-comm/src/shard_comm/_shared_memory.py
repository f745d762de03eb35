"""Ranks of one host, through memory that all of them map."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from shard_comm import _shared_moves as moves
from shard_comm._arena import Arena
from shard_comm._board import ARRIVED, DONE, SLOTS, Board, Call
from shard_comm._comm import Comm, Work
from shard_comm._patience import SPINS, Patience, is_crowded
from shard_comm._shared_array import MarkedArray, SharedArray
from shard_comm._shared_file import (
    PAGE,
    Exchange,
    NoSharedMemoryError,
    SharedFile,
    host_name,
    share_file,
)
from shard_comm._shared_moves import Body, Turn, Windows
from shard_comm._solo import SoloComm

logger = logging.getLogger("shard_comm")

_ARENA_BYTES = 1 << 40  # of the file, not of memory
_LOOK_S = 0.05
_BARRIER = Call("barrier")
_OBJECT = Call("all_gather_object")

# A rank that waits in one comm also does what others wait for in another.
_live: list[weakref.ref[SharedMemoryComm]] = []


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
    all raise, and the error says who called what.

    Make it with ``SharedMemoryComm.join(inner)``.

    **Memory**: one file without a name for the group. It holds what ``empty`` gave out, about
    17 KiB for each rank to talk through, and up to 8 MiB of staging for each collective under
    way whose input is elsewhere (16 MiB for an ``all_reduce``). Freed memory is used again;
    see ``trim``. A forked child inherits none of it: tensors in it must not be touched there,
    and every call of the comm raises.
    """

    def __init__(self, rank: int, size: int, *, file: SharedFile, timeout_s: float) -> None:
        super().__init__(rank, size, device=torch.device("cpu"), timeout_s=timeout_s)
        self._file = file
        self._board = Board(file, rank, size)
        self._arena = Arena(file, PAGE + Board.nbytes(size) + rank * _ARENA_BYTES, _ARENA_BYTES)
        self._windows = Windows(file)
        self._crowded = is_crowded(size)
        self._spins = 0 if self._crowded else SPINS
        self._lock = threading.RLock()
        self._seq = 0
        self._under_way: dict[int, Turn] = {}
        self._lent: deque[tuple[int, torch.Tensor]] = deque()
        self._broken: str | None = None
        self._full = False
        weakref.finalize(self, file.close).atexit = False
        _watch_forks()
        _live.append(weakref.ref(self, _live.remove))

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
        return cls._of(inner.all_gather_object, inner.rank, inner.size, timeout_s=limit_s)

    @classmethod
    def _of(
        cls,
        exchange: Exchange,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        named: bool | None = None,
    ) -> SharedMemoryComm:
        def prepare(file: SharedFile) -> SharedMemoryComm:
            file.reserve(PAGE, Board.nbytes(size))
            comm = cls(rank, size, file=file, timeout_s=timeout_s)
            file.mark_alive(rank)
            return comm

        nbytes = PAGE + Board.nbytes(size) + size * _ARENA_BYTES
        return share_file(exchange, rank, nbytes, prepare=prepare, named=named)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]`` that other ranks read in place. Local.

        Its storage cannot be resized. Where no memory is left to share it is ordinary memory,
        and the log says so once.
        """
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        with self._lock:
            self._usable()
            self._collect()
            try:
                return self._arena.take(numel, dtype)
            except MemoryError as error:
                if not self._full:
                    logger.warning("%s; ordinary memory serves, more slowly", error)
                self._full = True
                return torch.empty(numel, dtype=dtype)

    def trim(self) -> None:
        """Give all memory back that nobody uses. Local."""
        with self._lock:
            self._usable()
            self._collect()
            self._arena.trim()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it; errors name the missing ranks."""
        limit_s = self.timeout_s
        if timeout_s is not None:
            limit_s = self._limit_s("barrier", timeout_s)
        seq, board = self._next(), self._board
        if not board.meet(seq, self._spins):
            self._await(
                lambda: board.reached(seq, ARRIVED),
                lambda: board.behind(seq, ARRIVED),
                str(_BARRIER),
                limit_s,
            )
            self._compare(seq, _BARRIER)

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data."""
        self._limit_s("all_gather_object", timeout_s)
        packed = pickle.dumps(obj)
        everyone: list[bytes] = []
        self._launch(_OBJECT, lambda turn: moves.collect(turn, packed, everyone), timeout_s).wait()
        return [pickle.loads(theirs) for theirs in everyone]

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order."""
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
            named=self._file.named,
        )
        return SoloComm(self.device) if part.size == 1 else part

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        call = Call("all_gather", inp.numel(), inp.dtype)
        return self._launch(call, lambda turn: moves.gather(turn, out, inp), timeout_s)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        call = Call("reduce_scatter", inp.numel(), inp.dtype, op)
        return self._launch(call, lambda turn: moves.scatter(turn, out, inp, op), timeout_s)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        call = Call("all_reduce", flat.numel(), flat.dtype, op)
        return self._launch(call, lambda turn: moves.reduce_all(turn, flat, op), timeout_s)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        call = Call("broadcast", flat.numel(), flat.dtype, src=src)
        return self._launch(call, lambda turn: moves.broadcast(turn, flat, src), timeout_s)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        call = Call("all_to_all", inp.numel(), inp.dtype)
        return self._launch(call, lambda turn: moves.exchange(turn, out, inp), timeout_s)

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        what = (numel, str(dtype))
        asked = self.all_gather_object(what)
        if any(other != what for other in asked):
            raise RuntimeError(
                f"shared {name}: expected one size and dtype, got {asked} by rank; "
                f"this is rank {self.rank} of {self.size}"
            )
        head_bytes = -(-2 * self.size * 64 // PAGE) * PAGE
        nbytes = numel * dtype.itemsize

        def prepare(file: SharedFile) -> tuple[SharedFile, memoryview, memoryview]:
            file.reserve(PAGE, head_bytes + nbytes)
            return file, file.map(PAGE, head_bytes), file.map(PAGE + head_bytes, nbytes)

        try:
            file, head, body = share_file(
                self.all_gather_object,
                self.rank,
                PAGE + head_bytes + nbytes,
                prepare=prepare,
                named=self._file.named,
            )
        except NoSharedMemoryError as error:
            if self.rank == 0:
                logger.warning("no shared array of %d bytes: %s", nbytes, error)
            return None
        file.close()  # the mappings keep the memory
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
        self._usable()
        self._await(lambda: not behind(), behind, what, limit_s)
        self._board.fence()

    def _order(self) -> None:
        self._usable()
        self._board.fence()

    def _launch(self, call: Call, body: Callable[[Turn], Body], timeout_s: float | None) -> Work:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            seq = self._next()
            self._collect()
            turn = Turn(seq, call, board=self._board, arena=self._arena, windows=self._windows)
            turn.body = body(turn)
            self._under_way[seq] = turn
            self._step(turn)
        return Work(lambda: self._finish(turn, limit_s))

    def _finish(self, turn: Turn, limit_s: float) -> None:
        def done() -> bool:
            with self._lock:
                if turn.body is not None:
                    self._usable()
                return self._advance(turn)

        behind = self._board.behind
        self._await(done, lambda: behind(turn.seq, turn.need), str(turn.call), limit_s)

    def _next(self) -> int:
        """Take the next number, once its slot is free on every rank."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        seq = self._seq
        if seq >= SLOTS:
            before = seq - SLOTS
            if self._under_way and before in self._under_way:
                self._finish(self._under_way[before], self.timeout_s)
            board = self._board
            if not board.reached(before, DONE):
                self._await(
                    lambda: board.reached(before, DONE),
                    lambda: board.behind(before, DONE),
                    f"a collective {SLOTS} after one that is under way",
                    self.timeout_s,
                )
        self._seq = seq + 1
        return seq

    def _advance(self, turn: Turn) -> bool:
        """Do what can be done now; return whether that was all."""
        while turn.body is not None:
            if not self._board.reached(turn.seq, turn.need):
                return False
            if turn.need == ARRIVED:
                self._compare(turn.seq, turn.call)
            self._step(turn)
        return True

    def _step(self, turn: Turn) -> None:
        assert turn.body is not None
        try:
            with torch.no_grad():
                turn.need = next(turn.body)
        except StopIteration as stop:
            turn.body = None
            del self._under_way[turn.seq]
            if stop.value is not None:
                self._lent.append((turn.seq, stop.value))
        except BaseException as error:  # the others wait for what this rank leaves undone
            reason = f"{turn.call} failed on rank {self.rank} of {self.size}: {error!r}"
            failure = self._failure(reason)
            if isinstance(error, Exception):
                raise failure from error
            raise

    def _collect(self) -> None:
        """Take memory back that others have read."""
        while self._lent and self._board.reached(self._lent[0][0], DONE):
            self._lent.popleft()

    def _compare(self, seq: int, call: Call) -> None:
        if not self._board.agrees(seq, call):
            calls = {r: self._board.call(r, seq) for r in self._board.peers} | {self.rank: call}
            said = ", ".join(f"rank {rank} calls {calls[rank]}" for rank in sorted(calls))
            raise self._failure(f"ranks call different collectives: {said}")

    def _await(
        self,
        done: Callable[[], bool],
        behind: Callable[[], list[int]],
        what: str,
        limit_s: float,
    ) -> None:
        """Return when ``done()``; raise when ``behind()``, the awaited ranks, cannot do it."""
        patience = Patience(crowded=self._crowded)
        look_s = _LOOK_S
        while not done():
            patience.pause()
            if patience.spinning:
                continue
            _advance_all()
            waited_s = patience.waited_s
            if waited_s < min(look_s, limit_s):
                continue
            look_s = waited_s + _LOOK_S
            problem = self._problem(behind(), what, waited_s, limit_s)
            if problem is not None and not done():
                raise self._failure(problem)

    def _problem(
        self, missing: list[int], what: str, waited_s: float, limit_s: float
    ) -> str | None:
        """Why waiting on makes no sense, if it does not."""
        for reason in self._board.last_words().values():
            return reason
        here = f"{what} on rank {self.rank} of {self.size}"
        arrived = [rank for rank in range(self.size) if rank not in missing]
        gone = [rank for rank in missing if not self._file.is_alive(rank)]
        if gone:
            names = ", ".join(f"rank {rank} (process {self._board.pid(rank)})" for rank in gone)
            return (
                f"{here}: {names} is gone: it died, exited or let go of the comm; ranks "
                f"{arrived} had arrived"
            )
        if waited_s >= limit_s:
            return f"{here} waited {limit_s:g} s for ranks {missing}; ranks {arrived} had arrived"
        return None

    def _usable(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def _failure(self, reason: str) -> RuntimeError:
        """Break the group for this reason, unless it is broken; return the error to raise."""
        if self._broken is None:
            self._broken = reason
            self._board.give_up(reason)
            self._under_way.clear()
        return RuntimeError(self._broken)

    def _advance_pending(self) -> None:
        """Do this rank's part of what is under way, unless another thread does."""
        if self._under_way and self._lock.acquire(blocking=False):
            try:
                for turn in list(self._under_way.values()):
                    self._advance(turn)
            finally:
                self._lock.release()

    def _leave_to_parent(self) -> None:
        """After a fork, in the child."""
        self._broken = (
            f"this process was forked from rank {self.rank} of {self.size}, and is no rank itself"
        )
        self._lock = threading.RLock()
        self._file.close()


def _advance_all() -> None:
    for comm in _live_comms():
        with contextlib.suppress(RuntimeError):  # kept there, and raised by the waits there
            comm._advance_pending()


def _live_comms() -> list[SharedMemoryComm]:
    return [comm for comm in (reference() for reference in tuple(_live)) if comm is not None]


def _after_fork() -> None:
    for comm in _live_comms():
        comm._leave_to_parent()


@lru_cache(maxsize=1)
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)
