"""The protocol of a save: every rank writes its part, one rank publishes the whole."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from shard_ckpt._agree import Outcome, agree, attempt
from shard_ckpt._behind import Behind
from shard_ckpt._collector import collector_paused
from shard_ckpt._draft import Draft, draft_path
from shard_ckpt._errors import CheckpointError
from shard_ckpt._extras import encode_extras, write_extras
from shard_ckpt._files import Origin, lay_out, write_section
from shard_ckpt._grains import FileRecord
from shard_ckpt._index import Index, Range, TensorRecord, check_coverage, link_ties
from shard_ckpt._leaf import Leaf
from shard_ckpt._log import logger
from shard_ckpt._naming import Naming, Rename
from shard_ckpt._places import Place, place_of, size_of, sync_folder
from shard_ckpt._plan import Holdings, digest_of, group_leaves, plan_entries, shares_of
from shard_ckpt._remote import RemotePath
from shard_ckpt._remote_draft import RemoteDraft, draft_for
from shard_ckpt._state import flatten
from shard_ckpt._ties import declare_ties
from shard_comm import Comm


@dataclass(frozen=True)
class Prepared:
    """A state that is ready to be written.

    Attributes:
        leaves: its tensors, sorted by section and name.
        holdings: the same, with those that share memory brought together.
        extras: what this rank stores besides tensors.
        per_rank: where per-rank values stand.
    """

    leaves: Sequence[Leaf]
    holdings: Holdings
    extras: Mapping[str, Any] | None
    per_rank: tuple[str, ...]

    def rows(self) -> list[list[Any]]:
        """Return what must be the same on all ranks, one row per tensor or per-rank value."""
        ties = self.holdings.ties
        rows: list[list[Any]] = [
            [
                leaf.label,
                leaf.dtype,
                leaf.shape,
                leaf.shards,
                [tie.label for tie in ties.get(leaf.id, ()) if tie.shards is None],
            ]
            for leaf in self.leaves
        ]
        return rows + [[f"state{path}", "per rank"] for path in self.per_rank]


@dataclass(frozen=True)
class _Opened:
    prepared: Prepared
    path: str
    draft: Draft | RemoteDraft | None
    save_id: str


@dataclass(frozen=True)
class _Hello:
    save_id: str
    path: str
    structure: str
    held: Mapping[int, str]


@dataclass(frozen=True)
class Manifest:
    """What a rank wrote.

    Attributes:
        files: in the order in which it wrote them.
        ranges: number of the tensor among all, sorted by section and name, and where elements of it
            lie; a range's file counts this rank's files.
    """

    files: tuple[FileRecord, ...]
    ranges: tuple[tuple[int, Range], ...]


@collector_paused()
def prepare(state: Mapping[str, Any], *, comm: Comm, rename: Rename | None = None) -> Prepared:
    """Take a state apart and check all that one rank can check. Local.

    Raises:
        ValueError: two tensors share a name, a name cannot be used, pieces are missing, or tensors
            that are declared to be one are not.
        TypeError: something that cannot be stored.
    """
    flat = flatten(state, rename=rename)
    if isinstance(rename, Naming):
        flat = declare_ties(flat, rename.ties)
    for leaf in flat.leaves:
        if leaf.shards is not None and leaf.shards > comm.size:
            raise ValueError(
                f"{leaf.label}: cut over {leaf.shards} ranks, but saved by {comm.size}; pass a "
                f"comm of all ranks that hold pieces"
            )
    return Prepared(
        flat.leaves,
        group_leaves(flat.leaves),
        encode_extras(flat, comm.rank),
        tuple(where for where, _ in flat.per_rank),
    )


def commit(
    prepared: Outcome[Prepared],
    path: str | os.PathLike[str],
    *,
    comm: Comm,
    timeout_s: float | None,
) -> None:
    """Write and publish what every rank has prepared, or raise on all what went wrong on one.

    Args:
        prepared: what ``prepare`` came to on this rank, an error too.
        path: the folder to make.
        comm: the ranks.
        timeout_s: how long a rank waits for the slowest one, at each of three exchanges.

    **Collective**: all ranks of ``comm``.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        opened = attempt(lambda: _open_draft(prepared.value(), path, comm, stack))
        hellos = agree(comm, opened, share=_hello, timeout_s=timeout_s)
        mine = opened.value()
        _check_alike(comm, mine.prepared, hellos, timeout_s)

        written = attempt(lambda: _write_own(mine.prepared, path, hellos, comm))
        manifests = agree(comm, written, share=lambda manifest: manifest, timeout_s=timeout_s)

        published = attempt(lambda: _publish(mine, manifests))
        nbytes = agree(comm, published, share=lambda total: total, timeout_s=timeout_s)[0]
    if comm.rank == 0:
        logger.info("%s: saved %d bytes in %.2f s", path, nbytes, time.monotonic() - started)


def _open_draft(
    prepared: Prepared, path: str | os.PathLike[str], comm: Comm, stack: ExitStack
) -> _Opened:
    text = os.fspath(path)
    if comm.rank != 0:
        return _Opened(prepared, text, None, "")
    save_id = uuid.uuid4().hex
    draft = draft_for(place_of(path), save_id)
    stack.enter_context(draft)
    return _Opened(prepared, text, draft, save_id)


@collector_paused()
def _hello(opened: _Opened) -> _Hello:
    prepared = opened.prepared
    structure = digest_of(prepared.rows())
    return _Hello(opened.save_id, opened.path, structure, prepared.holdings.digests())


def _check_alike(
    comm: Comm, mine: Prepared, hellos: Sequence[_Hello], timeout_s: float | None
) -> None:
    """Raise on all ranks if any differs from rank 0; only then are names exchanged."""
    for rank, hello in enumerate(hellos):
        if hello.path != hellos[0].path:
            raise ValueError(
                f"path: rank 0 saves to {hellos[0].path!r}, rank {rank} of {comm.size} to "
                f"{hello.path!r}; pass the same path on all ranks"
            )
    if all(hello.structure == hellos[0].structure for hello in hellos):
        return
    rows = comm.all_gather_object(mine.rows(), timeout_s=timeout_s)
    for rank, theirs in enumerate(rows):
        expected = {row[0]: row[1:] for row in rows[0]}
        got = {row[0]: row[1:] for row in theirs}
        for name in sorted(expected.keys() | got.keys()):
            if expected.get(name) != got.get(name):
                raise ValueError(
                    f"{name}: expected {expected.get(name, 'nothing')} as on rank 0, got "
                    f"{got.get(name, 'nothing')} (rank {rank} of {comm.size}); all ranks must save "
                    f"the same names, dtypes and shapes"
                )
        for row, other in zip(rows[0], theirs, strict=True):
            if row != other:
                raise ValueError(
                    f"{row[0]}: rank {rank} of {comm.size} has {other[0]} in its place; all ranks "
                    f"must hold their per-rank values in the same order"
                )
    raise AssertionError("ranks differ in structure, yet in no row")


def _write_own(
    mine: Prepared, path: str | os.PathLike[str], hellos: Sequence[_Hello], comm: Comm
) -> Manifest:
    folder = _folder_of(path, hellos[0].save_id)
    origin = Origin(hellos[0].save_id, comm.rank, comm.size)
    shares = shares_of([hello.held for hello in hellos], comm.rank)
    with collector_paused():
        numbers = {leaf.id: number for number, leaf in enumerate(mine.leaves)}
        entries = plan_entries(mine.holdings, rank=comm.rank, world_size=comm.size, shares=shares)
        layouts = lay_out(entries, origin)
    written: list[Behind[FileRecord]] = []
    ranges: list[tuple[int, Range]] = []
    try:
        for layout in layouts:
            ranges.extend((numbers[tensor], part) for tensor, part in layout.ranges(len(written)))
            written.append(write_section(folder, layout))
        files = [file.result() for file in written]
    finally:
        for file in written:
            file.join()
    if mine.extras is not None:
        files.append(write_extras(folder, mine.extras, origin=origin))
    if files:
        sync_folder(folder)
    return Manifest(tuple(files), tuple(ranges))


def _folder_of(path: str | os.PathLike[str], save_id: str) -> Place:
    """Return where the ranks write."""
    target = place_of(path)
    return target / save_id if isinstance(target, RemotePath) else draft_path(target, save_id)


def _publish(mine: _Opened, manifests: Sequence[Manifest]) -> int:
    if mine.draft is None:
        return 0
    index = build_index(mine.prepared.leaves, mine.save_id, manifests=manifests)
    for file in index.files:
        found = size_of(mine.draft.path / file.name)
        if found != file.nbytes:
            raise CheckpointError(
                f"{file.name}: a rank wrote {file.nbytes} bytes, but rank 0 sees "
                f"{'none' if found is None else found}; save to a folder that all ranks share"
            )
    mine.draft.publish(index)
    return index.nbytes


@collector_paused()
def build_index(leaves: Sequence[Leaf], save_id: str, *, manifests: Sequence[Manifest]) -> Index:
    """Put together what the ranks wrote. Local.

    Args:
        leaves: sorted by section and name.
        save_id: which save this is.
        manifests: of every rank.

    Raises:
        ValueError: elements are missing or were written twice.
    """
    files: list[FileRecord] = []
    ranges: list[list[Range]] = [[] for _ in leaves]
    for manifest in manifests:
        for number, part in manifest.ranges:
            ranges[number].append(part._replace(file=part.file + len(files)))
        files.extend(manifest.files)
    records = [
        TensorRecord(leaf.section, leaf.name, leaf.dtype, leaf.shape, tuple(sorted(parts)))
        for leaf, parts in zip(leaves, ranges, strict=True)
    ]
    for record in records:
        try:
            check_coverage(record)
        except CheckpointError as exc:
            raise ValueError(f"{exc}; save with a comm of all ranks that hold pieces") from exc
    return Index(save_id, len(manifests), link_ties(records), tuple(files))
