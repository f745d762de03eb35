"""Single safetensors files, whoever wrote them."""

from __future__ import annotations

from typing import NamedTuple

from shard_ckpt._blocks import read_exactly
from shard_ckpt._errors import CheckpointError
from shard_ckpt._header import Header, header_length, parse_header
from shard_ckpt._index import Range, TensorRecord
from shard_ckpt._open import open_to_read
from shard_ckpt._places import Place


class TensorFile(NamedTuple):
    """A file's name, size in bytes, and header."""

    name: str
    nbytes: int
    header: Header


def read_tensor_file(path: Place) -> TensorFile:
    """Read the header of a safetensors file. Local.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is not a valid safetensors file.
    """
    label = str(path)
    with open_to_read(path) as (file, nbytes):
        prefix = bytearray(min(8, nbytes))
        whole = read_exactly(file, [memoryview(prefix)], offset=0)
        text = bytearray(header_length(bytes(prefix), file_bytes=nbytes, label=label))
        if not whole or not read_exactly(file, [memoryview(text)], offset=8):
            raise CheckpointError(f"{path}: got shorter while it was being read")
        header = parse_header(bytes(text), file_bytes=nbytes, label=label)
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
