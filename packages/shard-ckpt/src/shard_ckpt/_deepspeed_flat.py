"""Parameters in DeepSpeed's flat partitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shard_ckpt._errors import CheckpointError

Vector = Sequence[torch.Tensor]
"""Flat tensors, taken end to end."""


class Param(NamedTuple):
    """A parameter: its name, shape, parameter group, and first element in each vector it is in."""

    name: str
    shape: tuple[int, ...]
    group: int
    at: int

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One kind of values of the optimizer, such as ``exp_avg`` or the parameters themselves.

    Attributes:
        stage: of ZeRO.
        world_size: how many ranks the values are cut over.
        vectors: stage 1 and 2: of each group, all ranks' parts; stage 3: of each rank, all groups'.
    """

    stage: int
    world_size: int
    vectors: Sequence[Vector]

    def reader(self, param: Param, label: str) -> Callable[[], torch.Tensor]:
        """Return how to read a parameter's values, once they are known to be there."""
        if self.stage < 3:
            spans = [(self.vectors[param.group], param.at, param.numel)]
        else:  # every rank holds an equal part, the last padded
            part = -(-param.numel // self.world_size)
            counts = [
                min(part, max(0, param.numel - rank * part)) for rank in range(self.world_size)
            ]
            spans = [
                (vector, param.at, count)
                for vector, count in zip(self.vectors, counts, strict=True)
            ]
        for vector, at, count in spans:
            held = sum(tensor.numel() for tensor in vector)
            if at + count > held:
                raise CheckpointError(
                    f"{label}: {param.name} needs elements [{at}, {at + count}) of a partition "
                    f"that has {held}"
                )

        def read() -> torch.Tensor:
            pieces = [piece for span in spans for piece in _narrow(*span)]
            return torch.cat(pieces).view(param.shape) if pieces else empty.clone()

        empty = torch.empty(param.shape, dtype=self.dtype_of(param))
        return read if param.numel else empty.clone

    def dtype_of(self, param: Param) -> torch.dtype:
        """Return what a parameter's values are stored as. Local."""
        vector = self.vectors[param.group if self.stage < 3 else 0]
        return vector[0].dtype if vector else torch.float32


def _narrow(vector: Vector, at: int, count: int) -> list[torch.Tensor]:
    """Return elements ``[at, at + count)`` of tensors taken end to end."""
    pieces = []
    for tensor in vector:
        numel = tensor.numel()
        if at < numel and count > 0:
            pieces.append(tensor[at : at + count])
            count -= pieces[-1].numel()
            at = 0
        else:
            at -= min(at, numel)
    return pieces
