"""Putting a lost index back."""

from __future__ import annotations

import hashlib
import os

from shard_ckpt import _posix
from shard_ckpt._blocks import write_file
from shard_ckpt._errors import CheckpointError
from shard_ckpt._index import INDEX_NAME, encode_index
from shard_ckpt._marker import (
    MARKER_NAME,
    Marker,
    encode_marker,
    is_save_id,
    marker_for,
    read_marker,
)
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._rebuild import rebuild_index
from shard_ckpt._remote import RemotePath

_NEW = ".new"


def reindex(path: str | os.PathLike[str], *, commit: bool = False) -> bool:
    """Make ``index.json`` again, where it is lost or damaged, from the other files.

    All files must be from one save, their ranges must cover every element of every tensor once,
    and they must hold exactly the tensors that the stored structure names. Where the marker is
    there, the index must come out with the hash that it has, so it is the one that was written.
    Checksums are computed anew: they hold for the files as they are now.

    Args:
        path: the folder of a checkpoint, or its URL.
        commit: write the marker too, where it is lost as well. Without a marker nobody knows that
            the save ever finished; the files are whole, but may be older than they should.

    Returns:
        Whether anything was written: False for a checkpoint whose marker and index are intact.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: files are missing, damaged or of several saves, elements are missing, the
            marker does not fit, or is lost without ``commit``.
        OSError: reading or writing failed.

    **Collective**: local; reads the whole checkpoint.
    **Memory**: 16 MiB.
    """
    folder = place_of(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such checkpoint")
    marker = read_marker(folder) if (folder / MARKER_NAME).exists() else None
    if marker is None and not commit:
        raise CheckpointError(
            f"{folder}: no {MARKER_NAME} marker, so it may never have been finished; pass commit "
            f"to take what is there as a checkpoint"
        )
    home = _home(folder, marker)
    old = home / INDEX_NAME
    if _intact(old, marker):
        return False
    index = rebuild_index(home)
    encoded = encode_index(index)
    if marker is not None and marker_for(index, encoded) != marker:
        raise CheckpointError(
            f"{folder / MARKER_NAME}: expected {marker_for(index, encoded)} from the files, got "
            f"{marker}; a file was altered, added or removed"
        )
    _replace(old, encoded)
    if marker is None:
        _replace(folder / MARKER_NAME, encode_marker(marker_for(index, encoded)))
    return True


def _home(folder: Place, marker: Marker | None) -> Place:
    """Return where the files lie: beside the marker, or below it in a folder called by the save."""
    found = [name for name in names_in(folder) if is_save_id(name)]
    if marker is not None:
        return folder / marker.save_id if marker.save_id in found else folder
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: holds files of {len(found)} saves, {' and '.join(found)}, and no marker "
            f"says which counts; remove the others"
        )
    return folder / found[0] if found else folder


def _intact(path: Place, marker: Marker | None) -> bool:
    if marker is None:
        return False
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return False
    return hashlib.sha256(raw).hexdigest() == marker.index_sha256


def _replace(path: Place, data: bytes) -> None:
    if isinstance(path, RemotePath):
        path.put(data)
        return
    new = path.with_name(f".{path.name}{_NEW}")
    new.unlink(missing_ok=True)
    write_file(new, data)
    _posix.rename(new, path)
    _posix.sync_folder(path.parent)
