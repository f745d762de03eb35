"""Any backend of torch.distributed: NCCL on GPUs, Gloo elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shard_comm._call_entry import CallEntry
from shard_comm._calls import noted
from shard_comm._comm import Comm, Work
from shard_comm._history import History, log_calls
from shard_comm._launches import Launched, Launches, Start
from shard_comm._linger import linger_at_exit
from shard_comm._registered import RegisteredMemory
from shard_comm._roll import SLOW_S, Inquiry, Roll
from shard_comm._slices import Slices
from shard_comm._solo import SoloComm
from shard_comm._tree import reduce_rows

# torch 2.13 renames both and warns at the old names; older torch has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TELL_S = 1.0
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


class GroupComm(Comm):
    """A torch.distributed process group.

    Where the backend has no order of summation to offer (Gloo), reductions are an ``all_to_all``
    and a local sum in the fixed tree, so equal data give equal bits. On NCCL the library's own
    reductions are used.

    A wait that fails says which ranks came to the collective and which did not, as far as the
    group's store knows: over Gloo every rank that has waited for a second has told it. A rank that
    went on without waiting (the source of a broadcast, say) may be listed among the missing. The
    last 64 calls of a rank whose wait fails go to its log. Gloo itself gives a collective up only
    after the group's own timeout: with a shorter one here, the end of the process waits for that.

    Args:
        group: the process group; None is the default group.
        device: where tensors live; by default what the backend serves.
        timeout_s: seconds after which a wait raises; by default the group's own timeout.
        reducing: a comm of the same ranks over another group, that reductions go through, so that
            none waits for a gather before it; closed by its owner.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not part of ``group``, or ``reducing`` has other ranks or
            another device.

    **Memory**: over Gloo a ``reduce_scatter`` holds a second buffer of the input's size while it
    runs, and an ``all_reduce`` one of ``size`` times the tensor's: keep to small tensors there.
    Over NCCL freed memory of ``empty`` stays with the comm until it is closed.
    """

    # Where it is set, a slow wait calls it every second; it raises where waiting on is no use.
    _watch: Callable[[], None] | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
        reducing: GroupComm | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised; call init_process_group(), or use "
                "SoloComm() for one rank"
            )
        world = dist.group.WORLD
        assert world is not None
        self.process_group = self.group = group if group is not None else world
        rank = dist.get_rank(self.group)
        if rank < 0:
            raise ValueError("this process is not part of the group")
        backends = backends_of(self.group)
        if device is None:
            device = "cuda" if backends.get("cuda") == "nccl" else "cpu"
        device = torch.device(device)
        if device == torch.device("cuda"):
            device = torch.device("cuda", torch.cuda.current_device())
        self._backend = backends.get(device.type, "")
        if not self._backend:
            raise ValueError(
                f"expected a device that the group's backends {backends} serve, got {device}"
            )
        self._ordered = self._backend != "nccl"
        if self._backend == "gloo":
            linger_at_exit()
        self._owned = False
        self._roll = Roll.of(self.group)
        default = timeout_s if timeout_s is not None else _group_timeout_s(self.group, device)
        super().__init__(rank, dist.get_world_size(self.group), device=device, timeout_s=default)
        self._history = History()
        self._queue: Launches | None = None
        self._set_reducing(reducing)

    def _set_reducing(self, other: GroupComm | None) -> None:
        comms = [self] if other is None else [self, other]
        if len({(comm.rank, comm.size, comm.device) for comm in comms}) > 1:
            raise ValueError(f"expected a comm to reduce on that is like {self!r}, got {other!r}")
        self._reducing = other
        self._memory: RegisteredMemory | None = None
        if self._backend == "nccl":
            backends = [comm.group._get_backend(comm.device) for comm in comms]
            self._memory = RegisteredMemory(self.device, backends)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]``; over NCCL registered memory, if it can be.

        It can from the first collective on, where torch and the device offer it; else the log says
        why it cannot. Local.
        """
        if self._memory is None:
            return super().empty(numel, dtype)
        return self._memory.empty(numel, dtype)

    @contextlib.contextmanager
    def coalesced(self) -> Iterator[None]:
        """Start the collectives called inside when the block ends, over NCCL in one launch."""
        backend: Any = self.group._get_backend(self.device)
        if self._queue is not None or not backend.supports_coalescing:
            yield
            return
        queue = self._queue = Launches(self.group, self.device)
        others = contextlib.nullcontext() if self._reducing is None else self._reducing.coalesced()
        with others:
            try:
                yield
            finally:  # what was called counts, whatever came after
                self._queue = None
                queue.start()

    def close(self) -> None:
        """Destroy the process group if ``split()`` made it; a caller's own stays. Local."""
        if self.group in dist.distributed_c10d._world.pg_map:
            if self._memory is not None:
                self._memory.close()
            if self._owned:
                dist.destroy_process_group(self.group)
        super().close()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        self._limit_s("barrier", timeout_s)
        self._launch("barrier", lambda: dist.barrier(self.group, async_op=True), timeout_s).wait()

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data."""
        self._limit_s("all_gather_object", timeout_s)
        packed = bytearray(pickle.dumps(obj))
        return [pickle.loads(theirs) for theirs in self._gather_packed(packed, timeout_s)]

    def _gather_packed(self, packed: bytearray, timeout_s: float | None) -> list[bytes]:
        with noted("", "all_gather_object"):
            return self._gather_uneven(packed, timeout_s)

    def _gather_uneven(self, packed: bytearray, timeout_s: float | None) -> list[bytes]:
        mine = torch.frombuffer(packed, dtype=torch.uint8).to(self.device)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self._all_gather(lengths, lengths.new_tensor([mine.numel()]), timeout_s).wait()
        longest = int(lengths.max())
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        everyone = mine.new_empty(self.size * longest)
        self._all_gather(everyone, padded, timeout_s).wait()
        rows = everyone.view(self.size, longest).cpu()
        return [
            ctypes.string_at(row.data_ptr(), length)
            for row, length in zip(rows, lengths.tolist(), strict=True)
        ]

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, in the same order."""
        self._check_open("split")
        colors = self.all_gather_object(color)
        part_number = self._roll.next_part()
        members = [rank for rank, other in enumerate(colors) if other == color]
        if len(members) == 1:
            return SoloComm(self.device)
        ranks = [dist.get_global_rank(self.group, rank) for rank in members]
        group = self._new_group(ranks, part_number)
        part = GroupComm(group, device=self.device, timeout_s=self.timeout_s)
        part._owned = True
        if self._reducing is not None:
            other = self._reducing.split(color)
            assert isinstance(other, GroupComm)
            part._set_reducing(other)
            part._made = other
        return part

    def _new_group(self, ranks: list[int], part: int) -> dist.ProcessGroup:
        """Make a process group of some of the ranks, under a name that none had before.

        ``new_group()`` among a few ranks takes its name from how many groups the process has:
        ranks of which one has more of them would wait for each other, and once a group is gone its
        name, and what it left in the store, comes again.
        """
        c10d = dist.distributed_c10d
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            ranks.index(dist.get_rank()),
            ranks,
            dist.Backend(self._backend),
            c10d._get_default_store(),
            f"{self.group.group_name}/part{part}/{ranks[0]}",  # type: ignore[arg-type]
            timeout=timedelta(seconds=self.timeout_s),
        )
        c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _all_gather(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        timeout_s: float | None,
        *,
        what: str = "all_gather",
    ) -> Work:
        def start() -> Any:
            return _all_gather(bytes_of(out), bytes_of(inp), group=self.group, async_op=True)

        return self._launch(what, start, timeout_s, inp)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        if self._reducing is not None:
            return self._reducing._reduce_scatter(out, inp, op, timeout_s)
        what = f"reduce_scatter {op}"
        if not self._ordered:

            def start() -> Any:
                return _reduce_scatter(
                    out.view(-1), inp.view(-1), op=_REDUCE_OPS[op], group=self.group, async_op=True
                )

            return self._launch(what, start, timeout_s, inp)
        received = inp.new_empty(self.size, out.numel())
        arriving = self._all_to_all(received, inp, timeout_s, what=what)

        def finish() -> None:
            arriving.wait()
            out.view(-1).copy_(reduce_rows(received, op))

        return Work(finish)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        if self._reducing is not None:
            return self._reducing._all_reduce(flat, op, timeout_s)
        what = f"all_reduce {op}"
        if not self._ordered:

            def start() -> Any:
                return dist.all_reduce(flat, op=_REDUCE_OPS[op], group=self.group, async_op=True)

            return self._launch(what, start, timeout_s, flat)
        gathered = flat.new_empty(self.size, flat.numel())
        arriving = self._all_gather(gathered, flat, timeout_s, what=what)

        def finish() -> None:
            arriving.wait()
            flat.copy_(reduce_rows(gathered, op))

        return Work(finish)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if self._reducing is not None:
            return self._reducing._sum_scatter(out, inp, divisor, timeout_s)
        return super()._sum_scatter(out, inp, divisor, timeout_s)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        if self._reducing is not None:
            return self._reducing._sum_all(out, flat, divisor, timeout_s)
        return super()._sum_all(out, flat, divisor, timeout_s)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        def start() -> Any:
            return dist.broadcast(bytes_of(flat), group=self.group, group_src=src, async_op=True)

        return self._launch("broadcast", start, timeout_s, flat)

    def _all_to_all(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        timeout_s: float | None,
        *,
        what: str = "all_to_all",
    ) -> Work:
        def start() -> Any:
            return dist.all_to_all_single(
                bytes_of(out), bytes_of(inp), group=self.group, async_op=True
            )

        return self._launch(what, start, timeout_s, inp)

    def _exchange(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        sizes: tuple[Sequence[int], Sequence[int]],
        *,
        op: str,
        tensor: torch.Tensor,
        timeout_s: float | None,
    ) -> Work:
        """Move so many bytes from and to each rank; errors call it ``op`` of ``tensor``."""

        def start() -> Any:
            return dist.all_to_all_single(
                out, inp, list(sizes[0]), list(sizes[1]), group=self.group, async_op=True
            )

        return self._launch(op, start, timeout_s, tensor)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        received, sent = (
            [numel * inp.itemsize for numel in side] for side in (slices.received, slices.sent)
        )
        return self._exchange(
            bytes_of(out),
            bytes_of(inp),
            (received, sent),
            op="all_to_all by slices",
            tensor=slices.outline(inp),
            timeout_s=timeout_s,
        )

    def _launch(
        self, op: str, start: Start, timeout_s: float | None, tensor: torch.Tensor | None = None
    ) -> Work:
        launched = Launched(start)
        if self._queue is None:
            launched.start()
        else:
            self._queue.add(launched)
        entry = self._history.enter(self._roll.begin(), op, tensor)
        entry.state = "running"
        limit_s = timeout_s if timeout_s is not None else self.timeout_s
        # A timeout given to NCCL's wait blocks the host; without one only the stream waits.
        host_wait = timeout_s is not None or self.device.type == "cpu"

        def finish() -> None:
            if launched.work is None:
                raise RuntimeError(
                    f"{entry.call}: waited for inside coalesced(), which starts it at its end "
                    f"{self._where}; wait after the block"
                )
            self._finish(launched.work, entry, limit_s, host_wait=host_wait)
            entry.turn("done")

        return Work(finish)

    def _finish(self, work: Any, entry: CallEntry, limit_s: float, *, host_wait: bool) -> None:
        began = time.monotonic()
        inquiry = None
        try:
            if self._backend == "gloo":
                inquiry = self._first_wait(work, entry, limit_s)
                if inquiry is None:
                    return
            if host_wait:
                self._wait_until(work, began + limit_s, inquiry)
            else:
                work.wait()
        except RuntimeError as error:
            waited_s = time.monotonic() - began
            if inquiry is None:
                inquiry = self._inquire(entry)
            entry.turn("failed")
            log_calls(self._history.entries, self.rank, self.size)
            raise RuntimeError(
                f"{entry.call} failed on rank {self.rank} of {self.size} after {waited_s:.1f} s "
                f"(limit {limit_s:g} s); {inquiry.result()}: {error}"
            ) from error
        finally:
            if inquiry is not None:
                inquiry.dismiss()

    def _first_wait(self, work: Any, entry: CallEntry, limit_s: float) -> Inquiry | None:
        """Wait a little; None if that is enough, else tell the others where this rank is.

        Over Gloo a wait may be given up and taken up again, and an error comes again.
        """
        try:
            work.wait(timedelta(seconds=min(SLOW_S, limit_s / 2)))
        except RuntimeError:
            return self._inquire(entry)
        return None

    def _wait_until(self, work: Any, end_s: float, inquiry: Inquiry | None) -> None:
        while True:
            left_s = max(end_s - time.monotonic(), 0.001)
            step_s = left_s if self._watch is None else min(left_s, SLOW_S)
            try:
                work.wait(timedelta(seconds=step_s))
            except RuntimeError:
                if self._watch is None or step_s == left_s:
                    raise
                if work.is_completed():  # it failed, or was done just now: another wait tells
                    work.wait(timedelta(seconds=step_s))
                    return
                self._watch()
                if inquiry is not None and inquiry.heard:
                    raise RuntimeError(inquiry.heard) from None
            else:
                return

    def _inquire(self, entry: CallEntry) -> Inquiry:
        inquiry = Inquiry(self._roll, entry.number, entry.call, listening=self._watch is not None)
        inquiry.start()
        return inquiry

    def _end_calls(self, reason: str) -> None:
        """Tell ranks that wait, and watch, that this one comes to no more calls. Local.

        In a thread, since a store on a host that is gone may never answer.
        """
        name = f"shard-comm-end-{self.rank}"
        telling = threading.Thread(target=self._roll.end, args=(reason,), name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # as it is when the process ends
            telling.start()
            telling.join(_TELL_S)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """What is only moved is moved as bytes: no backend knows all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each kind of device that a group serves, as in ``{"cpu": "gloo"}``.

    ``get_backend()`` alone says nothing of a group made without naming one. Local.
    """
    config = str(dist.get_backend_config(group))
    found = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    # Gloo moves accelerator tensors for some operations only; it counts for the host.
    return {device: name for device, name in found.items() if device == "cpu" or name != "gloo"}


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()
