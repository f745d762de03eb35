"""Saving while training goes on."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from shard_ckpt._agree import Outcome, attempt, check_comm
from shard_ckpt._commit import Prepared, commit, prepare
from shard_ckpt._log import logger
from shard_ckpt._naming import Rename
from shard_ckpt._places import absolute
from shard_ckpt._snapshot import Staging
from shard_comm import Comm, GroupComm, SoloComm


class SaveHandle:
    """A save under way; ``save_async`` makes it."""

    def __init__(self, path: str) -> None:
        self._fate = _Fate(path)
        self._error: BaseException | None = None
        self._finished = threading.Event()
        self._pid = os.getpid()
        weakref.finalize(self, _log_unseen, self._fate)  # once collected, at exit at the latest

    def done(self) -> bool:
        """Whether the save has ended, well or not. Local."""
        return self._finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the checkpoint is published.

        Args:
            timeout_s: how long to wait at most; by default as long as it takes, which the
                timeouts of the exchanges bound.

        Raises:
            Exception: the save's error, the same on every rank; again at every call.
            TimeoutError: the save is still under way.
            RuntimeError: the save belongs to the process that this one was forked from.

        **Collective**: local; the ranks agree in the background.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self._fate.path}: process {self._pid} saves this, not its child {os.getpid()}; "
                f"wait there"
            )
        if not self._finished.wait(timeout_s):
            raise TimeoutError(f"{self._fate.path}: still being saved after {timeout_s:g} s")
        self._fate.seen = True
        if self._error is not None:
            raise self._error

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._fate.error = None if error is None else str(error)
        self._finished.set()

    def _unseen_error(self) -> BaseException | None:
        """Wait; return an error that ``wait`` has raised nowhere yet, and count it as seen."""
        self._finished.wait()
        unseen = None if self._fate.seen else self._error
        self._fate.seen = True
        return unseen


class _Fate:
    """How a save ended, and whether somebody was told; leads back to no handle."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.error: str | None = None
        self.seen = False


class Saver:
    """Saves of one comm's ranks in the background, one after another.

    Exchanges in the background go through a comm of their own, made here, so they never meet the
    collectives of training. On accelerators it is a Gloo group: nothing is launched on the
    device. A save's thread ends with the save; the interpreter does not exit before it.

    Args:
        comm: the ranks that save.

    **Collective**: all ranks of ``comm`` make one together.
    **Memory**: a host copy of this rank's part of the state, from the first save on.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = _own_comm(comm)
        self._staging = Staging()
        self._last: SaveHandle | None = None
        self._pid = os.getpid()

    @property
    def is_usable(self) -> bool:
        """False in a forked child, which has neither threads nor peers. Local."""
        return os.getpid() == self._pid

    def start(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        rename: Rename | None = None,
        timeout_s: float | None = None,
        after: Callable[[], None] | None = None,
    ) -> SaveHandle:
        """Copy a state and save the copy in the background; see ``save_async``.

        Args:
            state: as for ``save``.
            path: the folder to make.
            rename: as for ``save``.
            timeout_s: as for ``save``.
            after: called in the background once the checkpoint is published.

        **Collective**: all ranks of the comm, in the same order; nothing is exchanged here.
        """
        started = time.monotonic()
        unseen = None if self._last is None else self._last._unseen_error()
        waited_s = time.monotonic() - started
        target = attempt(lambda: absolute(path))

        def copy() -> Prepared:
            target.value()  # raises what was wrong with the path
            return self._copy(state, rename, unseen)

        prepared = attempt(copy)
        handle = SaveHandle(str(path))
        job = (handle, prepared, target.result, timeout_s, after)
        # On an error too: the other ranks are about to wait for this one.
        threading.Thread(target=self._work, args=job, name="shard-ckpt-save").start()
        self._last = handle  # one without a thread would be waited for in vain
        if prepared.error is not None:
            handle._fate.seen = True
            raise prepared.error
        logger.info(
            "%s: copied in %.3f s, after %.3f s for the save before",
            path,
            time.monotonic() - started - waited_s,
            waited_s,
        )
        return handle

    def wait(self) -> None:
        """Return when the last save is published; raise its error. Local."""
        if self._last is not None:
            self._last.wait()

    def _copy(
        self, state: Mapping[str, Any], rename: Rename | None, unseen: BaseException | None
    ) -> Prepared:
        if unseen is not None:
            raise unseen
        prepared = prepare(state, comm=self._comm, rename=rename)
        return self._staging.copy(prepared, comm=self._comm)

    def _work(self, handle: SaveHandle, *job: Any) -> None:
        handle._end(self._error_of(*job))

    def _error_of(
        self,
        prepared: Outcome[Prepared],
        path: str,
        timeout_s: float | None,
        after: Callable[[], None] | None,
    ) -> BaseException | None:
        try:
            arrived = attempt(lambda: self._arrived(prepared))
            commit(arrived, path, comm=self._comm, timeout_s=timeout_s)
            if after is not None:
                after()
        except BaseException as exc:  # noqa: BLE001  # wait() raises it
            return exc
        return None

    def _arrived(self, prepared: Outcome[Prepared]) -> Prepared:
        result = prepared.value()
        self._staging.ready()
        return result


_savers: weakref.WeakKeyDictionary[Comm, Saver] = weakref.WeakKeyDictionary()
_savers_lock = threading.Lock()


def save_async(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    comm: Comm,
    rename: Rename | None = None,
    timeout_s: float | None = None,
) -> SaveHandle:
    """Save a state as it is now, while the caller goes on.

    What the rank will write is copied into host memory before the call returns, and stored from
    there: whatever is changed afterwards, tensors or values, does not reach the checkpoint. On
    CUDA the copies are launched, not waited for; work launched later on the streams that are
    current now comes after them. The memory is kept for the next save of the same comm.

    Call ``wait()`` on the handle before relying on the checkpoint, and before destroying the
    process group. An error that nobody waited for is raised by the next ``save_async`` of the
    comm, and logged when the handle is collected, at interpreter exit at the latest.
    The interpreter exits only once the save has ended.

    Args:
        state: as for ``save``.
        path: the folder to make, as for ``save``.
        comm: the ranks that hold the state. The first call splits it, once, so that exchanges in
            the background have a comm of their own.
        rename: as for ``save``.
        timeout_s: how long a rank waits for the slowest one, at each of three exchanges.

    Returns:
        A handle with ``done()`` and ``wait()``. Errors of any rank are raised there on all.

    Raises:
        ValueError: as for ``save``, where this rank can tell alone; the others raise it at
            ``wait()``.
        TypeError: likewise.
        Exception: the error of the save before this one, if nobody waited for it.

    **Collective**: all ranks of ``comm``, in the same order. It exchanges nothing but at the first
    call. A save that is still under way is waited for first.
    **Memory**: a host copy of what this rank writes: its own pieces, and its part of tensors that
    all ranks have. It lives as long as ``comm``.
    """
    check_comm(comm)
    return _saver_of(comm).start(state, path, rename=rename, timeout_s=timeout_s)


def _saver_of(comm: Comm) -> Saver:
    with _savers_lock:
        saver = _savers.get(comm)
    if saver is None or not saver.is_usable:
        saver = Saver(comm)  # collective, so not under the lock: ranks may be threads
        with _savers_lock:
            _savers[comm] = saver
    return saver


def _own_comm(comm: Comm) -> Comm:
    if comm.size == 1:
        return SoloComm()
    if isinstance(comm, GroupComm) and comm.device.type != "cpu":
        ranks = dist.get_process_group_ranks(comm.group)
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        return GroupComm(group, device="cpu", timeout_s=comm.timeout_s)
    return comm.split(0)


def _log_unseen(fate: _Fate) -> None:
    if fate.error is not None and not fate.seen:
        logger.error("%s: not saved, and nobody waited for it: %s", fate.path, fate.error)
