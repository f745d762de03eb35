"""The communicator: what every transport does, checked once for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_comm._calls import noted
from shard_comm._checks import check_apart, check_own, check_pair, check_tensors
from shard_comm._reduction import Reduction
from shard_comm._slices import Slices
from shard_comm._tree import tree_sum_wide

if TYPE_CHECKING:
    from shard_comm._shared_array import SharedArray


class Work:
    """A collective under way.

    Args:
        finish: blocks until the result is there (on an accelerator: until the current stream
            waits for it); None where it is there already.
    """

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish
        self._error: Exception | None = None

    def wait(self) -> None:
        """Wait for the result. Calling it again does nothing, or raises the same error again.

        Raises:
            RuntimeError: the collective failed or timed out.
        """
        if self._error is not None:
            raise self._error
        if self._finish is not None:  # an interrupted wait is no result: the next one waits again
            try:
                with torch.no_grad():
                    self._finish()
            except Exception as error:
                self._error, self._finish = error, None
                raise
            self._finish = None


class Comm(ABC):
    """One process group seen through one transport.

    All methods but ``empty`` and ``close`` are collective: every rank calls them in the same order
    with the same sizes, dtype, operation and name. ``timeout_s`` defaults to that of the comm. With
    ``async_op`` the tensors belong to the collective until the returned work is waited for.
    ``name`` says what is moved, as in ``"layers.8"``; errors repeat it.

    Attributes:
        rank: this rank, in ``range(size)``.
        size: number of ranks.
        device: where tensors must live.
        timeout_s: seconds after which a wait raises.
        closed: whether ``close()`` was called.
        process_group: torch.distributed's, of the same ranks, if the comm was made from one.
        reads_own: whether ``reduce_scatter`` reads ``own`` where it lies; elsewhere it is copied.
    """

    closed = False
    reads_own = False
    process_group: dist.ProcessGroup | None = None
    # Made on the way to this comm and held by nobody else.
    _made: Comm | None = None

    def __init__(self, rank: int, size: int, *, device: torch.device, timeout_s: float) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"expected a rank in [0, {size}), got {rank}")
        if not timeout_s > 0:
            raise ValueError(f"expected timeout_s > 0, got {timeout_s}")
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank} of {self.size}, device={self.device})"

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]`` that the transport moves without staging.

        The tensor has a storage of its own; drop it to give the memory back. Local.
        """
        return torch.empty(numel, dtype=dtype, device=self.device)

    def close(self) -> None:
        """Release what the comm holds; later collectives raise RuntimeError. Local.

        Calling it again does nothing. A wrapper closes the comm inside.
        """
        self.closed = True
        if self._made is not None:
            self._made.close()

    def coalesced(self) -> AbstractContextManager[None]:
        """Start the collectives called inside together, where the transport can.

        Call them with ``async_op`` and wait after the block; elsewhere they start at once. Over
        NCCL it is one launch, as for the groups of a unit that are gathered together::

            with comm.coalesced():
                works = [comm.all_gather(out, inp, async_op=True) for out, inp in pairs]
            for work in works:
                work.wait()

        **Collective**: all ranks call the same collectives inside.
        """
        return nullcontext()

    def shared(self, numel: int, dtype: torch.dtype, *, name: str = "") -> SharedArray | None:
        """Return one array that all ranks map; None where the transport has none.

        Args:
            numel: elements of the whole array, a multiple of the number of ranks.
            dtype: of the elements.
            name: what messages call the array.

        Raises:
            ValueError: ``numel`` is not divisible or below the number of ranks, or the comm is
                closed.
            RuntimeError: ranks ask for different arrays.

        **Collective**. **Memory**: one copy for the whole group, until the last rank drops it.
        """
        self._check_open("shared")
        if numel < self.size or numel % self.size:
            raise ValueError(
                f"shared{' ' if name else ''}{name}: expected a positive multiple of {self.size} "
                f"elements, got {numel} (rank {self.rank} of {self.size})"
            )
        with noted(name):
            return self._shared(numel, dtype, name)

    @torch.no_grad()
    def all_gather(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
        name: str = "",
    ) -> Work:
        """Fill ``out`` with every rank's ``inp``, in rank order.

        Args:
            out: ``[size * n]``, contiguous.
            inp: ``[n]``, same dtype; it may be this rank's own slice of ``out``.
            async_op: return at once; wait with the returned work.
            timeout_s: seconds after which the wait raises.
            name: what is moved, for errors.

        Raises:
            TypeError: an argument is no tensor; nothing was sent.
            ValueError: shapes, dtypes, devices or the timeout do not fit, or ``inp`` overlaps
                ``out`` elsewhere than in this rank's slice, or the comm is closed; nothing was
                sent.
            RuntimeError: a rank did not arrive in time.
        """
        check_tensors("all_gather", self._where, out=out, inp=inp)
        self._check("all_gather", out, inp, out_numel=inp.numel() * self.size, timeout_s=timeout_s)
        if out.data_ptr() + self.rank * inp.nbytes != inp.data_ptr():
            self._check_apart("all_gather", out, inp)
        with noted(name):
            return self._end(self._all_gather(out, inp, timeout_s), async_op)

    @torch.no_grad()
    def reduce_scatter(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        op: str = "sum",
        sum_dtype: torch.dtype | None = None,
        own: Sequence[torch.Tensor] | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        name: str = "",
    ) -> Work:
        """Reduce ``inp`` over ranks and keep this rank's slice of the result.

        Args:
            out: ``[n]``, contiguous, not part of ``inp``; in ``inp``'s dtype or ``sum_dtype``.
            inp: ``[size * n]``. Its contents are undefined afterwards.
            op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"premul_mean"``, which divides
                every contribution before it is added, so that nothing overflows. Sums follow the
                fixed tree over ranks where the transport lets us choose.
            sum_dtype: add in this dtype, in the fixed tree on every transport, and round once;
                ``inp``'s dtype travels. By default contributions are added in their own dtype.
            own: this rank's contribution to its own slice, in place of that slice of ``inp``:
                flat tensors of ``inp``'s dtype that make up ``[n]`` one after another. They may
                be views of that slice; others are left as they are. With it ``inp`` is given
                away: who does not write to it again need not wait until all others have read it.
            async_op: return at once; wait with the returned work.
            timeout_s: seconds after which the wait raises.
            name: what is moved, for errors.

        Raises:
            TypeError: an argument is no tensor; nothing was sent.
            ValueError: shapes, dtypes, devices, ``op`` or the timeout do not fit, or the two
                overlap, or the comm is closed; nothing was sent.
            RuntimeError: a rank did not arrive in time.

        **Memory**: with a ``sum_dtype``, a second buffer of ``inp``'s size while it runs; where
        ranks share memory, none.
        """
        check_tensors("reduce_scatter", self._where, out=out, inp=inp)
        numel = out.numel() * self.size
        self._check("reduce_scatter", inp, out, out_numel=numel, timeout_s=timeout_s, mixed=True)
        self._check_apart("reduce_scatter", out, inp)
        how = Reduction(op, sum_dtype, self.size)
        how.check("reduce_scatter", inp, out, where=self._where)
        mine = inp.view(self.size, out.numel())[self.rank]
        direct = self.reads_own and op in ("sum", "mean")
        if own is not None:
            check_own(own, out, inp, device=self.device, where=self._where)
            for part in own:
                self._check_apart("reduce_scatter", out, part)
            if not direct:
                _fill(mine, own)
        with noted(name, how.detail):
            total = how.total(out)
            if direct:
                parts, donated = ([mine], False) if own is None else (own, True)
                divisor = self.size if op == "mean" else 1
                work = self._sum_parts(total, inp, parts, divisor, donated, timeout_s)
            elif sum_dtype is not None:
                work = self._sum_scatter(total, inp, how.divisor, timeout_s)
            else:
                if how.divisor > 1:
                    inp.div_(how.divisor)
                work = self._reduce_scatter(out, inp, how.inner, timeout_s)
            return self._end(Work(how.finish(work.wait, total, out, divided=direct)), async_op)

    @torch.no_grad()
    def all_reduce(
        self,
        tensor: torch.Tensor,
        *,
        op: str = "sum",
        sum_dtype: torch.dtype | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        name: str = "",
    ) -> Work:
        """Reduce ``tensor`` over ranks in place; every rank gets the same bits.

        Args:
            tensor: any shape, contiguous.
            op: ``"sum"``, ``"mean"``, ``"premul_mean"`` (see ``reduce_scatter``), ``"max"`` or
                ``"min"``; NaN wins over numbers in all of them.
            sum_dtype: add in this dtype, in the fixed tree on every transport, and round once.
            async_op: return at once; wait with the returned work.
            timeout_s: seconds after which the wait raises.
            name: what is moved, for errors.

        Raises:
            TypeError: the argument is no tensor; nothing was sent.
            ValueError: the tensor, ``op`` or the timeout does not fit, or the comm is closed;
                nothing was sent.
            RuntimeError: a rank did not arrive in time.

        **Memory**: with a ``sum_dtype``, ``size`` times the tensor's while it runs (where ranks
        share memory, none): keep to small tensors there.
        """
        check_tensors("all_reduce", self._where, tensor=tensor)
        self._check("all_reduce", tensor, tensor, out_numel=tensor.numel(), timeout_s=timeout_s)
        how = Reduction(op, sum_dtype, self.size)
        how.check("all_reduce", tensor, tensor, where=self._where)
        flat = tensor.view(-1)
        with noted(name, how.detail):
            total = how.total(flat)
            if sum_dtype is not None:
                work = self._sum_all(total, flat, how.divisor, timeout_s)
            else:
                if how.divisor > 1:
                    flat.div_(how.divisor)
                work = self._all_reduce(flat, how.inner, timeout_s)
            return self._end(Work(how.finish(work.wait, total, flat)), async_op)

    @torch.no_grad()
    def broadcast(
        self,
        tensor: torch.Tensor,
        *,
        src: int,
        async_op: bool = False,
        timeout_s: float | None = None,
        name: str = "",
    ) -> Work:
        """Copy rank ``src``'s ``tensor`` into every rank's, in place.

        Args:
            tensor: any shape, contiguous.
            src: the rank whose values all get.
            async_op: return at once; wait with the returned work.
            timeout_s: seconds after which the wait raises.
            name: what is moved, for errors.

        Raises:
            TypeError: the argument is no tensor; nothing was sent.
            ValueError: the tensor or the timeout does not fit, or ``src`` is no rank, or the
                comm is closed; nothing was sent.
            RuntimeError: a rank did not arrive in time.
        """
        check_tensors("broadcast", self._where, tensor=tensor)
        self._check("broadcast", tensor, tensor, out_numel=tensor.numel(), timeout_s=timeout_s)
        if not 0 <= src < self.size:
            raise ValueError(
                f"broadcast: expected src in [0, {self.size}), got {src} {self._where}"
            )
        with noted(name):
            return self._end(self._broadcast(tensor.view(-1), src, timeout_s), async_op)

    @torch.no_grad()
    def all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        *,
        slices: Slices | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
        name: str = "",
    ) -> Work:
        """Send slice ``r`` of ``inp`` to rank ``r``; slice ``r`` of ``out`` comes from rank ``r``.

        Args:
            out: ``[size * n]``, contiguous, not part of ``inp``.
            inp: ``[size * n]``, same dtype.
            slices: how long the slices are that lie end to end, where they are not all equal;
                ``out`` and ``inp`` then have as many elements as that says.
            async_op: return at once; wait with the returned work.
            timeout_s: seconds after which the wait raises.
            name: what is moved, for errors.

        Raises:
            TypeError: an argument is no tensor; nothing was sent.
            ValueError: shapes, dtypes, devices or the timeout do not fit, or the two overlap,
                or the comm is closed; nothing was sent.
            RuntimeError: a rank did not arrive in time.
        """
        check_tensors("all_to_all", self._where, out=out, inp=inp)
        numel = inp.numel() if slices is None else sum(slices.received)
        self._check("all_to_all", out, inp, out_numel=numel, timeout_s=timeout_s)
        self._check_apart("all_to_all", out, inp)
        if slices is not None:
            slices.check("all_to_all", inp, self.size, where=self._where)
            with noted(name):
                return self._end(self._all_to_all_by(slices, out, inp, timeout_s), async_op)
        if inp.numel() % self.size:
            raise ValueError(
                f"all_to_all: expected a multiple of {self.size} elements, got {inp.numel()}"
            )
        with noted(name):
            return self._end(self._all_to_all(out, inp, timeout_s), async_op)

    @abstractmethod
    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it.

        Raises:
            ValueError: the timeout does not fit, or the comm is closed; nothing was sent.
            RuntimeError: a rank did not arrive in time.

        **Collective**: all ranks.
        """

    @abstractmethod
    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data.

        Raises:
            ValueError: the timeout does not fit, or the comm is closed; nothing was sent.
            RuntimeError: a rank did not arrive in time.
            Exception: what pickling ``obj`` raises; nothing was sent.

        **Collective**: all ranks; objects may differ in kind and size.
        """

    @abstractmethod
    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order.

        Raises:
            ValueError: the comm is closed.
            RuntimeError: a rank did not arrive in time.

        **Collective**: all ranks of this comm, whatever their color.
        """

    @abstractmethod
    def _all_gather(
        self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work: ...

    @abstractmethod
    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work: ...

    @abstractmethod
    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work: ...

    @abstractmethod
    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work: ...

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        """Exchange slices of several lengths; padded, unless a transport can do better."""
        sent = slices.padded(inp)
        received = torch.empty_like(sent)
        arriving = self._all_to_all(received, sent, timeout_s)

        def finish() -> None:
            arriving.wait()
            slices.unpad(received, out)

        return Work(finish)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        """Add slices of ``inp`` in ``out``'s wider dtype, each divided by ``divisor`` first."""
        received = torch.empty_like(inp)
        arriving = self._all_to_all(received, inp, timeout_s)

        def finish() -> None:
            arriving.wait()
            tree_sum_wide(received.view(self.size, -1).unbind(), out.view(-1), divisor=divisor)

        return Work(finish)

    def _sum_parts(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        own: Sequence[torch.Tensor],
        divisor: int,
        donated: bool,
        timeout_s: float | None,
    ) -> Work:
        """Add slices of ``inp``, this rank's as in ``own``, in ``out``'s dtype; divide the sum.

        Only called where ``reads_own``.
        """
        raise NotImplementedError

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        """Add every rank's ``flat`` in ``out``'s wider dtype, each divided first."""
        received = flat.new_empty(self.size * flat.numel())
        arriving = self._all_gather(received, flat, timeout_s)

        def finish() -> None:
            arriving.wait()
            tree_sum_wide(received.view(self.size, -1).unbind(), out, divisor=divisor)

        return Work(finish)

    def _shared(self, numel: int, dtype: torch.dtype, name: str) -> SharedArray | None:
        return None

    @staticmethod
    def _end(work: Work, async_op: bool) -> Work:
        if not async_op:
            work.wait()
        return work

    def _limit_s(self, op: str, timeout_s: float | None) -> float:
        """The timeout of one call; refuses it where the comm is closed."""
        self._check_open(op)
        if timeout_s is None:
            return self.timeout_s
        if not timeout_s > 0:
            raise ValueError(f"{op}: expected timeout_s > 0, got {timeout_s} {self._where}")
        return timeout_s

    @property
    def _where(self) -> str:
        return f"(rank {self.rank} of {self.size})"

    def _check_open(self, op: str) -> None:
        if self.closed:
            raise ValueError(f"{op}: this comm is closed {self._where}; make a new one")

    def _check(
        self,
        op: str,
        big: torch.Tensor,
        small: torch.Tensor,
        *,
        out_numel: int,
        timeout_s: float | None,
        mixed: bool = False,
    ) -> None:
        self._limit_s(op, timeout_s)
        check_pair(
            op, big, small, numel=out_numel, device=self.device, where=self._where, mixed=mixed
        )

    def _check_apart(self, op: str, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Raise where writing ``out`` changes ``inp`` before other ranks have read it."""
        if self.size > 1:
            check_apart(op, out, inp, where=self._where)


def _fill(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Copy joined parts into ``row``, but for those that are there."""
    start = 0
    for part in parts:
        place = row[start : start + part.numel()]
        if place.data_ptr() != part.data_ptr():
            place.copy_(part)
        start += part.numel()
