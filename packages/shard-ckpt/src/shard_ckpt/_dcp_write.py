"""Checkpoints written as torch.distributed.checkpoint folders, a tensor at a time."""

from __future__ import annotations

import errno
import os
import uuid
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shard_ckpt import _posix
from shard_ckpt._draft import Draft, sweep
from shard_ckpt._errors import CheckpointError
from shard_ckpt._lazy import LazyTensors
from shard_ckpt._places import Place
from shard_ckpt._progress import Progress
from shard_ckpt._remote import RemotePath


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when it is about to be written."""

    def __init__(self, lazy: LazyTensors, progress: Progress) -> None:
        super().__init__()
        self._lazy = lazy
        self._progress = progress

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        if not isinstance(found, torch.Tensor):
            return super().lookup_object(index)
        tensor = self._lazy.read(found)
        self._progress.advance(tensor.nbytes)
        return tensor


def write_dcp(state: Mapping[str, Any], path: Place, *, lazy: LazyTensors) -> None:
    """Write a state with stand-ins; the folder gets its name last, a store ``.metadata``. Local.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: writing failed; nothing is left at ``path``.

    **Memory**: one tensor at a time.
    """
    if isinstance(path, RemotePath):
        _upload(state, path, lazy)
        return
    sweep(path.parent)
    with Draft(path, uuid.uuid4().hex) as draft:
        writer = FileSystemWriter(draft.path, single_file_per_rank=True, sync_files=True)
        _write(state, writer, lazy)
        _posix.sync_folder(draft.path)
        if os.path.lexists(path):
            raise FileExistsError(f"{path}: made by somebody else in the meantime")
        _posix.rename(draft.path, path)
        _posix.sync_folder(path.parent)


def _upload(state: Mapping[str, Any], path: RemotePath, lazy: LazyTensors) -> None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter  # imports fsspec

    if path.exists():
        raise FileExistsError(errno.EEXIST, "never replaced; choose another path", str(path))
    try:
        _write(state, FsspecWriter(str(path), sync_files=False, overwrite=False), lazy)
    except BaseException:
        if path.exists():
            path.remove()
        raise


def _write(state: Mapping[str, Any], writer: FileSystemWriter, lazy: LazyTensors) -> None:
    planner = _LazyPlanner(lazy, Progress(sum(tensor.nbytes for tensor in _tensors(state))))
    with warnings.catch_warnings():  # one process is what is meant here
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save_dcp(dict(state), storage_writer=writer, planner=planner, no_dist=True)
        except CheckpointException as exc:  # not an Exception, and says nothing of its cause
            raise _cause_of(exc) from exc


def _cause_of(exc: CheckpointException) -> Exception:
    causes = [cause for cause, _ in exc.failures.values()]
    for cause in causes:
        if isinstance(cause, (OSError, CheckpointError, ValueError, TypeError)):
            return cause
    return OSError(f"torch.distributed.checkpoint could not write it: {causes}")


def _tensors(node: Any) -> list[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    if isinstance(node, Mapping):
        return [tensor for item in node.values() for tensor in _tensors(item)]
    if type(node) in (list, tuple):
        return [tensor for item in node for tensor in _tensors(item)]
    return []
