"""Saving a state from all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shard_ckpt._agree import attempt, check_comm
from shard_ckpt._commit import commit, prepare
from shard_ckpt._naming import Rename
from shard_comm import Comm


def save(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    comm: Comm,
    rename: Rename | None = None,
    timeout_s: float | None = None,
) -> None:
    """Save a state so that any number of ranks can load it.

    Args:
        state: sections, such as ``{"model": ..., "optim": ..., "step": 7}``. A section is a nested
            mapping (lists too) of tensors, ``ShardTensor``, numbers, strings, bytes and None.
            Plain tensors are taken to be the same on every rank, each is written once; of the
            other values rank 0's are stored, unless wrapped in ``PerRank``. The same names, dtypes
            and shapes on every rank.
        path: the folder to make. It must not exist; folders above it are made.
        comm: the ranks that hold the state.
        rename: what to call tensors in the checkpoint where not as in the state: a mapping, a
            function, or a ``Naming`` of wrappers and ties, as for ``load``.
        timeout_s: how long a rank waits for the slowest one, at each of three exchanges; the
            comm's own timeout by default.

    Raises:
        ValueError: two tensors share a name, a name cannot be used, tensors that are declared to be
            one are not, or the ranks differ in what they hold.
        TypeError: something that cannot be stored.
        FileExistsError: ``path`` exists.
        OSError: a rank could not write. Any error of one rank is raised on all, and nothing is
            left at ``path``.

    **Collective**: all ranks of ``comm``; three exchanges of small objects, no tensors.
    **Memory**: none that grows with the state; a copy of one tensor at a time where tensors are
    not contiguous; 32 MiB of pinned memory per device other than the CPU.
    """
    check_comm(comm)
    prepared = attempt(lambda: prepare(state, comm=comm, rename=rename))
    commit(prepared, path, comm=comm, timeout_s=timeout_s)
