"""Exports to object stores, where a file is written from its beginning to its end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from shard_ckpt._blocks import BLOCK_BYTES
from shard_ckpt._check import Source, blocks_of, check_blocks
from shard_ckpt._hf_layout import OutFile
from shard_ckpt._match import Target
from shard_ckpt._memory import bytes_of
from shard_ckpt._own_read import read_span, whole_target
from shard_ckpt._progress import Progress
from shard_ckpt._remote import RemotePath, RemoteSink
from shard_ckpt._remote_draft import remove_keys


class Uploads:
    """The keys that a rank writes for an export. Use as a context manager.

    On the way out they are removed again, unless ``keep`` was called: the export failed, here or on
    another rank.

    Args:
        folder: what the keys begin with.
    """

    def __init__(self, folder: RemotePath) -> None:
        self._folder = folder
        self._begun: list[RemotePath] = []

    def write(self, source: Source, files: Sequence[OutFile]) -> None:
        """Check what files need, then write them one after another. Local.

        Raises:
            CheckpointError: a block or header is not as the index says.
            OSError: reading or writing failed, or a key exists.

        **Memory**: 16 MiB, twice where tensors are cast, and what the store buffers of an upload.
        """
        wholes = [whole_target(item.record) for file in files for item in file.items]
        check_blocks(source, _numbers(wholes))
        self._folder.make_folder()
        progress = Progress(sum(file.nbytes for file in files))
        for file in files:
            self._write_file(source, file, progress)

    def put(self, name: str, data: bytes) -> None:
        """Write a small file. Local."""
        (self._folder / name).create(data)
        self._begun.append(self._folder / name)

    def keep(self) -> None:
        """Leave what was written. Local."""
        self._begun = []

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for path in self._begun:
            remove_keys(path)

    def _write_file(self, source: Source, file: OutFile, progress: Progress) -> None:
        path = self._folder / file.name
        sink = RemoteSink(path)
        self._begun.append(path)
        try:
            sink.write([memoryview(file.header)])
            progress.advance(len(file.header))
            for item in file.items:
                step = BLOCK_BYTES // item.record.itemsize
                for start in range(0, item.record.numel, step):
                    stop = min(item.record.numel, start + step)
                    part = read_span(source, item.record, start, stop).to(item.dtype)
                    view = bytes_of(part)
                    sink.write([view])
                    progress.advance(len(view))
            sink.seal()
        except BaseException:
            sink.abandon()
            raise


def _numbers(wholes: Sequence[Target]) -> dict[int, list[int]]:
    runs = blocks_of(read for whole in wholes for read in whole.reads())
    return {
        file: [block for first, last in found for block in range(first, last + 1)]
        for file, found in runs.items()
    }
