"""Ranks as threads of one process: for tests, notebooks and debuggers."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shard_comm._calls import describe, noted_suffix
from shard_comm._comm import Comm, Work
from shard_comm._shared_array import MarkedArray, SharedArray
from shard_comm._slices import Slices
from shard_comm._tree import reduce_terms, sum_parts


class _Meeting:
    """Where the ranks of one group meet; each call is one collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._arrived: dict[int, tuple[Any, Any]] = {}
        self._left: set[int] = set()
        self._broken: str | None = None
        self._parts: list[_Meeting] = []

    def part(self, size: int) -> _Meeting:
        """Return a new meeting of some of the ranks; it breaks with this one."""
        part = _Meeting(size)
        with self._changed:
            self._parts.append(part)
        return part

    def enter(self, rank: int, key: Any, value: Any, timeout_s: float) -> list[Any]:
        """Wait for every rank; return their values in rank order."""
        with self._changed:
            if self._broken is not None:
                raise RuntimeError(self._broken)
            if rank in self._arrived:
                first = self._arrived[rank][0]
                self._break(f"rank {rank} of {self.size} calls {key} while it is still in {first}")
            self._arrived[rank] = (key, value)
            self._changed.notify_all()
            everyone = range(self.size)
            self._await(lambda: len(self._arrived) == self.size, rank, key, timeout_s)
            keys = [self._arrived[r][0] for r in everyone]
            if any(k != keys[0] for k in keys):
                calls = ", ".join(f"rank {r} calls {k}" for r, k in enumerate(keys))
                self._break(f"ranks call different collectives: {calls}")
                raise RuntimeError(self._broken)
            return [self._arrived[r][1] for r in everyone]

    def leave(self, rank: int, timeout_s: float) -> None:
        """Wait until every rank has read what it needs; then the next meeting may begin."""
        with self._changed:
            self._left.add(rank)
            if len(self._left) == self.size:
                self._arrived.clear()
                self._left.clear()
                self._changed.notify_all()
                return
            self._await(lambda: rank not in self._left, rank, "the end of a collective", timeout_s)

    def abort(self, reason: str) -> None:
        with self._changed:
            self._break(reason)

    def notify(self) -> None:
        """Let those who watch look again."""
        with self._changed:
            self._changed.notify_all()

    def watch(
        self, behind: Callable[[], list[int]], rank: int, what: str, timeout_s: float
    ) -> None:
        """Wait until ``behind()``, the ranks that are awaited, is empty."""
        finite = timeout_s if timeout_s < threading.TIMEOUT_MAX else None
        with self._changed:
            self._changed.wait_for(lambda: self._broken is not None or not behind(), finite)
            missing = behind()
            if missing:
                self._break(
                    f"rank {rank} of {self.size} waited {timeout_s:g} s at {what} for ranks "
                    f"{missing}"
                )
                raise RuntimeError(self._broken)

    def _break(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
        self._changed.notify_all()
        for part in self._parts:
            part.abort(reason)

    def _await(self, met: Any, rank: int, key: Any, timeout_s: float) -> None:
        finite = timeout_s if timeout_s < threading.TIMEOUT_MAX else None
        done = self._changed.wait_for(lambda: self._broken is not None or met(), finite)
        if met():  # what all have come to is done, whatever broke since
            return
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if not done:
            present = self._left or self._arrived.keys()
            missing = sorted(set(range(self.size)) - set(present))
            self._break(
                f"rank {rank} of {self.size} waited {timeout_s:g} s at {key} for ranks {missing}"
            )
            raise RuntimeError(self._broken)


class ThreadComm(Comm):
    """One rank of a group whose ranks are threads of this process.

    Mismatched calls raise on every rank and name what each one called. Make a whole group with
    ``ThreadComm.group(size)`` and hand one member to each thread.
    """

    def __init__(
        self, rank: int, meeting: _Meeting, *, timeout_s: float, shares_memory: bool = False
    ) -> None:
        super().__init__(rank, meeting.size, device=torch.device("cpu"), timeout_s=timeout_s)
        self._meeting = meeting
        self._shares_memory = shares_memory
        self.reads_own = shares_memory

    @classmethod
    def group(
        cls, size: int, *, timeout_s: float = 60.0, shares_memory: bool = False
    ) -> list[ThreadComm]:
        """Return the members of a new group, in rank order. Local.

        Args:
            size: number of ranks.
            timeout_s: seconds after which a wait raises.
            shares_memory: let ``shared`` give out arrays, as among processes of one host; by
                default ranks hold copies, as processes of several hosts do.

        Raises:
            ValueError: ``size`` is below 1.
        """
        if size < 1:
            raise ValueError(f"expected size >= 1, got {size}")
        meeting = _Meeting(size)
        return [
            cls(rank, meeting, timeout_s=timeout_s, shares_memory=shares_memory)
            for rank in range(size)
        ]

    def abort(self, reason: str) -> None:
        """Make every waiting and future call of the group raise RuntimeError. Local."""
        self._meeting.abort(f"rank {self.rank} of {self.size} gave up: {reason}")

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        limit_s = self._limit_s("barrier", timeout_s)
        self._enter(describe("barrier"), None, limit_s)
        self._leave(limit_s)

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object; copies, as between processes."""
        limit_s = self._limit_s("all_gather_object", timeout_s)
        packed = self._enter(describe("all_gather_object"), pickle.dumps(obj), limit_s)
        self._leave(limit_s)
        return [pickle.loads(p) for p in packed]

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order."""
        self._check_open("split")
        colors = self.all_gather_object(color)
        members = [rank for rank, other in enumerate(colors) if other == color]
        mine = self._meeting.part(len(members)) if self.rank == members[0] else None
        meeting = self._enter("split()", mine, None)[members[0]]
        self._leave(None)
        return ThreadComm(
            members.index(self.rank),
            meeting,
            timeout_s=self.timeout_s,
            shares_memory=self._shares_memory,
        )

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        everyone = self._enter(describe("all_gather", inp), inp, timeout_s)
        for part, theirs in zip(self._slices(out), everyone, strict=True):
            if part.data_ptr() != theirs.data_ptr():
                part.copy_(theirs.view(-1))
        self._leave(timeout_s)
        return Work()

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        everyone = self._enter(describe(f"reduce_scatter {op}", inp), inp, timeout_s)
        reduce_terms([self._slices(theirs)[self.rank] for theirs in everyone], op, out.view(-1))
        self._leave(timeout_s)
        return Work()

    def _sum_parts(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        own: Sequence[torch.Tensor],
        divisor: int,
        donated: bool,
        timeout_s: float | None,
    ) -> Work:
        everyone = self._enter(describe("reduce_scatter sum", inp), inp, timeout_s)
        rows = [self._slices(theirs)[self.rank] for theirs in everyone]
        sum_parts(rows, out.view(-1), mine=self.rank, own=own, divisor=divisor)
        self._leave(timeout_s)
        return Work()

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        result = torch.empty_like(flat)
        everyone = self._enter(describe(f"all_reduce {op}", flat), flat, timeout_s)
        reduce_terms(everyone, op, result)
        self._leave(timeout_s)
        flat.copy_(result)
        return Work()

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        everyone = self._enter(describe(f"broadcast from {src}", flat), flat, timeout_s)
        if self.rank != src:
            flat.copy_(everyone[src])
        self._leave(timeout_s)
        return Work()

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        everyone = self._enter(describe("all_to_all", inp), inp, timeout_s)
        for part, theirs in zip(self._slices(out), everyone, strict=True):
            part.copy_(self._slices(theirs)[self.rank])
        self._leave(timeout_s)
        return Work()

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        key = describe("all_to_all by slices", slices.outline(inp))
        everyone = self._enter(key, inp.view(-1).split(slices.sent), timeout_s)
        for part, theirs in zip(out.view(-1).split(slices.received), everyone, strict=True):
            part.copy_(theirs[self.rank])
        self._leave(timeout_s)
        return Work()

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        if not self._shares_memory:
            return None
        made = None
        if self.rank == 0:
            made = (torch.empty(numel, dtype=dtype), [0] * self.size, [0] * self.size)
        key = f"shared of {numel} {str(dtype).removeprefix('torch.')}{noted_suffix()}"
        memory, published, released = self._enter(key, made, None)[0]
        self._leave(None)
        # A tensor of its own for each rank: what one writes is no change of another's views.
        data = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, (numel,), (1,))

        def wait(behind: Callable[[], list[int]], what: str, timeout_s: float | None) -> None:
            limit_s = self._limit_s(what, timeout_s)
            self._meeting.watch(behind, self.rank, what, limit_s)

        return MarkedArray(
            data,
            self.rank,
            published=published,
            released=released,
            wait=wait,
            changed=self._meeting.notify,
            name=name,
        )

    def _enter(self, key: str, value: Any, timeout_s: float | None) -> list[Any]:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        return self._meeting.enter(self.rank, key, value, limit_s)

    def _leave(self, timeout_s: float | None) -> None:
        self._meeting.leave(self.rank, self.timeout_s if timeout_s is None else timeout_s)

    def _slices(self, tensor: torch.Tensor) -> torch.Tensor:
        """One row per rank; also of a tensor without elements."""
        return tensor.view(self.size, tensor.numel() // self.size)
