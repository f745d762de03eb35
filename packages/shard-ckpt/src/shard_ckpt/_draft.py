"""Folders under way: made beside the target, locked while alive, published by one rename."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path
from types import TracebackType

from shard_ckpt import _posix
from shard_ckpt._blocks import write_file
from shard_ckpt._index import INDEX_NAME, Index, encode_index
from shard_ckpt._log import logger
from shard_ckpt._marker import MARKER_NAME, encode_marker, marker_for

_DRAFT = re.compile(r"(?P<folder>\.tmp-.+-[0-9a-f]{32})(\.lock)?", re.DOTALL)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


def draft_path(target: Path, save_id: str) -> Path:
    """Return the sibling of ``target`` in which a save builds it. Local."""
    return target.parent / f".tmp-{target.name}-{save_id}"


def is_draft(name: str) -> bool:
    """Whether a file or folder of this name belongs to a save under way, or dead. Local."""
    return _DRAFT.fullmatch(name) is not None


class Draft:
    """The folder in which one save builds its checkpoint; one rank makes and publishes it.

    A sibling file ``.tmp-<name>-<save id>.lock`` is held with ``flock`` for as long as the process
    lives, so that a later save can tell a dead folder from a live one. Use as a context manager:
    a draft that was not published is removed on the way out.

    Args:
        target: what the folder will be called.
        save_id: 32 hex digits.

    Raises:
        FileExistsError: the target exists.
        OSError: the folder cannot be made.
    """

    def __init__(self, target: Path, save_id: str) -> None:
        self.path = draft_path(target, save_id)
        self._target = target
        if os.path.lexists(target):
            raise _taken(target)
        _make_parents(target.parent)
        self._lock_path = _lock_of(self.path)
        self._lock: int | None = _hold_lock(self._lock_path)
        try:
            _posix.make_folder(self.path)
        except OSError:
            self._release()
            raise

    def publish(self, index: Index) -> None:
        """Write index and marker, then give the folder its name. Local.

        Raises:
            OSError: a step failed or the target exists; nothing is published.
        """
        encoded = encode_index(index)
        write_file(self.path / INDEX_NAME, encoded)
        write_file(self.path / MARKER_NAME, encode_marker(marker_for(index, encoded)))
        _posix.sync_folder(self.path)
        if os.path.lexists(self._target):
            raise _taken(self._target)
        _posix.rename(self.path, self._target)
        try:
            _posix.sync_folder(self._target.parent)
        except OSError:
            _take_back(self._target)
            raise
        self._release()

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.path.exists():
            _remove_tree(self.path)
        self._release()

    def _release(self) -> None:
        """Remove the lock file after the folder, so that a folder without one is dead."""
        if self._lock is not None:
            _remove_file(self._lock_path)
            os.close(self._lock)
            self._lock = None


def discard(folder: Path) -> None:
    """Take a checkpoint back: first the marker, then the name, then the data. Local.

    Of a link only itself goes: where it leads may be somebody else's.

    Raises:
        OSError: the marker or the name could not be removed.
    """
    if folder.is_symlink():
        _posix.unlink(folder)
        _posix.sync_folder(folder.parent)
        return
    _posix.unlink(folder / MARKER_NAME)
    _posix.sync_folder(folder)
    doomed = draft_path(folder, os.urandom(16).hex())
    _posix.rename(folder, doomed)
    _remove_tree(doomed)


def sweep(parent: Path) -> None:
    """Remove what dead saves and deletions left in a folder; live ones stay. Local."""
    try:
        names = sorted(os.listdir(parent))
    except FileNotFoundError:
        return
    matches = (_DRAFT.fullmatch(name) for name in names)
    for folder in sorted({match["folder"] for match in matches if match is not None}):
        _sweep_one(parent / folder)


def draft_is_live(path: Path) -> bool:
    """Whether some process is still building this folder, as far as locks can tell. Local."""
    try:
        fd = os.open(_lock_of(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def _sweep_one(path: Path) -> None:
    lock_path = _lock_of(path)
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = None  # the lock file is made before the folder and removed after it
    except OSError as exc:
        logger.warning("%s: left alone, its lock cannot be opened (%s)", path, exc)
        return
    try:
        if fd is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno != errno.EWOULDBLOCK:
            logger.warning("%s: left alone, cannot tell whether it is live (%s)", path, exc)
    else:
        logger.warning("%s: removed, left by a save or deletion that did not finish", path)
        _remove_tree(path)
        if fd is not None:
            _remove_file(lock_path)
    finally:
        if fd is not None:
            os.close(fd)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _hold_lock(path: Path) -> int:
    """Make a lock file and hold it; make it again where a sweep took it in between."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as exc:
            if exc.errno in _NO_LOCKS:
                logger.warning("%s: no file locks here, so dead saves are not swept", path)
                return fd
            os.close(fd)
            raise
        if _lies_at(fd, path):
            return fd
        os.close(fd)


def _lies_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _make_parents(folder: Path) -> None:
    """Make a folder and those above it, each durable in the one above."""
    if folder.is_dir():
        return
    _make_parents(folder.parent)
    try:
        _posix.make_folder(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise
    _posix.sync_folder(folder.parent)


def _take_back(target: Path) -> None:
    try:
        discard(target)
    except OSError as exc:
        logger.warning("%s: published, perhaps not durable, cannot be taken back (%s)", target, exc)


def _taken(target: Path) -> FileExistsError:
    text = "a checkpoint is never replaced; choose another path or remove it"
    return FileExistsError(errno.EEXIST, text, str(target))


def _remove_tree(path: Path) -> None:
    """Remove a folder that nothing refers to any more; what cannot be removed is logged."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except OSError as exc:
        logger.warning("%s: could not be removed (%s)", path, exc)


def _remove_file(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError as exc:
        logger.warning("%s: could not be removed (%s)", path, exc)
