"""Folders that torch.distributed.checkpoint made, read a tensor at a time."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from shard_ckpt._errors import CheckpointError
from shard_ckpt._lazy import LazyTensors
from shard_ckpt._marker import DCP_METADATA
from shard_ckpt._torch_file import as_sections, reason_of

_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}

_Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(frozen=True)
class _Folder:
    path: Path
    metadata: Metadata

    def tensor(self, fqn: str, stored: TensorStorageMetadata) -> Callable[[], torch.Tensor]:
        """Return how to read a tensor, once its chunks are known to cover it."""
        size = tuple(stored.size)
        chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in stored.chunks]
        for offsets, sizes in chunks:
            if any(
                at < 0 or at + length > whole
                for at, length, whole in zip(offsets, sizes, size, strict=True)
            ):
                raise CheckpointError(
                    f"{self.path}: {fqn}: a chunk at {offsets} of {sizes} is not within {size}"
                )
        held = sum(math.prod(sizes) for _, sizes in chunks)
        if held != math.prod(size):
            raise CheckpointError(
                f"{self.path}: {fqn}: expected {math.prod(size)} elements, its chunks hold {held}"
            )
        pair = _overlap(chunks)
        if pair is not None:
            raise CheckpointError(
                f"{self.path}: {fqn}: the chunks at {pair[0]} and {pair[1]} hold the same elements"
            )
        dtype = stored.properties.dtype

        def read() -> torch.Tensor:
            parts = ((at, self._chunk(fqn, dtype, at, sizes)) for at, sizes in chunks)
            if len(chunks) == 1:
                return next(parts)[1]
            whole = torch.empty(size, dtype=dtype)
            for offsets, part in parts:
                where = tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))
                whole[where] = part
            return whole

        return read

    def value(self, fqn: str) -> Any:
        """Read what is not a tensor."""
        return self._load(fqn, MetadataIndex(fqn))

    def _chunk(
        self, fqn: str, dtype: torch.dtype, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        part = self._load(fqn, MetadataIndex(fqn, offsets))
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != dtype:
            raise CheckpointError(
                f"{self.path}: {fqn}: the chunk at {offsets} is not {dtype} of shape {sizes}"
            )
        return part

    def _load(self, fqn: str, index: MetadataIndex) -> Any:
        info = (self.metadata.storage_data or {}).get(index)
        if info is None:
            raise CheckpointError(f"{self.path / DCP_METADATA}: does not say where {index} lies")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{self.path}: {fqn} is stored through {info.transform_descriptors}; load it with "
                f"torch.distributed.checkpoint and save it without extensions"
            )
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{self.path}: {fqn} is said to be in {name!r}")
        file = self.path / name
        try:
            with open(file, "rb") as opened:
                window = _Window(opened, info.offset, info.length)
                return torch.load(io.BufferedReader(window), map_location="cpu", weights_only=True)
        except FileNotFoundError as exc:
            raise CheckpointError(f"{file}: missing; it holds {fqn}") from exc
        except OSError:
            raise
        except Exception as exc:  # damaged pickles raise anything
            raise CheckpointError(f"{file}: {fqn} cannot be read ({reason_of(exc)})") from exc


def read_dcp(path: Path, lazy: LazyTensors) -> dict[str, Any]:
    """Return the state in a folder, its tensors as stand-ins, its values read. Local.

    Only classes of torch.distributed.checkpoint's own metadata are unpickled, and what is not a
    tensor is read with ``weights_only=True``.

    Raises:
        FileNotFoundError: there is no such folder, or it has no ``.metadata``.
        CheckpointError: the folder is damaged or not understood.
    """
    folder = _Folder(path, _read_metadata(path / DCP_METADATA))
    try:
        tree = _read_tree(folder, lazy)
    except (AttributeError, TypeError, KeyError, IndexError) as exc:
        raise CheckpointError(
            f"{path / DCP_METADATA}: not laid out as torch does ({exc!r})"
        ) from exc
    return as_sections(_with_lists(tree), label=str(path))


def _read_tree(folder: _Folder, lazy: LazyTensors) -> dict[Any, Any]:
    paths = folder.metadata.planner_data
    tree: dict[Any, Any] = {}
    for fqn, stored in folder.metadata.state_dict_metadata.items():
        where = paths.get(fqn, (fqn,)) if isinstance(paths, Mapping) else (fqn,)
        node = tree
        for key in where[:-1]:
            node = node.setdefault(key, {})
        if isinstance(stored, TensorStorageMetadata):
            read = folder.tensor(fqn, stored)
            node[where[-1]] = lazy.add(stored.properties.dtype, stored.size, read)
        else:
            node[where[-1]] = folder.value(fqn)
    return tree


class _Window(io.RawIOBase):
    """Part of an open file as a file."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view[:count])
        self._at += got
        return got


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not let through")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    with open(path, "rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except OSError:
            raise
        except Exception as exc:  # damaged pickles raise anything
            raise CheckpointError(f"{path}: cannot be read ({exc})") from exc
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{path}: holds {type(metadata).__name__}, not Metadata")
    return metadata


def _overlap(chunks: Sequence[_Chunk]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return where two chunks begin that have elements in common; None if none have.

    Goes along the dimension that is cut most and compares each chunk with those not yet behind.
    """
    filled = [chunk for chunk in chunks if math.prod(chunk[1])]
    dims = range(len(filled[0][0])) if filled else ()
    along = max(dims, key=lambda dim: len({at[dim] for at, _ in filled}), default=None)
    if along is None:  # at most single elements
        return (filled[0][0], filled[1][0]) if len(filled) > 1 else None
    open_ones: list[_Chunk] = []
    for at, size in sorted(filled, key=lambda chunk: chunk[0][along]):
        open_ones = [one for one in open_ones if one[0][along] + one[1][along] > at[along]]
        for other, extent in open_ones:
            if all(
                at[dim] < other[dim] + extent[dim] and other[dim] < at[dim] + size[dim]
                for dim in dims
            ):
                return other, at
        open_ones.append((at, size))
    return None


def _with_lists(node: Any) -> Any:
    """Turn mappings whose keys are 0, 1, 2, ... back into the lists that they were."""
    if not isinstance(node, dict):
        return node
    items = {key: _with_lists(item) for key, item in node.items()}
    if items and all(type(key) is int for key in items):
        return [items[key] for key in sorted(items)]
    return items
