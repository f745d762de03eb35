"""Folders of safetensors files as the Hugging Face libraries lay them out."""

from __future__ import annotations

import os
from collections.abc import Mapping

from shard_ckpt._blocks import FileRecord
from shard_ckpt._check import Source
from shard_ckpt._errors import CheckpointError
from shard_ckpt._index import Index, TensorId, TensorRecord
from shard_ckpt._json import canonical_json, strict_loads
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._remote import RemotePath
from shard_ckpt._tensor_file import read_tensor_file, whole_records

HF_SECTION = "model"
HF_STEM = "model"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"


def open_hf(path: str | os.PathLike[str] | RemotePath) -> Source:
    """Find the tensors of a safetensors file, or of a folder with one or with an index. Local.

    Reads the index and every file's header, and holds them against each other both ways.

    Returns:
        What ``fill`` reads from; sizes are known, checksums are not.

    Raises:
        FileNotFoundError: there is no such file, or none in the folder.
        CheckpointError: a file is missing or damaged, the index is not valid, or they disagree.
    """
    where = place_of(path)
    if not where.exists():
        raise FileNotFoundError(f"{where}: no such file or folder")
    if not where.is_dir():
        return _source(where.parent, [where.name], None)
    names = names_in(where)
    indices = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(indices) == 1:
        weight_map = _read_weight_map(where / indices[0])
        return _source(where, sorted(set(weight_map.values())), weight_map)
    if indices:
        raise CheckpointError(f"{where}: holds {len(indices)} indices, {', '.join(indices)}")
    if not files:
        raise FileNotFoundError(f"{where}: holds neither *{SUFFIX} nor *{INDEX_SUFFIX}")
    if len(files) > 1:
        raise CheckpointError(
            f"{where}: holds {len(files)} safetensors files and no *{INDEX_SUFFIX}; name one file"
        )
    return _source(where, files, None)


def encode_weight_map(weight_map: Mapping[str, str], *, nbytes: int, numel: int) -> bytes:
    """Return the bytes of an index. Local.

    Args:
        weight_map: the file of each tensor.
        nbytes: of all tensors.
        numel: elements of all tensors.
    """
    metadata = {"total_size": nbytes, "total_parameters": numel}
    return canonical_json({"metadata": metadata, "weight_map": dict(weight_map)})


def _read_weight_map(path: Place) -> dict[str, str]:
    weight_map = strict_loads(path.read_bytes(), label=str(path)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a mapping weight_map from tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(SUFFIX) or "/" in name or "\0" in name:
            raise CheckpointError(f"{path}: {tensor} is said to be in {name!r}, not a file here")
    return weight_map


def _source(folder: Place, names: list[str], weight_map: dict[str, str] | None) -> Source:
    tensors: dict[TensorId, TensorRecord] = {}
    files: list[FileRecord] = []
    for number, name in enumerate(names):
        try:
            file = read_tensor_file(folder / name)
        except FileNotFoundError as exc:
            raise CheckpointError(f"{folder / name}: missing, though the index names it") from exc
        files.append(FileRecord(name, file.nbytes, ()))
        for record in whole_records(file, number, section=HF_SECTION):
            if weight_map is not None and weight_map.get(record.name) != name:
                listed = weight_map.get(record.name, "nowhere")
                raise CheckpointError(
                    f"{folder / name}: holds {record.name!r}, which the index says is {listed}"
                )
            tensors[HF_SECTION, record.name] = record
    for tensor, name in (weight_map or {}).items():
        if (HF_SECTION, tensor) not in tensors:
            raise CheckpointError(
                f"{folder / name}: lacks {tensor!r}, which the index says is there"
            )
    return Source(folder, Index("", 0, tensors, tuple(files)))
