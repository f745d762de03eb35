"""What a rank holds of a model's tensors, of whatever kind, as element ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shard_ckpt._memory import is_flat
from shard_ckpt._state import Leaf, flatten
from shard_flat import ShardTensor


def cut_leaves(tensors: Mapping[str, Any], *, section: str) -> list[Leaf]:
    """Return this rank's ranges of plain tensors, ShardTensors and DTensors. Local.

    A tensor of which the rank holds several ranges comes out as several leaves of one name.

    Raises:
        TypeError: a tensor of a kind that cannot be filled.
    """
    boxed = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DTensor) and not isinstance(tensor, ShardTensor)
    }
    flat = {name: tensor for name, tensor in tensors.items() if name not in boxed}
    leaves = flatten({section: flat}).leaves
    for name, tensor in boxed.items():
        leaves.extend(_box_leaves(tensor, section, name))
    return sorted(leaves, key=lambda leaf: (leaf.id, leaf.start))


def box_runs(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Yield the runs of a flattened tensor that a box of it covers, start and stop, in order.

    Columns 1 and 2 of a 3x5 tensor are three runs, rows 1 and 2 are one::

        box_runs((3, 5), (0, 1), (3, 2))    [1, 3) [6, 8) [11, 13)
        box_runs((3, 5), (1, 0), (2, 5))    [5, 15)
    """
    if math.prod(sizes) == 0:
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # dimensions before this one are walked through
    length = math.prod(sizes[outer:])
    base = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for at in itertools.product(*(range(size) for size in sizes[:outer])):
        start = base + sum(i * stride for i, stride in zip(at, strides, strict=False))
        yield start, start + length


def _box_leaves(tensor: DTensor, section: str, name: str) -> list[Leaf]:
    label = f"{section}: {name}"
    try:
        chunks = tensor.__create_chunk_list__()
    except RuntimeError as exc:
        raise TypeError(
            f"{label}: a DTensor placed as {tensor.placements} cannot be filled"
        ) from exc
    local = tensor.to_local().detach()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise TypeError(
            f"{label}: expected a DTensor with one block per rank, got {tensor.placements}"
        )
    if not is_flat(local):
        raise TypeError(f"{label}: expected contiguous local tensors, got stride {local.stride()}")
    (whole,) = flatten({section: {name: local}}).leaves  # its dtype and memory, checked
    shape, shards = tuple(tensor.shape), tensor.device_mesh.size()
    runs = list(box_runs(shape, chunks[0].offsets, chunks[0].sizes)) or [(0, 0)]
    flat = whole.tensor.view(-1)
    at = 0
    leaves = []
    for start, stop in runs:
        part: torch.Tensor = flat[at : at + stop - start]
        leaves.append(Leaf(section, name, part, shape, start, stop, shards, whole.source))
        at += stop - start
    return leaves
