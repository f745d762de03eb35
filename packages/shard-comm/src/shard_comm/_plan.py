"""One rank of a group that is not there: counts what would move."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import torch

from shard_comm._comm import Comm, Work
from shard_comm._recorded import OpRecord
from shard_comm._slices import Slices


class PlanComm(Comm):
    """A comm of any size without a transport: calls and bytes are counted, nothing moves.

    Run one rank of a large group on one machine, with meta tensors where values do not matter.
    Results are as if this rank were alone in a group of that size, the others silent:

    * ``all_gather`` and ``all_to_all`` write this rank's own slice of ``out`` and leave the rest.
    * ``reduce_scatter`` gives this rank's slice of its own ``inp``; ``all_reduce`` and
      ``broadcast`` leave the tensor as it is. A mean divides by the size all the same.
    * ``all_gather_object`` returns one copy of this rank's own object per rank.
    * ``shared`` gives None, so that gathers are called and counted.
    * ``split`` gives a part of ``part_size`` ranks, whatever the color, in which this rank is
      ``rank % part_size``. Its calls are counted on its own, as with ``Recorded``.

    Args:
        size: number of ranks.
        rank: which of them this is.
        device: where tensors live.
        part_size: ranks of each part; by default all of them, as if all passed this rank's color.

    Attributes:
        records: operation name to its counts, e.g. ``records["all_gather"].payload_bytes``.

    Raises:
        ValueError: ``rank`` is no rank, or ``part_size`` does not divide ``size``.

    **Collective**: every method is local.
    """

    def __init__(
        self,
        size: int,
        rank: int = 0,
        device: torch.device | str = "meta",
        *,
        part_size: int | None = None,
    ) -> None:
        super().__init__(rank, size, device=torch.device(device), timeout_s=float("inf"))
        if part_size is not None and (part_size < 1 or size % part_size):
            raise ValueError(f"expected a part_size that divides {size}, got {part_size}")
        self.part_size = size if part_size is None else part_size
        self.records: defaultdict[str, OpRecord] = defaultdict(OpRecord)

    def reset(self) -> None:
        """Forget all counts. Local."""
        self.records.clear()

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return at once."""
        self._limit_s("barrier", timeout_s)
        self._count("barrier", 0)

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return ``size`` copies of this rank's object; its bytes are not counted."""
        self._limit_s("all_gather_object", timeout_s)
        packed = pickle.dumps(obj)
        self._count("all_gather_object", 0)
        return [pickle.loads(packed) for _ in range(self.size)]

    def split(self, color: int) -> Comm:
        """Return a plan of ``part_size`` ranks."""
        self._check_open("split")
        return PlanComm(self.part_size, self.rank % self.part_size, self.device)

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        own = self._own(out)
        if own.is_meta or own.data_ptr() != inp.data_ptr():
            own.copy_(inp.view(-1))
        return self._count("all_gather", out.nbytes)

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        return self._sum_scatter(out, inp, 1, timeout_s)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        return self._count("all_reduce", flat.nbytes)

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        return self._count("broadcast", flat.nbytes)

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        self._own(out).copy_(self._own(inp))
        return self._count("all_to_all", inp.nbytes)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        into = out.view(-1).split(slices.received)[self.rank]
        into.copy_(inp.view(-1).split(slices.sent)[self.rank])
        return self._count("all_to_all", inp.nbytes)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        out.view(-1).copy_(self._own(inp))
        if divisor != 1:
            out.div_(divisor)
        return self._count("reduce_scatter", inp.nbytes)

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        out.copy_(flat)
        if divisor != 1:
            out.div_(divisor)
        return self._count("all_reduce", flat.nbytes)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(self.size, tensor.numel() // self.size)[self.rank]

    def _count(self, op: str, nbytes: int) -> Work:
        self.records[op].add(nbytes)
        return Work()
