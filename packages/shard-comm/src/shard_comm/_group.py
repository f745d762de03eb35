"""Any backend of torch.distributed: NCCL on GPUs, Gloo elsewhere."""

from __future__ import annotations

import ctypes
import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shard_comm._calls import describe, noted
from shard_comm._comm import Comm, Work
from shard_comm._roll import SLOW_S, Inquiry, Roll
from shard_comm._slices import Slices
from shard_comm._solo import SoloComm
from shard_comm._tree import tree_sum_rows

# torch 2.13 renames both and warns at the old names; older torch has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

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
    went on without waiting (the source of a broadcast, say) may be listed among the missing. Gloo
    itself gives a collective up only after the group's own timeout: with a shorter one here, the
    end of the process waits for that.

    Args:
        group: the process group; None is the default group.
        device: where tensors live; by default what the backend serves.
        timeout_s: seconds after which a wait raises; by default the group's own timeout.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not part of ``group``.

    **Memory**: over Gloo a ``reduce_scatter`` holds a second buffer of the input's size while it
    runs, and an ``all_reduce`` one of ``size`` times the tensor's: keep to small tensors there.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout_s: float | None = None,
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
        self._owned = False
        self._roll = Roll.of(self.group)
        default = timeout_s if timeout_s is not None else _group_timeout_s(self.group, device)
        super().__init__(rank, dist.get_world_size(self.group), device=device, timeout_s=default)

    def close(self) -> None:
        """Destroy the process group if ``split()`` made it; a caller's own stays. Local."""
        if self._owned and not self.closed:
            dist.destroy_process_group(self.group)
        super().close()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it."""
        self._limit_s("barrier", timeout_s)
        self._launch("barrier", dist.barrier(self.group, async_op=True), timeout_s).wait()

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's picklable ``obj``, in rank order. For small control data."""
        self._limit_s("all_gather_object", timeout_s)
        packed = bytearray(pickle.dumps(obj))
        with noted("", "all_gather_object"):
            return self._gather_pickled(packed, timeout_s)

    def _gather_pickled(self, packed: bytearray, timeout_s: float | None) -> list[Any]:
        mine = torch.frombuffer(packed, dtype=torch.uint8).to(self.device)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self._all_gather(lengths, lengths.new_tensor([mine.numel()]), timeout_s).wait()
        longest = int(lengths.max())
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        everyone = mine.new_empty(self.size * longest)
        self._all_gather(everyone, padded, timeout_s).wait()
        rows = everyone.view(self.size, longest).cpu()
        return [
            pickle.loads(ctypes.string_at(row.data_ptr(), length))
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

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        work = _all_gather(_bytes_of(out), _bytes_of(inp), group=self.group, async_op=True)
        return self._launch("all_gather", work, timeout_s, inp)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        if not self._ordered:
            work = _reduce_scatter(
                out.view(-1), inp.view(-1), op=_REDUCE_OPS[op], group=self.group, async_op=True
            )
            return self._launch(f"reduce_scatter {op}", work, timeout_s, inp)
        received = inp.new_empty(self.size, out.numel())
        work = dist.all_to_all_single(
            _bytes_of(received), _bytes_of(inp), group=self.group, async_op=True
        )
        arriving = self._launch(f"reduce_scatter {op}", work, timeout_s, inp)

        def finish() -> None:
            arriving.wait()
            out.view(-1).copy_(_reduce_rows(received, op))

        return Work(finish)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        if not self._ordered:
            work = dist.all_reduce(flat, op=_REDUCE_OPS[op], group=self.group, async_op=True)
            return self._launch(f"all_reduce {op}", work, timeout_s, flat)
        gathered = flat.new_empty(self.size, flat.numel())
        work = _all_gather(_bytes_of(gathered), _bytes_of(flat), group=self.group, async_op=True)
        arriving = self._launch(f"all_reduce {op}", work, timeout_s, flat)

        def finish() -> None:
            arriving.wait()
            flat.copy_(_reduce_rows(gathered, op))

        return Work(finish)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        work = dist.broadcast(_bytes_of(flat), group=self.group, group_src=src, async_op=True)
        return self._launch("broadcast", work, timeout_s, flat)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        work = dist.all_to_all_single(
            _bytes_of(out), _bytes_of(inp), group=self.group, async_op=True
        )
        return self._launch("all_to_all", work, timeout_s, inp)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        width = inp.itemsize
        received, sent = ([n * width for n in side] for side in (slices.received, slices.sent))
        work = dist.all_to_all_single(
            _bytes_of(out), _bytes_of(inp), received, sent, group=self.group, async_op=True
        )
        return self._launch("all_to_all", work, timeout_s, inp)

    def _launch(
        self, op: str, work: Any, timeout_s: float | None, tensor: torch.Tensor | None = None
    ) -> Work:
        what = describe(op, tensor)
        call = self._roll.begin()
        limit_s = timeout_s if timeout_s is not None else self.timeout_s
        # A timeout given to NCCL's wait blocks the host; without one only the stream waits.
        host_wait = timeout_s is not None or self.device.type == "cpu"

        def finish() -> None:
            began = time.monotonic()
            inquiry = None
            try:
                if self._backend == "gloo":
                    inquiry = self._first_wait(work, call, limit_s)
                    if inquiry is None:
                        return
                left_s = max(limit_s - (time.monotonic() - began), 0.001)
                if host_wait:
                    work.wait(timedelta(seconds=left_s))
                else:
                    work.wait()
            except RuntimeError as error:
                waited_s = time.monotonic() - began
                if inquiry is None:
                    inquiry = self._inquire(call)
                raise RuntimeError(
                    f"{what} failed on rank {self.rank} of {self.size} after {waited_s:.1f} s "
                    f"(limit {limit_s:g} s); {inquiry.result()}: {error}"
                ) from error
            finally:
                if inquiry is not None:
                    inquiry.dismiss()

        return Work(finish)

    def _first_wait(self, work: Any, call: int, limit_s: float) -> Inquiry | None:
        """Wait a little; None if that is enough, else tell the others where this rank is.

        Over Gloo a wait may be given up and taken up again, and an error comes again.
        """
        try:
            work.wait(timedelta(seconds=min(SLOW_S, limit_s / 2)))
        except RuntimeError:
            return self._inquire(call)
        return None

    def _inquire(self, call: int) -> Inquiry:
        inquiry = Inquiry(self._roll, call)
        inquiry.start()
        return inquiry


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
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


def _reduce_rows(rows: torch.Tensor, op: str) -> torch.Tensor:
    if op == "sum":
        return tree_sum_rows(rows)
    return rows.amax(0) if op == "max" else rows.amin(0)


def _group_timeout_s(group: dist.ProcessGroup, device: torch.device) -> float:
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout.total_seconds()
