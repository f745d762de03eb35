"""Files of object stores, through fsspec: as much as checkpoints need.

Nothing is renamed or locked there. A key appears whole when it is closed.
"""

from __future__ import annotations

import errno
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PART_BYTES = 16 << 20  # of an upload, and the most that one request reads


@dataclass(frozen=True)
class RemotePath:
    """A key, or what keys begin with.

    Attributes:
        fs: fsspec's file system.
        key: without protocol.
    """

    fs: Any
    key: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.key))

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.key.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.key.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """All but the last component."""
        return RemotePath(self.fs, self.key.rstrip("/").rpartition("/")[0])

    def is_dir(self) -> bool:
        """Whether keys lie below this one. Local."""
        self.fs.invalidate_cache()
        return bool(self.fs.isdir(self.key))

    def exists(self) -> bool:
        """Whether the key is there, or others that begin with it. Local."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.key))

    def names(self) -> list[str]:
        """Return the next components of keys below this one, sorted. Local.

        Raises:
            FileNotFoundError: there are none.
        """
        self.fs.invalidate_cache()
        found = self.fs.ls(self.key, detail=False)
        return sorted(key.rstrip("/").rpartition("/")[2] for key in found)

    def read_bytes(self) -> bytes:
        """Return everything behind the key. Local.

        Raises:
            FileNotFoundError: it is not there.
        """
        return bytes(self.fs.cat_file(self.key))

    def create(self, data: bytes) -> None:
        """Write a key that must not exist, where the store can make sure of it. Local."""
        if self.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(self))
        try:
            self.fs.pipe_file(self.key, data, mode="create")
        except (TypeError, ValueError, NotImplementedError):  # a store without conditional writes
            self.fs.pipe_file(self.key, data)

    def make_folder(self) -> None:
        """Make the folder, where folders are more than names. Local."""
        self.fs.makedirs(self.key, exist_ok=True)

    def put(self, data: bytes) -> None:
        """Write a key, whatever was behind it. Local."""
        self.fs.pipe_file(self.key, data)

    def remove(self) -> None:
        """Remove the key and all that begin with it. Local."""
        self.fs.invalidate_cache()
        self.fs.rm(self.key, recursive=True)


class RemoteFile:
    """A key opened for reading.

    Args:
        path: which.

    Raises:
        FileNotFoundError: it is not there.
    """

    def __init__(self, path: RemotePath) -> None:
        path.fs.invalidate_cache()
        info = path.fs.info(path.key)
        self._path = path
        self.nbytes = int(info["size"])
        marks = ("ETag", "etag", "VersionId", "mtime", "LastModified", "created", "ino")
        self.identity = tuple(str(info[mark]) for mark in marks if mark in info)

    def read_into(self, views: Sequence[memoryview], offset: int) -> int:
        """Read at ``offset`` into views one after another; return how many bytes came. Local."""
        wanted = min(sum(map(len, views)), _PART_BYTES)
        data = self._path.fs.cat_file(self._path.key, start=offset, end=offset + wanted)
        at = 0
        for view in views:
            part = data[at : at + len(view)]
            view[: len(part)] = part
            at += len(part)
        return at


class RemoteSink:
    """A key being written; it appears when it is sealed, where the store uploads.

    Args:
        path: which; it must not exist.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        if path.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(path))
        self._file: Any = path.fs.open(path.key, "wb", block_size=_PART_BYTES)

    def write(self, views: Sequence[memoryview]) -> int:
        """Take the next bytes; return how many. Local."""
        for view in views:
            self._file.write(view)
        return sum(map(len, views))

    def seal(self) -> None:
        """Return when the store has everything. Local."""
        file, self._file = self._file, None
        file.close()

    def abandon(self) -> None:
        """Give up what was written; nothing happens after ``seal``. Local."""
        file, self._file = self._file, None
        if file is None:
            return
        if isinstance(file, importlib.import_module("fsspec.spec").AbstractBufferedFile):
            file.discard()
            file.closed = True  # else it would be uploaded when it is collected
        else:
            file.close()


def remote_path(url: str) -> RemotePath:
    """Return what a URL names. Local.

    Raises:
        ImportError: fsspec, or its part for this kind of store, is not installed.
    """
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as exc:
        raise ImportError(f"{url}: needs fsspec; pip install shard-ckpt[fsspec]") from exc
    fs, key = core.url_to_fs(url)
    return RemotePath(fs, str(key))
