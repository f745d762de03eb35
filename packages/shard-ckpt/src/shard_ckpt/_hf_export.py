"""Writing a checkpoint's model as Hugging Face files, block by block."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from shard_ckpt import _posix
from shard_ckpt._agree import agree, attempt, check_same_save
from shard_ckpt._check import Source, open_source
from shard_ckpt._draft import Draft, draft_path, sweep
from shard_ckpt._hf_copy import copy_blocks, start_file
from shard_ckpt._hf_folder import HF_STEM, INDEX_SUFFIX, SUFFIX, encode_weight_map
from shard_ckpt._hf_layout import (
    OutFile,
    choose_items,
    doubles,
    lay_out_files,
    parse_size,
    weight_map,
)
from shard_ckpt._hf_stream import Uploads
from shard_ckpt._log import logger
from shard_ckpt._naming import Naming
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._remote import RemotePath
from shard_comm import Comm, comm_for

_DRAFT_STEM = "export"


@dataclass(frozen=True)
class _Prepared:
    source: Source
    files: Sequence[OutFile]
    draft: Draft | None
    export_id: str

    def ids(self) -> tuple[str, str]:
        """Return which checkpoint this rank sees, and what rank 0 calls the export."""
        return self.source.index.save_id, self.export_id


def export_hf(
    ckpt: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    max_shard_size: str | int = "5GB",
    comm: Comm | None = None,
    section: str = "model",
    names: Naming | None = None,
    cast: torch.dtype | None = None,
    durable: bool = True,
) -> tuple[str, ...]:
    """Write a section of a committed checkpoint as safetensors files for ``from_pretrained``.

    Needs the checkpoint alone, not the model's code, and runs on any number of ranks. The files'
    headers and sizes follow from the index, so rank 0 makes them whole at first; then each rank
    reads its share of the checkpoint's 16 MiB blocks, writes what they hold where it belongs, and
    compares their checksums. The files get their names last.

    Args:
        ckpt: a folder that ``save`` made, or its URL.
        path: the folder for the files, or its URL. It may exist, but must hold no safetensors
            files. In object stores each file is written by one rank, so many go faster than one.
        max_shard_size: bytes of tensors per file, ``"5GB"`` or ``"5GiB"`` say. One file is
            ``model.safetensors``; several come with ``model.safetensors.index.json``.
        comm: the ranks that share the work; by default those of the process group.
        section: which of the checkpoint's sections.
        names: how the checkpoint's names become those in the files, and which tied ones to leave
            out. Tied tensors that are not declared are written under each name.
        cast: what floating-point tensors become; by default they stay as stored.
        durable: return only when the files would outlast a loss of power, which takes as long as
            the disk does. Without, the system writes them out when it likes, as after a copy; the
            checkpoint is there to make them again.

    Returns:
        The names of the files, the index last.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        CheckpointError: it is not a whole, unaltered checkpoint.
        FileExistsError: ``path`` holds safetensors files.
        ValueError: names, ties, section, size or dtype do not fit the checkpoint.
        OSError: reading or writing failed. Any error of one rank is raised on all, and no file
            is left.

    **Collective**: all ranks of ``comm``; three exchanges of small objects, no tensors.
    **Memory**: 4 MiB for each of up to four threads per rank, and what comes of it where tensors
    are cast.
    """
    comm = comm_for(comm)
    target = attempt(lambda: place_of(path))
    with ExitStack() as stack:

        def prepare() -> _Prepared:
            source = open_source(ckpt)
            items = choose_items(source.index, section=section, names=names or Naming(), cast=cast)
            files = lay_out_files(items, max_bytes=parse_size(max_shard_size))
            folder = target.value()
            if comm.rank != 0:
                return _Prepared(source, files, None, "")
            return _prepare_files(source, files, folder, stack, durable=durable)

        prepared = attempt(prepare)
        heard = agree(
            comm,
            prepared,
            share=lambda p: (p.source.index.save_id, p.export_id),
            timeout_s=None,
        )
        mine, folder = prepared.value(), target.value()
        check_same_save([save_id for save_id, _ in heard], f"{ckpt}", purpose="export")
        if isinstance(folder, RemotePath):
            return _upload(mine, folder, comm)
        place = draft_path(folder / _DRAFT_STEM, heard[0][1])
        written = attempt(
            lambda: copy_blocks(mine.source, mine.files, place, comm=comm, durable=durable)
        )
        agree(comm, written, share=lambda _: None, timeout_s=None)
        published = attempt(lambda: _publish(mine, folder, durable=durable))
        return agree(comm, published, share=lambda made: made, timeout_s=None)[0]


def _upload(mine: _Prepared, folder: RemotePath, comm: Comm) -> tuple[str, ...]:
    """Write this rank's files, each from its beginning to its end; the index comes last."""
    own = mine.files[comm.rank :: comm.size]
    made, encoded = _index_of(mine.files)
    with Uploads(folder) as uploads:

        def publish() -> None:
            if comm.rank == 0 and encoded is not None:
                uploads.put(made[-1], encoded)

        for work in (lambda: uploads.write(mine.source, own), publish):
            agree(comm, attempt(work), share=lambda _: None, timeout_s=None)
        uploads.keep()
    return made


def _prepare_files(
    source: Source, files: Sequence[OutFile], folder: Place, stack: ExitStack, *, durable: bool
) -> _Prepared:
    if folder.is_dir():
        if not isinstance(folder, RemotePath):
            sweep(folder)
        for name in names_in(folder):
            if name.endswith((SUFFIX, INDEX_SUFFIX)):
                text = "in the way; remove the model or choose another folder"
                raise FileExistsError(errno.EEXIST, text, str(folder / name))
    for owner, other in doubles([item for file in files for item in file.items]):
        logger.warning(
            "%s and %s are one tensor in the checkpoint and are both written; declare a tie to "
            "leave one out",
            owner,
            other,
        )
    export_id = uuid.uuid4().hex
    if isinstance(folder, RemotePath):
        return _Prepared(source, files, None, export_id)
    draft = stack.enter_context(Draft(folder / _DRAFT_STEM, export_id))
    for file in files:
        path = draft.path / file.name
        start_file(path, file.header, nbytes=file.nbytes, durable=durable)
    return _Prepared(source, files, draft, export_id)


def _index_of(files: Sequence[OutFile]) -> tuple[tuple[str, ...], bytes | None]:
    """Return the names of an export's files, and what its index says where it needs one."""
    made = tuple(file.name for file in files)
    if len(made) == 1:
        return made, None
    items = [item for file in files for item in file.items]
    encoded = encode_weight_map(
        weight_map(files),
        nbytes=sum(item.nbytes for item in items),
        numel=sum(item.record.numel for item in items),
    )
    return (*made, f"{HF_STEM}{INDEX_SUFFIX}"), encoded


def _publish(mine: _Prepared, folder: Path, *, durable: bool) -> tuple[str, ...]:
    made, encoded = _index_of(mine.files)
    if mine.draft is None:
        return made
    if encoded is not None:
        path = mine.draft.path / made[-1]
        start_file(path, encoded, nbytes=len(encoded), durable=durable)
    placed: list[Path] = []
    try:
        for name in made:
            if os.path.lexists(folder / name):
                text = "made by somebody else in the meantime"
                raise FileExistsError(errno.EEXIST, text, str(folder / name))
            _posix.rename(mine.draft.path / name, folder / name)
            placed.append(folder / name)
        if durable:
            _posix.sync_folder(folder)
    except OSError:
        for path in placed:
            path.unlink(missing_ok=True)
        raise
    return made
