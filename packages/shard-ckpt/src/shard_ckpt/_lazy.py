"""States whose tensors are read one at a time, while they are written elsewhere."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shard_ckpt._blocks import BLOCK_BYTES, BlockWriter, FileRecord
from shard_ckpt._commit import Manifest, build_index
from shard_ckpt._extras import encode_extras, write_extras
from shard_ckpt._files import Origin, SectionFile, lay_out
from shard_ckpt._index import Range
from shard_ckpt._memory import bytes_of, flat_range
from shard_ckpt._places import Place, sync_folder
from shard_ckpt._plan import Entry, group_leaves, plan_entries
from shard_ckpt._progress import Progress
from shard_ckpt._remote_draft import draft_for
from shard_ckpt._state import flatten

Read = Callable[[], torch.Tensor]


class LazyTensors:
    """Tensors that stand in a state for elements that are not in memory.

    A stand-in has the dtype and shape of what it stands for and the memory of one element. Its
    values mean nothing; ``read`` gets them.
    """

    def __init__(self) -> None:
        self._reads: dict[int, tuple[torch.Tensor, Read]] = {}

    def add(self, dtype: torch.dtype, shape: Sequence[int], read: Read) -> torch.Tensor:
        """Return a stand-in. Local.

        Args:
            dtype: what ``read`` will return.
            shape: what ``read`` will return.
            read: gets the whole tensor, on the CPU; called once per write.
        """
        stand_in = torch.empty_strided(tuple(shape), (0,) * len(shape), dtype=dtype)
        self._reads[id(stand_in)] = (stand_in, read)
        return stand_in

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what a stand-in stands for, contiguous; any other tensor as it is. Local."""
        _, read = self._reads.get(id(tensor), (None, None))
        if read is None:
            return tensor
        found = read()
        if found.dtype != tensor.dtype or found.shape != tensor.shape:
            raise AssertionError(
                f"expected {tensor.dtype} of shape {tuple(tensor.shape)}, read {found.dtype} of "
                f"shape {tuple(found.shape)}"
            )
        return found.contiguous()


def save_lazy(state: Mapping[str, Any], path: Place, *, lazy: LazyTensors) -> None:
    """Save a state with stand-ins as a checkpoint of one rank; one process does it all.

    Args:
        state: as for ``save``.
        path: the folder to make, or what keys begin with; it must not exist.
        lazy: what its stand-ins stand for.

    Raises:
        FileExistsError: ``path`` exists.
        Exception: as for ``save``, and what reading a tensor raises; nothing is left at ``path``.

    **Collective**: local.
    **Memory**: one tensor at a time.
    """
    flat = flatten(state)
    extras = encode_extras(flat, 0)
    origin = Origin(uuid.uuid4().hex, 0, 1)
    entries = plan_entries(group_leaves(flat.leaves), rank=0, world_size=1, shares={})
    numbers = {leaf.id: number for number, leaf in enumerate(flat.leaves)}
    files: list[FileRecord] = []
    ranges: list[tuple[int, Range]] = []
    progress = Progress(sum(entry.nbytes for entry in entries))
    with draft_for(path, origin.save_id) as draft:
        for layout in lay_out(entries, origin):
            ranges.extend((numbers[tensor], part) for tensor, part in layout.ranges(len(files)))
            files.append(_write_section(draft.path, layout, lazy, progress))
        if extras is not None:
            files.append(write_extras(draft.path, extras, origin=origin))
        sync_folder(draft.path)
        manifest = Manifest(tuple(files), tuple(ranges))
        draft.publish(build_index(flat.leaves, origin.save_id, manifests=[manifest]))


def _write_section(
    folder: Place, layout: SectionFile, lazy: LazyTensors, progress: Progress
) -> FileRecord:
    writer = BlockWriter(folder / layout.name)
    try:
        writer.feed(memoryview(layout.header))
        for entry in layout.entries:
            _feed(writer, entry, lazy, progress)
        return writer.finish()
    finally:
        writer.abandon()


def _feed(writer: BlockWriter, entry: Entry, lazy: LazyTensors, progress: Progress) -> None:
    """Read and write one tensor; nothing holds it when this returns."""
    tensor = lazy.read(entry.leaf.source)
    whole = flat_range(tensor, start=entry.runs.start, stop=entry.runs.stop)
    view = bytes_of(whole)
    for at in range(0, len(view), BLOCK_BYTES):
        part = view[at : at + BLOCK_BYTES]
        writer.feed(part, owner=whole)
        progress.advance(len(part))
    writer.flush()
