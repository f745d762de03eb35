"""The marker: the last file of a checkpoint, without which nothing else counts."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from shard_ckpt._errors import CheckpointError
from shard_ckpt._index import FORMAT_VERSION, INDEX_NAME, Index, check_version, parse_index
from shard_ckpt._json import canonical_json, is_count, strict_loads
from shard_ckpt._places import Place, names_in

MARKER_NAME = "COMMITTED"
DCP_METADATA = ".metadata"
"""The marker of torch.distributed.checkpoint."""

_SAVE_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Marker:
    """What ``COMMITTED`` says.

    Attributes:
        save_id: which save made the checkpoint.
        world_size: how many ranks wrote it.
        index_sha256: of the bytes of ``index.json``, in hex.
        files: number of data files.
        nbytes: their bytes in all.
    """

    save_id: str
    world_size: int
    index_sha256: str
    files: int
    nbytes: int


def marker_for(index: Index, encoded: bytes) -> Marker:
    """Return the marker of a checkpoint with this index. Local."""
    sha = hashlib.sha256(encoded).hexdigest()
    return Marker(index.save_id, index.world_size, sha, len(index.files), index.nbytes)


def encode_marker(marker: Marker) -> bytes:
    """Return the bytes of ``COMMITTED``. Local."""
    return canonical_json(
        {
            "version": FORMAT_VERSION,
            "save_id": marker.save_id,
            "world_size": marker.world_size,
            "index_sha256": marker.index_sha256,
            "files": marker.files,
            "bytes": marker.nbytes,
        }
    )


def read_marker(folder: Place) -> Marker:
    """Read the marker of a checkpoint. Local.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it has no marker, or one that is not as written.
    """
    path = folder / MARKER_NAME
    raw = _read(path)
    if raw is None:
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such checkpoint")
        names = names_in(folder)
        inside = [name for name in names if (folder / name / MARKER_NAME).exists()]
        hint = f"; it holds checkpoints: {', '.join(inside[-3:])}" if inside else ""
        if DCP_METADATA in names:
            hint = "; torch.distributed.checkpoint made it and reads it, or convert() it first"
        raise CheckpointError(
            f"{folder}: no {MARKER_NAME} marker, so it is not a finished checkpoint{hint}"
        )
    table = strict_loads(raw, label=str(path))
    check_version(table, str(path))
    try:
        marker = Marker(
            table["save_id"],
            table["world_size"],
            table["index_sha256"],
            table["files"],
            table["bytes"],
        )
    except KeyError as exc:
        raise CheckpointError(f"{path}: {exc} is missing") from exc
    texts, counts = (marker.save_id, marker.index_sha256), (marker.world_size, marker.files)
    if not all(isinstance(text, str) for text in texts) or not all(map(is_count, counts)):
        raise CheckpointError(f"{path}: a field is of the wrong type")
    if encode_marker(marker) != raw:
        raise CheckpointError(f"{path}: not as it was written")
    return marker


def read_index(folder: Place) -> Index:
    """Read a checkpoint's index and hold it against the marker. Local.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: marker or index are missing, altered or do not belong together.
    """
    return find_index(folder)[1]


def find_index(folder: Place) -> tuple[Place, Index]:
    """Read a checkpoint's index, and say in which folder it and the files lie. Local.

    That is the folder of the marker, or one below it that is called by the save's id, as object
    stores have it, also when such a checkpoint was copied elsewhere.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: marker or index are missing, altered or do not belong together.
    """
    marker = read_marker(folder)
    home, raw = folder, _read(folder / INDEX_NAME)
    if raw is None and is_save_id(marker.save_id):
        home = folder / marker.save_id
        raw = _read(home / INDEX_NAME)
    if raw is None:
        raise CheckpointError(f"{folder / INDEX_NAME}: missing, though {MARKER_NAME} names it")
    path = home / INDEX_NAME
    sha = hashlib.sha256(raw).hexdigest()
    if sha != marker.index_sha256:
        raise CheckpointError(
            f"{path}: altered: expected SHA-256 {marker.index_sha256} from {MARKER_NAME}, got {sha}"
        )
    index = parse_index(raw, label=str(path))
    if marker_for(index, raw) != marker:
        raise CheckpointError(
            f"{folder / MARKER_NAME}: expected {marker_for(index, raw)} from the index, got "
            f"{marker}"
        )
    return home, index


def is_save_id(name: str) -> bool:
    """Whether a name is the id of a save, 32 hex digits. Local."""
    return _SAVE_ID.fullmatch(name) is not None


def _read(path: Place) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
