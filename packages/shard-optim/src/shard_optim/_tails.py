"""Making a fused CPU kernel give each element the same bits wherever a run is cut.

The kernel works on whole vectors and finishes with scalar code, whose roundings differ now and
then. Which elements the scalar code gets depends on where a run ends, and so on the world size.
Here the last elements of each run are updated in a padded copy, so that all of them go through
the vector code. Of a short run all elements are, which takes less time than cutting it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_VECTOR_BYTES = 64  # the widest vector of any CPU that torch has kernels for
_SHORT_BYTES = 4096  # copying this much takes about as long as making a view


@dataclass(frozen=True)
class Cut:
    """Flat tensors cut into what fills whole vectors and padded copies of the rest.

    Attributes:
        parts: what the kernel is to be given: bodies, then buffers of whole vectors.
        heads: views of the buffers, what stands in front of the padding.
        ends: views of the elements that the heads stand for.
    """

    parts: list[torch.Tensor]
    heads: list[torch.Tensor]
    ends: list[torch.Tensor]

    def load(self) -> None:
        """Copy the ends into the buffers, before the kernel. Local."""
        if self.ends:
            torch._foreach_copy_(self.heads, self.ends)

    def store(self) -> None:
        """Copy the buffers back, after the kernel. Local."""
        if self.ends:
            torch._foreach_copy_(self.ends, self.heads)


@dataclass(frozen=True)
class Tails:
    """Where flat tensors of certain lengths are cut, and buffers for what is cut off.

    Attributes:
        bodies: per flat tensor, how many elements fill whole vectors.
        owners: for each buffer, which of the flat tensors it belongs to.
        buffers: whole vectors, zero behind the elements.
        heads: views of the buffers, as long as what is cut off.
    """

    bodies: list[int]
    owners: list[int]
    buffers: list[torch.Tensor]
    heads: list[torch.Tensor]

    @property
    def origin(self) -> list[int]:
        """For each part of a cut, which of the flat tensors it belongs to."""
        return [i for i, body in enumerate(self.bodies) if body] + self.owners

    def cut(self, flats: Sequence[torch.Tensor]) -> Cut:
        """Cut tensors of the planned lengths; the buffers hold one cut at a time. Local."""
        parts, ends = [], []
        owners = set(self.owners)
        for i, (flat, body) in enumerate(zip(flats, self.bodies, strict=True)):
            if i not in owners:
                parts.append(flat)
                continue
            flat = flat.view(-1)
            if body:
                parts.append(flat[:body])
            ends.append(flat[body:] if body else flat)
        return Cut(parts + self.buffers, self.heads, ends)


def plan_tails(flats: Sequence[torch.Tensor]) -> Tails:
    """Plan to cut contiguous tensors at their last whole vector, short ones before their first.

    Tensors of equal lengths and element sizes are cut alike, so parameters, gradients and
    moments stay in step.

    Worked example: 1029 float32 numbers on a CPU, 16 to a vector, become a body of 1024 and a
    buffer of 16, of which the first 5 are the rest. 37 numbers become a buffer of 48. 32 numbers
    are whole vectors and stay as they are.

    Args:
        flats: tensors with elements. Those on other devices than the CPU are left whole.

    **Collective**: local. **Memory**: at most 64 bytes per tensor, or what a short one takes.
    """
    bodies, owners, buffers, heads = [], [], [], []
    for i, flat in enumerate(flats):
        width = _VECTOR_BYTES // flat.itemsize
        rest = flat.numel() % width if flat.device.type == "cpu" else 0
        if rest and flat.nbytes <= _SHORT_BYTES:
            rest = flat.numel()
        bodies.append(flat.numel() - rest)
        if rest:
            buffer = torch.zeros(-(-rest // width) * width, dtype=flat.dtype, device=flat.device)
            owners.append(i)
            buffers.append(buffer)
            heads.append(buffer[:rest])
    return Tails(bodies, owners, buffers, heads)
