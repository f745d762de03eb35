"""Checkpoints and Hugging Face folders as states with stand-ins."""

from __future__ import annotations

from typing import Any

import torch

from shard_ckpt._blocks import BLOCK_BYTES, block_count, block_range
from shard_ckpt._check import Source, check_blocks, open_source
from shard_ckpt._dtypes import torch_dtype
from shard_ckpt._extras import read_values
from shard_ckpt._files import TENSOR_SUFFIX
from shard_ckpt._fill import fill
from shard_ckpt._hf_folder import HF_SECTION, open_hf
from shard_ckpt._index import TensorId, TensorRecord
from shard_ckpt._lazy import LazyTensors
from shard_ckpt._leaf import Leaf
from shard_ckpt._match import Target
from shard_ckpt._places import Place
from shard_ckpt._progress import Progress
from shard_ckpt._values import RankValues, TensorRef

_BLOCKS_AT_ONCE = 16  # between two reports of progress


def read_own(path: Place, lazy: LazyTensors) -> dict[str, Any]:
    """Return the state in a checkpoint, its tensors as stand-ins. Local.

    Every block is read and its checksum compared first. Per-rank values come out as lists.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it is not a whole, unaltered checkpoint.
    """
    source = open_source(path)
    values = read_values(source.folder, source.index, rank=0, world_size=0)
    _check_all(source)
    made: dict[TensorId, torch.Tensor] = {}

    def tensor(ref: TensorRef) -> torch.Tensor:
        record = source.index.tensors[ref.section, ref.name]
        owner = source.index.tensors[record.tie] if record.tie else record
        if owner.shape == record.shape:  # tied tensors stay one where they can
            record = owner
        key = (record.section, record.name)
        if key not in made:
            made[key] = _stand_in(source, record, lazy)
        return made[key]

    def walk(node: Any) -> Any:
        if isinstance(node, TensorRef):
            return tensor(node)
        if isinstance(node, dict):
            return {key: walk(item) for key, item in node.items()}
        if type(node) in (list, tuple):
            return type(node)(walk(item) for item in node)
        return list(node) if isinstance(node, RankValues) else node

    return {section: walk(node) for section, node in values.items()}


def read_hf(path: Place, lazy: LazyTensors) -> dict[str, Any]:
    """Return a Hugging Face folder or file as a state with the section ``model``. Local."""
    source = open_hf(path)
    return {
        HF_SECTION: {
            record.name: _stand_in(source, record, lazy) for record in source.index.tensors.values()
        }
    }


def _check_all(source: Source) -> None:
    """Check every tensor file; those of values were checked when they were read."""
    progress = Progress(source.index.nbytes)
    for number, file in enumerate(source.index.files):
        if file.name.endswith(TENSOR_SUFFIX):
            blocks = range(block_count(file.nbytes))
            for at in range(0, len(blocks), _BLOCKS_AT_ONCE):
                some = blocks[at : at + _BLOCKS_AT_ONCE]
                check_blocks(source, {number: some})
                progress.advance(block_range(some[-1], file.nbytes)[1] - at * BLOCK_BYTES)


def read_record(source: Source, record: TensorRecord) -> torch.Tensor:
    """Read a whole tensor. Local."""
    return read_span(source, record, 0, record.numel).view(record.shape)


def read_span(source: Source, record: TensorRecord, start: int, stop: int) -> torch.Tensor:
    """Read elements ``[start, stop)`` of the flattened tensor. Local."""
    part = torch.empty(stop - start, dtype=stored_dtype(record))
    fill(source, [_target(record, part, start, stop)])
    return part


def whole_target(record: TensorRecord) -> Target:
    """Return what says which bytes a whole tensor is; it has no memory to be filled. Local."""
    return _target(record, torch.empty(0, dtype=stored_dtype(record)), 0, record.numel)


def _target(record: TensorRecord, tensor: torch.Tensor, start: int, stop: int) -> Target:
    leaf = Leaf(record.section, record.name, tensor, record.shape, start, stop, None, tensor)
    return Target(leaf, record)


def stored_dtype(record: TensorRecord) -> torch.dtype:
    """Return the dtype of a tensor on disk. Local."""
    dtype = torch_dtype(record.dtype)
    if dtype is None:
        raise AssertionError(f"{record.label}: dtype {record.dtype!r} was let through")
    return dtype


def _stand_in(source: Source, record: TensorRecord, lazy: LazyTensors) -> torch.Tensor:
    return lazy.add(stored_dtype(record), record.shape, lambda: read_record(source, record))
