"""What torch.distributed.checkpoint asks of a tensor of which a rank holds a part."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shard_flat._boxes import Box, boxes_of
from shard_flat._placement import ShardSpec


def write_items(name: str, local: torch.Tensor, spec: ShardSpec, *, rank: int) -> list[WriteItem]:
    """Return one item per box of a piece. Local.

    A tensor without elements is written by rank 0, so that its shape is on record.
    """
    boxes = list(_boxes(spec))
    shape = spec.global_shape
    if math.prod(shape) == 0 and rank == 0:
        boxes = [Box((0,) * len(shape), shape, 0)]
    properties = TensorProperties.create_from_tensor(local)
    return [
        WriteItem(
            index=MetadataIndex(name, torch.Size(box.offsets)),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(_chunk(box), properties, torch.Size(shape)),
        )
        for box in boxes
    ]


def chunks(spec: ShardSpec) -> list[ChunkStorageMetadata]:
    """Return where the boxes of a piece lie in the whole tensor. Local."""
    return [_chunk(box) for box in _boxes(spec)]


def box_at(local: torch.Tensor, spec: ShardSpec, index: Any) -> torch.Tensor:
    """Return the view of a piece that is the box at ``index.offset``, in the box's shape. Local."""
    if math.prod(spec.global_shape) == 0:
        return local.view(spec.global_shape)
    wanted: Sequence[int] = tuple(index.offset)
    for box in _boxes(spec):
        if box.offsets == wanted:
            begin = box.start - spec.start
            return local[begin : begin + math.prod(box.sizes)].view(box.sizes)
    raise ValueError(
        f"{spec.name}: no box at {wanted} in the piece [{spec.start}, {spec.stop}) of a tensor of "
        f"shape {spec.global_shape}"
    )


def _boxes(spec: ShardSpec) -> Iterator[Box]:
    """Boxes of the whole tensor; those of a DTensor's local part lie at an offset in it."""
    for box in boxes_of(spec.shape, spec.start, spec.stop):
        if spec.outer is not None:
            offsets = zip(box.offsets, spec.outer.offsets, strict=True)
            box = replace(box, offsets=tuple(a + b for a, b in offsets))
        yield box


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
