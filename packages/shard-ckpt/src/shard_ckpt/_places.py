"""Folders of checkpoints: of this system, or behind a URL."""

from __future__ import annotations

import os
from pathlib import Path

from shard_ckpt import _posix
from shard_ckpt._remote import RemotePath, remote_path

Place = Path | RemotePath


def place_of(path: str | os.PathLike[str] | RemotePath) -> Place:
    """Return a path of this system, or what a URL such as ``s3://bucket/run`` names. Local.

    Raises:
        ImportError: a URL, and fsspec or its part for this kind of store is not installed.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    return remote_path(text) if "://" in text else Path(text)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that stays the same when the process changes its folder; URLs do. Local."""
    text = os.fspath(path)
    return text if "://" in text else os.fspath(Path(text).absolute())


def names_in(place: Place) -> list[str]:
    """Return the names in a folder, sorted. Local.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    return place.names() if isinstance(place, RemotePath) else sorted(os.listdir(place))


def sync_folder(place: Place) -> None:
    """Return when a folder's entries are durable; stores need no asking. Local."""
    if not isinstance(place, RemotePath):
        _posix.sync_folder(place)


def size_of(place: Place) -> int | None:
    """Return a file's size in bytes; None where there is no such file. Local."""
    try:
        if isinstance(place, RemotePath):
            place.fs.invalidate_cache()
            return int(place.fs.info(place.key)["size"])
        return os.stat(place).st_size
    except FileNotFoundError:
        return None
