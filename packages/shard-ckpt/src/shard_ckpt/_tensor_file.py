"""Single safetensors files, whoever wrote them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from shard_ckpt._header import Header, header_length, parse_header
from shard_ckpt._index import Range, TensorRecord


class TensorFile(NamedTuple):
    """A file's name, size in bytes, and header."""

    name: str
    nbytes: int
    header: Header


def read_tensor_file(path: Path) -> TensorFile:
    """Read the header of a safetensors file. Local.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is not a valid safetensors file.
    """
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        length = header_length(file.read(8), file_bytes=nbytes, label=str(path))
        header = parse_header(file.read(length), file_bytes=nbytes, label=str(path))
    return TensorFile(path.name, nbytes, header)


def whole_records(file: TensorFile, number: int, *, section: str) -> list[TensorRecord]:
    """Return a record for each entry of a file, taken as a whole tensor under its key. Local.

    Args:
        file: the file.
        number: its position among the files of an index.
        section: where the records belong.
    """
    records = []
    for entry in file.header.entries:
        shape = entry.shape
        if entry.dtype == "F4" and shape:  # torch packs two values into one element
            shape = (*shape[:-1], shape[-1] // 2)
        record = TensorRecord(section, entry.key, entry.dtype, shape, ())
        part = Range(0, record.numel, number, file.header.data_start + entry.start)
        records.append(TensorRecord(section, entry.key, entry.dtype, shape, (part,)))
    return records
