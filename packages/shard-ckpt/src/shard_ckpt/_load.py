"""Loading: check everything on every rank, then fill."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_ckpt._agree import agree, attempt, check_comm, check_same_save
from shard_ckpt._check import (
    Source,
    check_grains,
    open_checked,
    open_source,
    strangers,
)
from shard_ckpt._collector import collector_paused
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import read_values
from shard_ckpt._fill import fill
from shard_ckpt._log import logger
from shard_ckpt._match import Target, match
from shard_ckpt._merge import merge, missing_values
from shard_ckpt._naming import Rename, stored_name
from shard_ckpt._rename import with_template_names
from shard_ckpt._shares import Needs, grains_of, own_grains
from shard_ckpt._state import flatten
from shard_ckpt._ties import Twins, check_twins, part_twins
from shard_comm import Comm


@dataclass(frozen=True)
class _Opened:
    source: Source
    targets: Sequence[Target]
    twins: Twins
    needs: Needs
    values: Mapping[str, Any]


@dataclass(frozen=True)
class _Wish:
    strict: bool
    cast: bool
    rename: Rename | None
    only: Sequence[str] | None


def load(
    state: Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    comm: Comm,
    strict: bool = True,
    cast: bool = False,
    rename: Rename | None = None,
    only: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Fill a state from a checkpoint that any number of ranks saved.

    ``state`` is the template: its tensors say what to read and where to put it, so they must
    exist. Give an optimizer its slots before asking it for the template, as
    ``shard_optim.AdamW.state_dict(allocate=True)`` does.

    Nothing is written into a tensor before all ranks have checked all they are going to read:
    marker, index, file sizes, headers, names, shapes, dtypes, coverage, and the checksum of every
    256 KiB that is touched. Each is checked by one of the ranks that need it, so checking costs
    one more pass over the checkpoint, divided among the ranks; the second pass mostly comes from
    the page cache.

    Args:
        state: sections as for ``save``. Tensors are filled in place: a ``ShardTensor`` with its
            range, a plain tensor whole. Other values are placeholders.
        path: a folder that ``save`` made, or its URL.
        comm: the ranks that load; need not be as many as saved.
        strict: the template and the checkpoint must have the same tensors, and the checkpoint all
            values of the template. Else what both have is loaded and the rest is logged.
        cast: convert between floating-point dtypes (and between complex ones). Integers, booleans
            and optimizer step counters are never converted.
        rename: where the checkpoint calls a tensor otherwise: a mapping from the template's names
            to the checkpoint's, a function that does it, or a ``Naming`` of wrappers and ties. It
            is given names without section, and of optimizer state the parameter's; what it does
            not change keeps its name. Optimizer state comes back under the template's names. With
            ``strict`` every name in a mapping must be the template's.
        only: load only tensors of the template of which ``section: name`` fits one of these
            patterns, such as ``["model: layers.0.*"]``; ``*``, ``?`` and ``[...]`` as in file
            names. Other tensors are left as they are, whatever the checkpoint has of them. Values
            that are not tensors come back all the same, where the checkpoint has them.
        timeout_s: how long a rank waits for the slowest one, at each of three exchanges; the
            comm's own timeout by default.

    Returns:
        The state as nested dicts: the template's tensors, and the checkpoint's other values,
        including those the template does not have. A ``PerRank`` value is this rank's if as many
        ranks load as saved, else ``RankValues``, the list of all ranks'.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: the folder is not a whole, unaltered checkpoint.
        ValueError: the template does not fit the checkpoint, or what is the same memory in the
            template has different bits in the checkpoint.
        TypeError: the template holds a tensor of a kind that cannot be filled.
        OSError: reading failed. Any error of one rank is raised on all. Tensors are untouched,
            unless reading failed, or files changed, after all checks had passed.

    **Collective**: all ranks of ``comm``; three exchanges of small objects, no tensors.
    **Memory**: 2 MiB while checking (32 MiB from object stores), then up to 32 MiB per device
    for tensors that are not read into directly (not on the CPU, or cast), and a copy of one tensor
    at a time where tensors are not contiguous.
    """
    check_comm(comm)
    wish = _Wish(strict, cast, rename, only)
    opened = attempt(lambda: _open(state, path, comm, wish))
    heard = agree(
        comm, opened, share=lambda o: (o.source.index.save_id, o.needs), timeout_s=timeout_s
    )
    mine = opened.value()
    check_same_save([save_id for save_id, _ in heard], f"{path}", purpose="load")
    grains = own_grains([needs for _, needs in heard], comm.rank)
    checked = attempt(lambda: _check(mine, grains))
    agree(comm, checked, share=lambda _: None, timeout_s=timeout_s)

    filled = attempt(lambda: fill(mine.source, mine.targets, exact=True))
    if filled.error is not None:
        logger.error("%s: reading failed after all checks; tensors are filled in part", path)
    agree(comm, filled, share=lambda _: None, timeout_s=timeout_s)
    with collector_paused():
        merged: dict[str, Any] = merge(state, mine.values)
    return merged


def _open(
    state: Mapping[str, Any], path: str | os.PathLike[str], comm: Comm, wish: _Wish
) -> _Opened:
    leaves = flatten(state).leaves
    source = open_source(path)
    folder = source.folder
    foreign = strangers(source) if comm.rank == 0 else []
    if foreign:
        raise CheckpointError(
            f"{folder / foreign[0]}: not in the index; remove it if it does not belong here"
        )
    targets = match(
        leaves,
        source.index,
        strict=wish.strict,
        cast=wish.cast,
        rename=wish.rename,
        only=wish.only,
    )
    stored = read_values(folder, source.index, rank=comm.rank, world_size=comm.size)
    values = stored
    if wish.rename is not None:
        names = [(target.leaf.name, target.record.name) for target in targets]
        names += [(leaf.name, stored_name(leaf.name, wish.rename)) for leaf in leaves]
        values = with_template_names(stored, names)
    if wish.strict and wish.only is None:
        missing = missing_values(state, values)
        if missing:
            raise ValueError(
                f"{missing[0]}: the checkpoint has no such value ({len(missing)} in all); pass "
                f"strict=False to keep the template's"
            )
    targets, twins = part_twins(targets)
    reading = [*targets, *(other for _, other in twins)]
    needs = grains_of(source, (read for target in reading for read in target.reads()))
    for file in needs:
        with open_checked(source, file):
            pass
    return _Opened(source, targets, twins, needs, values)


def _check(opened: _Opened, grains: Needs) -> None:
    check_grains(opened.source, grains)
    check_twins(opened.source, opened.twins)
