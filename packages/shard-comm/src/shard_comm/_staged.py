"""Accelerator tensors over a transport that moves host memory only."""

from __future__ import annotations

import torch

from shard_comm._comm import Comm, Work
from shard_comm._slices import Slices
from shard_comm._wrapper import Wrapper


class HostStaged(Wrapper):
    """Copy tensors to the host, let ``inner`` move them, copy results back.

    For backends without accelerator support, such as Gloo with several ranks on one device: slow,
    and right. ``shared`` gives None.

    Args:
        inner: a comm for CPU tensors.
        device: where the tensors of the caller live.

    Raises:
        ValueError: ``inner`` is not for CPU tensors.

    **Memory**: a host copy of both sides of each collective while it runs.
    """

    def __init__(self, inner: Comm, device: torch.device | str) -> None:
        device = torch.device(device)
        if inner.device.type != "cpu":
            raise ValueError(f"expected an inner comm for CPU tensors, got {inner}")
        super().__init__(inner, device=device)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory where the caller's tensors live. Local."""
        return Comm.empty(self, numel, dtype)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called it and its device has done its work."""
        self._limit_s("barrier", timeout_s)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        super().barrier(timeout_s=timeout_s)

    def split(self, color: int) -> Comm:
        """Return the comm of the ranks that passed the same ``color``, staged likewise."""
        self._check_open("split")
        return HostStaged(self.inner.split(color), self.device)

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        host = torch.empty(out.numel(), dtype=out.dtype)
        self.inner._all_gather(host, inp.reshape(-1).cpu(), timeout_s).wait()
        out.view(-1).copy_(host)
        return Work()

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        host = torch.empty(out.numel(), dtype=out.dtype)
        self.inner._reduce_scatter(host, inp.reshape(-1).cpu(), op, timeout_s).wait()
        out.view(-1).copy_(host)
        return Work()

    def _all_reduce(self, flat: torch.Tensor, op: str, timeout_s: float | None) -> Work:
        host = flat.cpu()
        self.inner._all_reduce(host, op, timeout_s).wait()
        flat.copy_(host)
        return Work()

    def _broadcast(self, flat: torch.Tensor, src: int, timeout_s: float | None) -> Work:
        host = flat.cpu()
        self.inner._broadcast(host, src, timeout_s).wait()
        flat.copy_(host)
        return Work()

    def _all_to_all(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        host = torch.empty(out.numel(), dtype=out.dtype)
        self.inner._all_to_all(host, inp.reshape(-1).cpu(), timeout_s).wait()
        out.view(-1).copy_(host)
        return Work()

    def _all_to_all_by(
        self, slices: Slices, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None
    ) -> Work:
        host = torch.empty(out.numel(), dtype=out.dtype)
        self.inner._all_to_all_by(slices, host, inp.reshape(-1).cpu(), timeout_s).wait()
        out.view(-1).copy_(host)
        return Work()
