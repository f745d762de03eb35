"""What a sharded tensor asks of the object that talks to other ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class GatherComm(Protocol):
    """The collectives behind norms, sums and ``full_tensor()``; every ``shard_comm.Comm`` fits.

    One object stands for one set of ranks: it is told apart by identity (so it must be hashable)
    and referred to weakly.
    """

    @property
    def rank(self) -> int:
        """This rank, in ``range(size)``."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> Any:
        """Fill ``out`` ``[size * n]`` with every rank's ``inp`` ``[n]``, in rank order."""

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> Any:
        """Reduce ``tensor`` over ranks in place by ``"sum"``, ``"max"`` or ``"min"``."""
