"""A comm whose ranks compare what they are about to do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import torch

from shard_comm._call_entry import CallEntry
from shard_comm._calls import listed, noted, noted_anew
from shard_comm._comm import Comm, Work
from shard_comm._history import History, kept_outside, log_calls
from shard_comm._shared_array import SharedArray
from shard_comm._slices import Slices
from shard_comm._wrapper import Wrapper


class _DifferentCallsError(RuntimeError):
    """All ranks know it; ``told`` has the calls that this rank is to log, by rank."""

    def __init__(self, message: str, told: Mapping[int, Sequence[CallEntry]]) -> None:
        super().__init__(message)
        self.told = told


class Checked(Wrapper):
    """Pass collectives on to ``inner`` after all ranks have found that they call the same one.

    Before each collective the ranks exchange a digest of eight bytes of the number of the call,
    the operation with its reduction or source, elements, dtype and name. Where they differ, every
    rank raises, and the error says who calls what; the group may be used on. A rank that does not
    come is found by the exchange itself, with the same timeout. A call returns only when all ranks
    have made it, so nothing is launched ahead of a slower rank, and on an accelerator the host
    waits for the exchange: for finding faults, not for the fastest step.

    Publishing a shared array is compared like a collective. A claim is kept and not compared: a
    rank whose slice has not changed makes none.

    The last 64 calls are kept. They are logged when a call fails: those of all ranks, by rank 0,
    where ranks differ, and each rank's own where one of them is missing.

    Args:
        inner: the comm that does the work. Wrap ``Recorded`` around this one, lest the exchange be
            counted.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.reads_own = inner.reads_own
        self._calls = 0
        self._history = History()
        self._digest = torch.zeros(1, dtype=torch.int64, device=inner.device)
        self._digests = torch.zeros(inner.size, dtype=torch.int64, device=inner.device)

    @property
    def entries(self) -> list[CallEntry]:
        """This rank's last calls, the oldest first."""
        return self._history.entries

    def coalesced(self) -> AbstractContextManager[None]:
        """Change nothing: each collective is compared, and so started, by itself. Local."""
        return nullcontext()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        self._limit_s("barrier", timeout_s)

        def go() -> Work:
            self.inner.barrier(timeout_s=timeout_s)
            return Work()

        self._run("barrier", None, timeout_s, go).wait()

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object; that all call it is compared, the objects are not."""
        self._limit_s("all_gather_object", timeout_s)
        everyone: list[Any] = []

        def go() -> Work:
            everyone.extend(self.inner.all_gather_object(obj, timeout_s=timeout_s))
            return Work()

        self._run("all_gather_object", None, timeout_s, go).wait()
        return everyone

    def split(self, color: int) -> Comm:
        """Return the inner comm's part, checked on its own."""
        self._check_open("split")
        parts: list[Comm] = []

        def go() -> Work:
            parts.append(self.inner.split(color))
            return Work()

        self._run("split", None, None, go).wait()
        return Checked(parts[0])

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._run(
            "all_gather", inp, timeout_s, lambda: self.inner._all_gather(out, inp, timeout_s)
        )

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        def go() -> Work:
            return self.inner._reduce_scatter(out, inp, op, timeout_s)

        return self._run(f"reduce_scatter {op}", inp, timeout_s, go)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        return self._run(
            f"all_reduce {op}",
            flat,
            timeout_s,
            lambda: self.inner._all_reduce(flat, op, timeout_s),
        )

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        return self._run(
            f"broadcast from {src}",
            flat,
            timeout_s,
            lambda: self.inner._broadcast(flat, src, timeout_s),
        )

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._run(
            "all_to_all", inp, timeout_s, lambda: self.inner._all_to_all(out, inp, timeout_s)
        )

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        def go() -> Work:
            return self.inner._all_to_all_by(slices, out, inp, timeout_s)

        return self._run("all_to_all by slices", slices.outline(inp), timeout_s, go)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        def go() -> Work:
            return self.inner._sum_scatter(out, inp, divisor, timeout_s)

        return self._run("reduce_scatter sum", inp, timeout_s, go)

    def _sum_parts(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        own: Sequence[torch.Tensor],
        divisor: int,
        donated: bool,
        timeout_s: float | None,
    ) -> Work:
        def go() -> Work:
            return self.inner._sum_parts(out, inp, own, divisor, donated, timeout_s)

        return self._run("reduce_scatter sum", inp, timeout_s, go)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        def go() -> Work:
            return self.inner._sum_all(out, flat, divisor, timeout_s)

        return self._run("all_reduce sum", flat, timeout_s, go)

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        arrays: list[SharedArray | None] = []

        def go() -> Work:
            arrays.append(self.inner._shared(numel, dtype, name))
            return Work()

        self._run("shared", torch.empty(numel, dtype=dtype, device="meta"), None, go).wait()
        array = arrays[0]
        return None if array is None else _CheckedArray(array, self)

    def _run(
        self,
        op: str,
        tensor: torch.Tensor | None,
        timeout_s: float | None,
        go: Callable[[], Work],
    ) -> Work:
        """Compare, then let ``go`` launch the collective, and keep an account of it."""
        self._calls += 1
        entry = self._enter(op, tensor)
        with self._accounting(entry):
            self._compare(entry, timeout_s)
            entry.turn("running")
            work = go()

        def finish() -> None:
            with self._accounting(entry):
                work.wait()
            entry.turn("done")

        return Work(finish)

    def _enter(self, op: str, tensor: torch.Tensor | None) -> CallEntry:
        return self._history.enter(self._calls, op, tensor)

    @contextmanager
    def _accounting(self, entry: CallEntry) -> Iterator[None]:
        try:
            with kept_outside():
                yield
        except Exception as error:
            entry.turn("failed")
            mine = {self.rank: self.entries}
            told = error.told if isinstance(error, _DifferentCallsError) else mine
            for rank, entries in told.items():
                log_calls(entries, rank, self.size)
            raise

    def _compare(self, entry: CallEntry, timeout_s: float | None) -> None:
        """Raise on every rank unless all make the same call."""
        digest = blake2b(f"{entry.number} {entry.call}".encode(), digest_size=8).digest()
        self._digest.fill_(int.from_bytes(digest, "little", signed=True))
        try:
            with noted_anew("check"):
                self.inner._all_gather(self._digests, self._digest, timeout_s).wait()
                if len(set(self._digests.tolist())) == 1:
                    return
                entry.turn("failed")
                told = self.inner.all_gather_object(self.entries, timeout_s=timeout_s)
        except RuntimeError as error:
            entry.turn("failed")
            raise RuntimeError(
                f"{entry.call} (call {entry.number}): rank {self.rank} of {self.size} waited "
                f"{entry.seconds:.1f} s for all ranks to make the same call: {error}"
            ) from error
        calls = defaultdict(list)
        for rank, entries in enumerate(told):
            calls[f"{entries[-1].call} (call {entries[-1].number})"].append(rank)
        who = ", ".join(
            f"{listed(ranks)} {'calls' if len(ranks) == 1 else 'call'} {call}"
            for call, ranks in calls.items()
        )
        raise _DifferentCallsError(
            f"ranks call different collectives: {who}",
            dict(enumerate(told)) if self.rank == 0 else {},
        )


class _CheckedArray(SharedArray):
    """A shared array whose publications are compared and whose claims are kept."""

    def __init__(self, array: SharedArray, comm: Checked) -> None:
        super().__init__(array.data, comm.rank, comm.size, name=array.name)
        self._array = array
        self._comm = comm

    def claim(self, *, timeout_s: float | None = None) -> None:
        self._comm._limit_s("claim", timeout_s)
        with noted(self.name):
            entry = self._comm._enter("claim", self.data)
        with self._comm._accounting(entry):
            entry.turn("running")
            self._array.claim(timeout_s=timeout_s)
        entry.turn("done")

    def publish(self, *, timeout_s: float | None = None) -> Work:
        self._comm._limit_s("publish", timeout_s)
        with noted(self.name):
            return self._comm._run(
                "publish", self.data, timeout_s, lambda: self._array.publish(timeout_s=timeout_s)
            )

    def release(self) -> None:
        self._array.release()

    def is_unread(self) -> bool:
        return self._array.is_unread()
