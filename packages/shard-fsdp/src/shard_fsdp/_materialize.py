"""From the meta device to values, one parameter at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from shard_fsdp._module import FSDPModule

InitFn = Callable[[str, torch.Tensor, torch.Generator], None]


@torch.no_grad()
def materialize(module: nn.Module, init_fn: InitFn, *, seed: int = 0) -> nn.Module:
    """Give a sharded model that was built on the meta device its parameters and buffers.

    Each value is drawn whole from a generator seeded by its name, and every rank keeps its piece:
    weights are the same at any world size, and no rank ever holds more than one full parameter.

    Args:
        module: a model on which ``fully_shard`` was called; parameters that hold values already
            are initialised anew.
        init_fn: called as ``init_fn(name, tensor, generator)`` for each parameter and buffer,
            with its FQN and an uninitialised full tensor to fill in place, whose memory is that of
            the next one.
        seed: mixed with the names.

    Returns:
        ``module``.

    Raises:
        ValueError: a parameter is neither sharded nor has values.

    **Collective**: local; all ranks get the same weights from the same ``init_fn`` and ``seed``.

    **Memory**: the shards, and the largest full parameter once.
    """

    def fill(name: str, tensor: torch.Tensor) -> None:
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(tensor.device)
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        init_fn(name, tensor, generator)

    units = [m._shard_unit for m in module.modules() if isinstance(m, FSDPModule)]
    device = units[-1].comm.device if units else None
    most = max((group.largest_bytes for unit in units for group in unit.groups), default=0)
    # One piece of memory for all: one each would leave holes between the shards.
    scratch = torch.empty(most, dtype=torch.uint8, device=device)
    for unit in dict.fromkeys(units):
        unit.reshard()
        for group in unit.groups:
            group.initialise(fill, scratch)
    for prefix, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                filled = torch.empty_like(buffer, device=device)
                fill(f"{prefix}.{name}" if prefix else name, filled)
                each._buffers[name] = filled
    for name, param in module.named_parameters():
        if param.device.type == "meta":
            raise ValueError(f"{name}: on the meta device and not sharded; wrap its module first")
    return module
