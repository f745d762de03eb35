"""Checkpoints under way in object stores: nobody sees them before their marker is there."""

from __future__ import annotations

import errno
from types import TracebackType

from shard_ckpt._blocks import write_file
from shard_ckpt._draft import Draft, sweep
from shard_ckpt._index import INDEX_NAME, Index, encode_index
from shard_ckpt._log import logger
from shard_ckpt._marker import MARKER_NAME, encode_marker, is_save_id, marker_for
from shard_ckpt._places import Place
from shard_ckpt._remote import RemotePath


class RemoteDraft:
    """The keys of one save, ``<target>/<save id>/...``; one rank makes and publishes them.

    A rename would copy everything, so files stay where they were written, and the marker
    ``<target>/COMMITTED`` says by its id which save counts. Use as a context manager: keys of a
    draft that was not published are removed on the way out. Those of a process that died stay
    until the same target is saved again or discarded, as no lock tells them from a live one's.

    Args:
        target: what the checkpoint will be called.
        save_id: 32 hex digits.

    Raises:
        FileExistsError: the target has a marker.
    """

    def __init__(self, target: RemotePath, save_id: str) -> None:
        self.path = target / save_id
        self._target = target
        self._published = False
        if (target / MARKER_NAME).exists():
            raise _taken(target)
        self.path.make_folder()

    def publish(self, index: Index) -> None:
        """Write the index, then the marker. Local.

        Raises:
            OSError: a step failed or the target has a marker by now; nothing is published.
        """
        encoded = encode_index(index)
        write_file(self.path / INDEX_NAME, encoded)
        try:
            (self._target / MARKER_NAME).create(encode_marker(marker_for(index, encoded)))
        except FileExistsError as exc:
            raise _taken(self._target) from exc
        self._published = True
        for name in self._target.names():
            if is_save_id(name) and name != self.path.name:  # can never be published any more
                remove_keys(self._target / name)

    def __enter__(self) -> RemoteDraft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._published:
            remove_keys(self.path)


def draft_for(target: Place, save_id: str) -> Draft | RemoteDraft:
    """Return where a save builds its checkpoint, once what dead ones left beside it is gone. Local.

    Raises:
        FileExistsError: the target exists.
        OSError: the folder cannot be made.
    """
    if isinstance(target, RemotePath):
        return RemoteDraft(target, save_id)
    sweep(target.parent)
    return Draft(target, save_id)


def discard_remote(target: RemotePath) -> None:
    """Take a checkpoint back: first the marker, then the data. Local.

    Raises:
        OSError: the marker could not be removed.
    """
    (target / MARKER_NAME).remove()
    remove_keys(target)


def remove_keys(path: RemotePath) -> None:
    """Remove keys that nothing refers to any more; what cannot be removed is logged."""
    try:
        path.remove()
    except FileNotFoundError:
        return
    except OSError as exc:
        logger.warning("%s: could not be removed (%s)", path, exc)


def _taken(target: RemotePath) -> FileExistsError:
    text = "a checkpoint is never replaced; choose another path or remove it"
    return FileExistsError(errno.EEXIST, text, str(target))
