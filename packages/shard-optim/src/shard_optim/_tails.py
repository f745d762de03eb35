"""Making a fused CPU kernel give each element the same bits wherever a run is cut.

The kernel works on whole vectors and finishes with scalar code, whose roundings differ now and
then. Which elements the scalar code gets depends on where a run ends, and so on the world size.
Here the last elements of each run are updated in a padded copy, so that all of them go through
the vector code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_VECTOR_BYTES = 64  # the widest vector of any CPU that torch has kernels for


@dataclass(frozen=True)
class Cut:
    """Flat tensors cut into what fills whole vectors and padded copies of the rest.

    Attributes:
        parts: what the kernel is to be given: bodies, then buffers of one vector each.
        origin: for each part, which of the flat tensors it belongs to.
        ends: views of the elements that the buffers stand for.
    """

    parts: list[torch.Tensor]
    origin: list[int]
    ends: list[torch.Tensor]

    def load(self) -> None:
        """Copy the ends into the buffers, before the kernel. Local."""
        if self.ends:
            torch._foreach_copy_(self._heads(), self.ends)

    def store(self) -> None:
        """Copy the buffers back, after the kernel. Local."""
        if self.ends:
            torch._foreach_copy_(self.ends, self._heads())

    def _heads(self) -> list[torch.Tensor]:
        buffers = self.parts[len(self.parts) - len(self.ends) :]
        return [b[: e.numel()] for b, e in zip(buffers, self.ends, strict=True)]


def cut_tails(flats: Sequence[torch.Tensor]) -> Cut:
    """Cut flat tensors at the last whole vector.

    Args:
        flats: 1-D CPU tensors; others are left whole. Tensors of equal lengths and element sizes
            are cut alike, so parameters, gradients and moments stay in step.

    **Collective**: local. **Memory**: at most 64 bytes per tensor.
    """
    bodies, body_origin = [], []
    buffers, ends, end_origin = [], [], []
    for i, flat in enumerate(flats):
        width = _VECTOR_BYTES // flat.itemsize
        rest = flat.numel() % width if flat.device.type == "cpu" and flat.ndim == 1 else 0
        body = flat.numel() - rest
        if body:
            bodies.append(flat[:body] if rest else flat)
            body_origin.append(i)
        if rest:
            buffers.append(flat.new_zeros(width))
            ends.append(flat[body:])
            end_origin.append(i)
    return Cut(bodies + buffers, body_origin + end_origin, ends)
