"""One rank: every collective is the identity."""

from __future__ import annotations

from typing import Any

import torch

from shard_comm._comm import Comm, Work
from shard_comm._slices import Slices


class SoloComm(Comm):
    """A comm of one rank. Nothing waits, and nothing is copied that is in place already.

    Args:
        device: where tensors live.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, device=torch.device(device), timeout_s=float("inf"))

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return at once."""
        self._limit_s("barrier", timeout_s)

    def all_gather_object(self, obj: Any, *, timeout_s: float | None = None) -> list[Any]:
        """Return ``[obj]``."""
        self._limit_s("all_gather_object", timeout_s)
        return [obj]

    def split(self, color: int) -> Comm:
        """Return this comm."""
        self._check_open("split")
        return self

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        if out.data_ptr() != inp.data_ptr():
            out.view(-1).copy_(inp.view(-1))
        return Work()

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        return self._all_gather(out, inp, timeout_s)

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        return Work()

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        return Work()

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._all_gather(out, inp, timeout_s)

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        return self._all_gather(out, inp, timeout_s)

    def _sum_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        out.view(-1).copy_(inp.view(-1))
        return Work()

    def _sum_all(
        self, out: torch.Tensor, flat: torch.Tensor, divisor: int, timeout_s: float | None
    ) -> Work:
        out.copy_(flat)
        return Work()
