"""What all ranks hold of a tensor together."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


def full_value(tensor: Any) -> torch.Tensor:
    """Gather a sharded tensor, without its graph; AssertionError if it is not sharded.

    **Collective**: all ranks that hold a piece.
    """
    assert isinstance(tensor, DTensor), f"expected a sharded tensor, got {type(tensor).__name__}"
    return tensor.full_tensor().detach()


def full_grad(param: Any) -> torch.Tensor:
    """Gather a sharded parameter's gradient; AssertionError if it has none or it is not sharded.

    **Collective**: all ranks that hold a piece.
    """
    return full_value(param.grad)
