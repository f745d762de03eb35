"""A comm that counts what passes through it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_comm._comm import Comm, Work
from shard_comm._shared_array import SharedArray
from shard_comm._slices import Slices
from shard_comm._wrapper import Wrapper


@dataclass
class OpRecord:
    """What one kind of collective did so far.

    Attributes:
        calls: number of calls.
        payload_bytes: bytes of the larger side of each call (the output of a gather, the input
            of a reduction), summed; of an exchange, what this rank sends.
        wait_s: seconds between each call and the end of its wait, summed; overlapped
            collectives count their whole time.
    """

    calls: int = 0
    payload_bytes: int = 0
    wait_s: float = 0.0

    def add(self, nbytes: int) -> None:
        """Count a call that moves so many bytes. Local."""
        self.calls += 1
        self.payload_bytes += nbytes


class Recorded(Wrapper):
    """Pass every collective on to ``inner`` and count it.

    Args:
        inner: the comm that does the work.

    Attributes:
        records: operation name to its counts, e.g. ``records["all_gather"].payload_bytes``.
            Publishing a shared array counts as an ``all_gather``.
    """

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.reads_own = inner.reads_own
        self.records: defaultdict[str, OpRecord] = defaultdict(OpRecord)

    def reset(self) -> None:
        """Forget all counts. Local."""
        self.records.clear()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        self._limit_s("barrier", timeout_s)
        began = time.perf_counter()
        self.inner.barrier(timeout_s=timeout_s)
        self._count("barrier", 0, Work(), began).wait()

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object; its bytes are not counted."""
        self._limit_s("all_gather_object", timeout_s)
        began = time.perf_counter()
        everyone = self.inner.all_gather_object(obj, timeout_s=timeout_s)
        self._count("all_gather_object", 0, Work(), began).wait()
        return everyone

    def split(self, color: int) -> Comm:
        """Return the inner comm's part, counted on its own."""
        self._check_open("split")
        return Recorded(self.inner.split(color))

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        began = time.perf_counter()
        work = self.inner._all_gather(out, inp, timeout_s)
        return self._count("all_gather", out.nbytes, work, began)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        began = time.perf_counter()
        work = self.inner._reduce_scatter(out, inp, op, timeout_s)
        return self._count("reduce_scatter", inp.nbytes, work, began)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        began = time.perf_counter()
        work = self.inner._all_reduce(flat, op, timeout_s)
        return self._count("all_reduce", flat.nbytes, work, began)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        began = time.perf_counter()
        work = self.inner._broadcast(flat, src, timeout_s)
        return self._count("broadcast", flat.nbytes, work, began)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        began = time.perf_counter()
        work = self.inner._all_to_all(out, inp, timeout_s)
        return self._count("all_to_all", inp.nbytes, work, began)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        began = time.perf_counter()
        work = self.inner._all_to_all_by(slices, out, inp, timeout_s)
        return self._count("all_to_all", inp.nbytes, work, began)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        began = time.perf_counter()
        work = self.inner._sum_scatter(out, inp, divisor, timeout_s)
        return self._count("reduce_scatter", inp.nbytes, work, began)

    def _sum_parts(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        own: Sequence[torch.Tensor],
        divisor: int,
        donated: bool,
        timeout_s: float | None,
    ) -> Work:
        began = time.perf_counter()
        work = self.inner._sum_parts(out, inp, own, divisor, donated, timeout_s)
        return self._count("reduce_scatter", inp.nbytes, work, began)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        began = time.perf_counter()
        work = self.inner._sum_all(out, flat, divisor, timeout_s)
        return self._count("all_reduce", flat.nbytes, work, began)

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        array = self.inner._shared(numel, dtype, name)
        return None if array is None else _CountedArray(array, self)

    def _count(self, op: str, nbytes: int, work: Work, began: float) -> Work:
        record = self.records[op]
        record.add(nbytes)

        def finish() -> None:
            work.wait()
            record.wait_s += time.perf_counter() - began

        return Work(finish)


class _CountedArray(SharedArray):
    """A shared array of which every publication counts as an ``all_gather`` of its bytes."""

    def __init__(self, array: SharedArray, comm: Recorded) -> None:
        super().__init__(array.data, comm.rank, comm.size, name=array.name)
        self._array = array
        self._comm = comm

    def claim(self, *, timeout_s: float | None = None) -> None:
        self._array.claim(timeout_s=timeout_s)

    def publish(self, *, timeout_s: float | None = None) -> Work:
        began = time.perf_counter()
        work = self._array.publish(timeout_s=timeout_s)
        return self._comm._count("all_gather", self.data.nbytes, work, began)

    def release(self) -> None:
        self._array.release()

    def is_unread(self) -> bool:
        return self._array.is_unread()
