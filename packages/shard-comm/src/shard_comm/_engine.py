"""The collectives of one rank that are under way: who is awaited, and who does what meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import inf

import torch

from shard_comm._arena import Arena
from shard_comm._board import ARRIVED, DONE, SLOTS, Board, Call
from shard_comm._comm import Work
from shard_comm._history import KEPT, log_calls
from shard_comm._mapping import LARGE_PAGE, PAGE, round_up
from shard_comm._patience import SPINS, Patience
from shard_comm._shared_file import SharedFile
from shard_comm._turn import Body, Turn, Windows

logger = logging.getLogger("shard_comm")

_ARENA_BYTES = 1 << 40  # of the file, not of memory
_LOOK_S = 0.05
_WARN_S = 10.0
_SPEAK_S = 2.0  # how long the rank that speaks for all may take to, on a machine under load
_BARRIER = Call("barrier")

# A rank that waits in one group also does what others wait for in another.
_live: list[weakref.ref[Engine]] = []


class Engine:
    """What one rank of a group has under way, and how it waits.

    A rank does its part of a collective when it waits for it, or when it waits for anything else
    and gets there. After the first error the group is broken for good.

    Args:
        file: the file that all ranks have open; it is closed with this object.
        rank: this rank.
        size: number of ranks.
        timeout_s: how long to wait for ranks that are too far behind to begin.
        numbers: what messages call the ranks, where these are some of a larger group.
        whole: number of ranks of that group.

    Attributes:
        file: the file.
        board: where ranks say how far they are.
        arena: this rank's memory.
        rank: this rank.
        size: number of ranks.
    """

    def __init__(
        self,
        file: SharedFile,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        numbers: Sequence[int] | None = None,
        whole: int | None = None,
    ) -> None:
        self.file = file
        self.board = Board(file, rank, size)
        self.arena = Arena(file, _arenas_start(size) + rank * _ARENA_BYTES, _ARENA_BYTES)
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._numbers = list(range(size)) if numbers is None else list(numbers)
        self._whole = size if whole is None else whole
        self._me = f"rank {self._numbers[rank]} of {self._whole}"
        self._windows = Windows(file)
        self._crowded = True
        self._spins = 0
        self._lock = threading.RLock()
        self._seq = 0
        self._under_way: dict[int, Turn] = {}
        self._lent: deque[tuple[int, torch.Tensor]] = deque()
        self._broken: str | None = None
        weakref.finalize(self, file.close).atexit = False
        _watch_forks()
        _live.append(weakref.ref(self, _live.remove))

    @staticmethod
    def file_bytes(size: int) -> int:
        """Bytes of the file of ``size`` ranks; few of them ever become memory."""
        return _arenas_start(size) + size * _ARENA_BYTES

    def begin(self) -> None:
        """Go on once every rank has made its engine: spin where each has a processor."""
        self._crowded = self.size > self.board.processors()
        self._spins = 0 if self._crowded else SPINS

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory of this rank that others can read.

        Raises:
            MemoryError: there is none left.
        """
        with self._lock:
            self.check()
            self.collect()
            return self.arena.take(numel, dtype)

    def trim(self) -> None:
        """Give free memory back to the system."""
        with self._lock:
            self.check()
            self.collect()
            self.arena.trim()

    def close(self, reason: str) -> None:
        """Let go of the file: later calls here raise for this reason, and others find it gone."""
        with self._lock:
            if self._broken is None:
                self._broken = reason
                self.collect()
                self.arena.trim()  # not what others may still read: that goes with this object
            self._under_way.clear()
            self.file.close()

    def barrier(self, limit_s: float) -> None:
        """Wait for every rank to call this."""
        seq, board = self._next(), self.board
        if not board.meet(seq, self._spins):
            self.wait(
                lambda: board.reached(seq, ARRIVED),
                lambda: board.behind(seq, ARRIVED),
                str(_BARRIER),
                limit_s,
            )
            self._compare(seq, _BARRIER)

    def launch(self, call: Call, body: Callable[[Turn], Body], limit_s: float) -> Work:
        """Announce a call; return the work whose wait does the rest."""
        with self._lock:
            seq = self._next()
            self.collect()
            turn = Turn(seq, call, board=self.board, arena=self.arena, windows=self._windows)
            turn.body = body(turn)
            self._under_way[seq] = turn
            self._step(turn)
        return Work(lambda: self._finish(turn, limit_s))

    def _finish(self, turn: Turn, limit_s: float) -> None:
        def done() -> bool:
            with self._lock:
                if turn.body is not None:
                    self.check()
                return self._advance(turn)

        behind = self.board.behind
        self.wait(done, lambda: behind(turn.seq, turn.need), str(turn.call), limit_s)

    def _next(self) -> int:
        """Take the next number, once its slot is free on every rank."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        seq = self._seq
        if seq >= SLOTS:
            before = seq - SLOTS
            if self._under_way and before in self._under_way:
                self._finish(self._under_way[before], self._timeout_s)
            board = self.board
            if not board.reached(before, DONE):
                self.wait(
                    lambda: board.reached(before, DONE),
                    lambda: board.behind(before, DONE),
                    f"a collective {SLOTS} after one that is under way",
                    self._timeout_s,
                )
        self._seq = seq + 1
        return seq

    def _advance(self, turn: Turn) -> bool:
        """Do what can be done now; return whether that was all."""
        while turn.body is not None:
            if not self.board.reached(turn.seq, turn.need):
                return False
            if turn.need == ARRIVED:
                self._compare(turn.seq, turn.call)
            self._step(turn)
        return True

    def _step(self, turn: Turn) -> None:
        assert turn.body is not None
        self.board.stories.hush()
        try:
            with torch.no_grad():
                turn.need = next(turn.body)
        except StopIteration as stop:
            if turn.exposed:  # who gave up may have written what was read here
                for reason in self.board.last_words().values():
                    raise self.failure(reason) from None
            turn.body = None
            del self._under_way[turn.seq]
            if stop.value is not None:
                self._lent.append((turn.seq, stop.value))
        except BaseException as error:  # the others wait for what this rank leaves undone
            reason = f"{turn.call} failed on {self._me}: {error!r}"
            failure = self.failure(reason)
            if isinstance(error, Exception):
                raise failure from error
            raise

    def collect(self) -> None:
        """Take memory back that others have read."""
        while self._lent and self.board.reached(self._lent[0][0], DONE):
            self._lent.popleft()

    def _compare(self, seq: int, call: Call) -> None:
        if not self.board.agrees(seq, call):
            said = ", ".join(
                f"rank {self._numbers[r]} calls {self.board.call(r, seq)}" for r in range(self.size)
            )
            raise self.failure(f"ranks call different collectives: {said}")

    def wait(
        self,
        done: Callable[[], bool],
        behind: Callable[[], list[int]],
        what: str,
        limit_s: float,
    ) -> None:
        """Return when ``done()``; raise when ``behind()``, the awaited ranks, cannot do it."""
        patience = Patience(crowded=self._crowded)
        look_s, warn_s = _LOOK_S, _WARN_S
        since: list[int] = []
        try:
            while not done():
                patience.pause()
                if patience.spinning:
                    continue
                _advance_all()
                waited_s = patience.waited_s
                if waited_s < min(look_s, limit_s):
                    continue
                look_s = waited_s + _LOOK_S
                missing = behind()
                since = since or self.board.stories.beats()
                self.board.stories.tell(what, missing)
                if waited_s >= warn_s:
                    warn_s = inf
                    logger.warning("%s", self._waits(what, _WARN_S, missing))
                heard = self._heard()
                problem = heard or self._problem(missing, what, waited_s, limit_s)
                problem = problem or self._knot(since)
                if problem is not None and not done():
                    failure = self.failure(problem)
                    if not heard and self._broken == problem:
                        self._log_calls()
                    raise failure
        finally:
            self.board.stories.hush()

    def _heard(self) -> str | None:
        """Why the group is broken, here or on another rank."""
        return self._broken or next(iter(self.board.last_words().values()), None)

    def _log_calls(self) -> None:
        for rank, number in enumerate(self._numbers):
            log_calls(self.board.calls(rank, KEPT), number, self._whole)

    def _problem(
        self, missing: list[int], what: str, waited_s: float, limit_s: float
    ) -> str | None:
        """Why waiting on makes no sense, if it does not."""
        here = f"{what} on {self._me}"
        gone = [rank for rank in missing if not self.file.is_alive(rank)]
        if gone:
            names = ", ".join(
                f"rank {self._numbers[rank]} (process {self.board.pid(rank)})" for rank in gone
            )
            return (
                f"{here}: {names} is gone: it died, exited or let go of the comm; ranks "
                f"{self._arrived(missing)} had arrived"
            )
        return self._waits(what, limit_s, missing) if waited_s >= limit_s else None

    def _waits(self, what: str, waited_s: float, missing: list[int]) -> str:
        """How long, for whom, and what those wait for who are elsewhere."""
        awaited = [self._numbers[rank] for rank in missing]
        others = "".join(f"; {w}" for w in self._told(self.board.stories.told(), missing))
        waited = f"{what} on {self._me} waited {waited_s:g} s for ranks {awaited}"
        return f"{waited}; ranks {self._arrived(missing)} had arrived{others}"

    def _arrived(self, missing: list[int]) -> list[int]:
        return [self._numbers[rank] for rank in range(self.size) if rank not in missing]

    def _knot(self, since: list[int]) -> str | None:
        """Why waiting on makes no sense where ranks wait for each other."""
        knot = self.board.stories.knot(since)
        if not knot:
            return None
        claims = all(text.startswith("claim ") for text in knot.values())
        hint = "; a claim returns once all ranks have called release()" if claims else ""
        return f"ranks wait for each other: {', '.join(self._told(knot, knot))}{hint}"

    def _told(self, stories: Mapping[int, str], ranks: Iterable[int]) -> list[str]:
        return [f"rank {self._numbers[r]} is in {stories[r]}" for r in ranks if r in stories]

    def check(self) -> None:
        """Raise if the group is broken."""
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def listen(self) -> None:
        """Raise if a rank has given up, here or elsewhere."""
        heard = self._heard()
        if heard is not None:
            raise self.failure(heard)

    def failure(self, reason: str) -> RuntimeError:
        """Break the group for this reason, unless it is broken; return the error to raise."""
        if self._broken is None:
            self._broken = self._first_reason(reason)
            self.board.give_up(self._broken)
            self._under_way.clear()
        return RuntimeError(self._broken)

    def _first_reason(self, reason: str) -> str:
        """Return why the group breaks: of ranks that find a reason each, one speaks for all."""
        patience = Patience(crowded=True)
        while True:
            claimed = self.file.claim(self.size)
            for earlier in self.board.last_words().values():
                return earlier
            if claimed or patience.waited_s > _SPEAK_S:  # who claimed it stands still
                return reason
            patience.pause()

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
        self._broken = f"this process was forked from {self._me}, and is no rank itself"
        self._lock = threading.RLock()
        self.file.close()


def _arenas_start(size: int) -> int:
    return round_up(PAGE + Board.nbytes(size), LARGE_PAGE)


def _advance_all() -> None:
    for engine in _live_engines():
        with contextlib.suppress(RuntimeError):  # kept there, and raised by the waits there
            engine._advance_pending()


def _live_engines() -> list[Engine]:
    return [engine for engine in (reference() for reference in tuple(_live)) if engine is not None]


def _after_fork() -> None:
    for engine in _live_engines():
        engine._leave_to_parent()


@lru_cache(maxsize=1)
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)
