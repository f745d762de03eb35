"""Device memory that communicators have registered."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

logger = logging.getLogger("shard_comm")


class RegisteredMemory:
    """A pool of memory that NCCL allocates and that communicators register, where torch has it.

    Their collectives then read and write it directly, some of them in the network's switches. A
    communicator registers what is there and what the pool takes later. There is none before the
    first collective; until then memory is ordinary.

    Args:
        device: of the memory.
        backends: torch's, one for each communicator.

    **Memory**: freed memory stays with the pool until ``close``.
    """

    def __init__(self, device: torch.device, backends: Sequence[Any]) -> None:
        self._device = device
        self._backends = list(backends)
        self._pool: Any = None
        self._refused = False

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory ``[numel]``, registered if that can be. Local."""
        if self._pool is None and not self._refused:
            self._open()
        if self._pool is None or numel == 0:
            return torch.empty(numel, dtype=dtype, device=self._device)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def close(self) -> None:
        """Let go of the pool; tensors in it stay. Local."""
        pool, self._pool, self._refused = self._pool, None, True
        if pool is not None:
            for backend in self._backends:
                backend.deregister_mem_pool(pool)

    def _open(self) -> None:
        reason = self._obstacle()
        if not reason and not all(backend._is_initialized() for backend in self._backends):
            return
        registered: list[Any] = []
        try:
            if not reason:
                pool = torch.cuda.MemPool(self._backends[0].mem_allocator)
                for backend in self._backends:
                    backend.register_mem_pool(pool)
                    registered.append(backend)
                self._pool = pool
        except RuntimeError as error:
            reason = str(error)
            for backend in registered:
                backend.deregister_mem_pool(pool)
        if reason:
            self._refused = True
            logger.info("memory on %s is not registered with NCCL: %s", self._device, reason)

    def _obstacle(self) -> str:
        """Why there can be no such memory, if there cannot."""
        if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
            return f"torch {torch.__version__} has no memory pools"
        for backend in self._backends:
            if not hasattr(backend, "register_mem_pool"):
                return f"{type(backend).__name__} registers no memory"
            if not backend.supports_tensor_alloc(self._device):
                return "the device or its driver has no multicast, which it is for"
        return ""
