"""Counting what is cast."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Casts(TorchDispatchMode):
    """Counts the elements that operators inside copy into memory of a dtype from another one.

    Args:
        dtype: of what is written.

    Attributes:
        numel: the elements so far.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.numel: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, and count it."""
        if func is torch.ops.aten.copy_.default and args[0].dtype == self.dtype != args[1].dtype:
            self.numel += args[0].numel()
        return func(*args, **(kwargs or {}))
