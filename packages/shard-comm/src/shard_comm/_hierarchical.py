"""Ranks of several hosts: through memory inside a host, once per host between them."""

from __future__ import annotations

import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shard_comm import _shared_moves as moves
from shard_comm._comm import Comm, Work
from shard_comm._engine import Engine
from shard_comm._group import GroupComm
from shard_comm._hosts import Hosts
from shard_comm._relay import Clock, Relay, writable
from shard_comm._shared_file import NoSharedMemoryError, host_name
from shard_comm._shared_memory import SharedMemoryComm, call_of
from shard_comm._slices import Slices
from shard_comm._tree import reduce_rows
from shard_comm._worker import Worker

logger = logging.getLogger("shard_comm")

_SMALL_BYTES = 32 << 10
_STOP_S = 1.0
_END_S = 5.0


class HierarchicalComm(Comm):
    """One rank of a group of processes on several hosts; tensors are CPU tensors.

    Ranks of a host share memory, as in ``SharedMemoryComm``. Between hosts, over Gloo, every rank
    has one counterpart on each other host, and what a host needs or has is carried once, spread
    over these pairs (see ``Hosts`` for unequal numbers and for ranks in any order):

    * ``all_gather`` and ``broadcast``: every byte reaches each host once, not once per rank.
    * ``reduce_scatter``: a host sends sums of its ranks' contributions, not the contributions.
      Only those sums are taken that are part of the fixed tree, so the bits are those of every
      other transport. Where each host has an aligned run of a power of two of the ranks, that is
      one sum per host. Where ranks of a host are not neighbours it is more, up to every
      contribution, and the log says so. With a ``sum_dtype`` the sums travel in it, or else the
      contributions in their own dtype, whichever is less.
    * ``all_reduce``: a gather of small tensors; a scattered reduction and a gather of large ones.
    * ``all_to_all``, ``barrier`` and objects go between the ranks directly.

    A thread does all collectives, in the order in which they are called: they overlap with what
    the caller does, and works may be waited for in any order. ``timeout_s`` is what each may take
    once its turn has come. After any error the group is broken: every later call raises the
    first reason, and ranks that wait for this one raise within seconds.

    ``shared`` gives None: not all ranks can map the same memory.

    Make it with ``HierarchicalComm.join(inner)``.

    **Memory**: inside a host as ``SharedMemoryComm``. A gather holds one part in as many of its
    output as the host has ranks while it runs, a reduction of a matching share of its input.
    ``close`` gives back the process group that it made for itself.
    """

    def __init__(self, local: SharedMemoryComm, net: GroupComm, hosts: Hosts, *, host: str | None):
        super().__init__(net.rank, net.size, device=net.device, timeout_s=net.timeout_s)
        self.hosts = hosts
        self._host = host
        self._local = local
        self._net = net
        self._engine = local._engine
        net._watch = self._engine.listen
        self._relay = Relay(local, net, hosts)
        self._worker = Worker(f"shard-comm-rank-{self.rank}")
        # At the end of the process a thread that waits in torch would bring it down.
        weakref.finalize(self, _let_go, self._engine, self._worker, self._where)

    @classmethod
    def join(
        cls, inner: Comm, *, host: str | None = None, timeout_s: float | None = None
    ) -> HierarchicalComm:
        """Return the comm of the ranks of ``inner``, which is used to meet and then no more.

        Args:
            inner: a GroupComm of several ranks, for CPU tensors.
            host: a name that sets ranks of one machine apart; ranks that pass different ones do
                not share memory. By default the environment variable ``SHARD_HOST``, if set.
            timeout_s: seconds after which a wait raises; by default as in ``inner``.

        Raises:
            ValueError: ``inner`` is something else.
            RuntimeError: the ranks of some host cannot open memory of one another; all ranks
                raise and say which rank failed at what.

        **Collective**.
        """
        if not isinstance(inner, GroupComm) or inner.device.type != "cpu" or inner.size == 1:
            raise ValueError(
                f"expected a GroupComm of several ranks, for CPU tensors, got {inner!r}"
            )
        hosts = Hosts.named(inner.all_gather_object(host_name(host)))
        local = _join_hosts(inner, hosts, inner.timeout_s if timeout_s is None else timeout_s)
        net = inner.split(0)
        assert isinstance(net, GroupComm)
        net.timeout_s = local.timeout_s
        comm = cls(local, net, hosts, host=host)
        comm.process_group = inner.process_group
        count = sum(len(parts) for parts in hosts.subtrees)
        if inner.rank == 0 and count == inner.size > len(hosts.members):
            logger.warning(
                "no two of %d ranks on %d hosts are neighbours in the tree of sums: reductions "
                "send every contribution between hosts; number the ranks of a host in a row",
                inner.size,
                len(hosts.members),
            )
        return comm

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]`` that the host's ranks read in place. Local."""
        return self._local.empty(numel, dtype)

    def close(self) -> None:
        """Give back memory, the thread and the process group made for this comm. Local."""
        if self.closed:
            return
        super().close()
        self._local.closed = True
        reason = f"this comm is closed {self._where}; make a new one"
        self._engine.close(reason)
        self._net._end_calls(reason)
        if self._worker.stop(_STOP_S):
            self._net.close()
        else:
            logger.warning(
                "close: a collective between hosts did not end in %g s; its process group stays "
                "open %s",
                _STOP_S,
                self._where,
            )

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it; errors name the missing ranks."""
        limit_s = self._limit_s("barrier", timeout_s)
        self._give(lambda clock: self._net.barrier(timeout_s=clock.left_s()), limit_s).wait()

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data."""
        limit_s = self._limit_s("all_gather_object", timeout_s)
        packed, everyone = bytearray(pickle.dumps(obj)), list[bytes]()

        def job(clock: Clock) -> None:
            everyone.extend(self._net._gather_packed(packed, clock.left_s()))

        self._give(job, limit_s).wait()
        return [pickle.loads(theirs) for theirs in everyone]

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order."""
        self._check_open("split")
        parts: list[Comm] = []
        self._give(lambda _: parts.append(self._net.split(color)), self.timeout_s).wait()
        part = parts[0]
        if not isinstance(part, GroupComm):
            return part
        comm = through_memory(part, host=self._host)
        if comm is not part:
            comm._made = part
        return comm

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        call = call_of("all_gather", inp)
        return self._give(lambda clock: self._relay.gather(call, out, inp, clock), timeout_s)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        call, fold = call_of("reduce_scatter", inp, op=op), moves.folding(op)
        return self._give(lambda clock: self._relay.scatter(call, out, inp, fold, clock), timeout_s)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if not self._sums_are_less(out.dtype, inp.dtype):
            return super()._sum_scatter(out, inp, divisor, timeout_s)
        call, fold = call_of("reduce_scatter", inp, op="sum"), moves.adding(divisor)
        return self._give(lambda clock: self._relay.scatter(call, out, inp, fold, clock), timeout_s)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        call = call_of("all_reduce", flat, op=op)

        def job(clock: Clock) -> None:
            mine = writable(flat)
            if mine.nbytes > _SMALL_BYTES:
                self._relay.reduce_large(call, mine, mine, moves.folding(op), clock)
                return
            rows = torch.empty(self.size, mine.numel(), dtype=mine.dtype)
            self._relay.gather(call, rows, mine, clock)
            mine.copy_(reduce_rows(rows, op))

        return self._give(job, timeout_s)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if flat.nbytes <= _SMALL_BYTES or not self._sums_are_less(out.dtype, flat.dtype):
            return super()._sum_all(out, flat, divisor, timeout_s)
        call, fold = call_of("all_reduce", flat, op="sum"), moves.adding(divisor)
        return self._give(
            lambda clock: self._relay.reduce_large(call, writable(out), flat, fold, clock),
            timeout_s,
        )

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        call = call_of("broadcast", flat, src=src)
        return self._give(lambda clock: self._relay.spread(call, flat, src, clock), timeout_s)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._give(
            lambda clock: self._net._all_to_all(out, inp, clock.left_s()).wait(), timeout_s
        )

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        return self._give(
            lambda clock: self._net._all_to_all_by(slices, out, inp, clock.left_s()).wait(),
            timeout_s,
        )

    def _sums_are_less(self, summed: torch.dtype, moved: torch.dtype) -> bool:
        """Whether sums of hosts are fewer bytes than the contributions of their ranks."""
        sums = sum(len(parts) for parts in self.hosts.subtrees)
        return sums * summed.itemsize <= self.size * moved.itemsize

    def _give(self, job: Callable[[Clock], None], timeout_s: float | None) -> Work:
        """Return the work of a job, which is done when those before it are."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._engine.check()

        def run() -> None:
            self._engine.check()
            try:
                job(Clock(limit_s))
            except Exception as error:
                told = isinstance(error, RuntimeError)
                reason = str(error) if told else f"{error!r} {self._where}"
                failure = self._engine.failure(reason)
                self._net._end_calls(str(failure))
                raise failure from error

        future = self._worker.give(run)

        def finish() -> None:
            if not future.done():
                self._engine.check()  # a forked child has no thread
            future.result()

        return Work(finish)


def _let_go(engine: Engine, worker: Worker, where: str) -> None:
    engine.close(f"this comm is gone {where}, or its process ends")
    worker.stop(_END_S)


def through_memory(comm: GroupComm, *, host: str | None = None) -> Comm:
    """Return the comm of the same ranks that uses what memory they share, or ``comm`` itself.

    Args:
        comm: for CPU tensors.
        host: see ``HierarchicalComm.join``.

    **Collective**.
    """
    hosts = Hosts.named(comm.all_gather_object(host_name(host)))
    if len(hosts.members) == comm.size:
        return comm
    try:
        if len(hosts.members) == 1:
            return SharedMemoryComm.join(comm)
        return HierarchicalComm.join(comm, host=host)
    except NoSharedMemoryError as error:
        if comm.rank == 0:
            count = len(hosts.members)
            where = "one host" if count == 1 else f"{count} hosts"
            logger.warning("%d ranks of %s go through Gloo: %s", comm.size, where, error)
        return comm


def _join_hosts(inner: GroupComm, hosts: Hosts, timeout_s: float) -> SharedMemoryComm:
    """Return the comm of this rank's host; every rank raises if some host has none."""
    peers = hosts.members[hosts.of[inner.rank]]

    def exchange(obj: Any) -> list[Any]:
        everyone = inner.all_gather_object(obj)
        return [everyone[rank] for rank in peers]

    reasons: list[str] = []
    for named in (False, True):  # all hosts in the same way, as every exchange is one of all ranks
        local, problem = None, ""
        try:
            local = SharedMemoryComm._of(
                exchange,
                peers.index(inner.rank),
                len(peers),
                timeout_s=timeout_s,
                named=named,
                numbers=peers,
                whole=inner.size,
            )
        except NoSharedMemoryError as error:
            problem = str(error)
        problems = [told for told in inner.all_gather_object(problem) if told]
        if local is not None and not problems:
            return local
        reasons.append(problems[0])
    raise NoSharedMemoryError("; ".join(reasons))
