"""Files of this system, or behind a URL, opened for reading."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from shard_ckpt._blocks import Handle
from shard_ckpt._places import Place
from shard_ckpt._remote import RemoteFile, RemotePath


@contextmanager
def open_to_read(path: Place) -> Iterator[tuple[Handle, int]]:
    """Open a file and say how many bytes it has. Local.

    Raises:
        FileNotFoundError: there is none.
    """
    if isinstance(path, RemotePath):
        file = RemoteFile(path)
        yield file, file.nbytes
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)
