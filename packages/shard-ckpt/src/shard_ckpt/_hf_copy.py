"""Copying a checkpoint's blocks to where an export wants what they hold."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from shard_ckpt import _posix
from shard_ckpt._blocks import BLOCK_BYTES, Handle, block_range, read_exactly
from shard_ckpt._check import Source, altered, check_header, folding_for, open_checked
from shard_ckpt._errors import CheckpointError
from shard_ckpt._fold import Folding
from shard_ckpt._grains import grains_in
from shard_ckpt._hf_layout import Copy, OutFile, plan_copies
from shard_ckpt._memory import bytes_of
from shard_ckpt._progress import Progress
from shard_comm import Comm

_MAX_THREADS = 4
_WINDOW_BYTES = 2 << 20  # large writes cost less than leaving the nearest cache


def copy_blocks(
    source: Source, files: Sequence[OutFile], place: Path, *, comm: Comm, durable: bool
) -> None:
    """Check and copy this rank's share of the blocks that an export needs. Local.

    Args:
        source: the checkpoint.
        files: the export; each exists in ``place`` with its size.
        place: where they are under way.
        comm: the ranks that share the work: each does an equal run of ``order_blocks``.
        durable: return only when the bytes are durable.

    Raises:
        CheckpointError: a block or header is not as the index says.
        OSError: reading or writing failed.

    **Memory**: 4 MiB per thread, of which there are up to four where cores allow, and what comes
    of them where tensors are cast.
    """
    copies = plan_copies(files)
    mine = _part(order_blocks(copies), comm.rank, comm.size)
    threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 1) // comm.size))
    _ = source.entries  # made once, before threads ask for it
    sizes = [source.index.files[file].nbytes for file, _ in mine]
    spans = [block_range(block, size) for (_, block), size in zip(mine, sizes, strict=True)]
    progress = Progress(sum(high - low for low, high in spans))
    work = _Work(source, files, place, copies, progress, durable)
    if threads == 1:
        work.run(mine)
        return
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work.run, _part(mine, n, threads)) for n in range(threads)]
    for future in futures:
        future.result()


def start_file(path: Path, head: bytes, *, nbytes: int, durable: bool) -> None:
    """Make a file of a size that begins with ``head``. Local."""
    fd = _posix.create(path)
    try:
        _posix.resize(fd, nbytes)
        _write_all(fd, memoryview(head), 0)
        if durable:
            _posix.fsync(fd)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while len(view):
        done = _posix.write_at(fd, view, offset)
        view, offset = view[done:], offset + done


@dataclass(frozen=True)
class _Work:
    source: Source
    files: Sequence[OutFile]
    place: Path
    copies: Mapping[int, Sequence[Copy]]
    progress: Progress
    durable: bool

    def run(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks. One that turns out to be altered ends the export, so nobody sees it."""
        folding = folding_for(self.source, window_bytes=_WINDOW_BYTES)
        outs: dict[int, int] = {}
        with ExitStack() as stack:
            for file, group in groupby(sorted(blocks), key=lambda pair: pair[0]):
                fd = stack.enter_context(open_checked(self.source, file))
                for _, block in group:
                    if block == 0:
                        check_header(self.source, file, fd=fd)
                    for low, piece in self._pieces(file, block, fd, folding):
                        for copy, at, part in _parts(self.copies[file], piece, low):
                            if copy.out not in outs:
                                path = self.place / self.files[copy.out].name
                                outs[copy.out] = _posix.open_to_write(path)
                                stack.callback(os.close, outs[copy.out])
                            _write_all(outs[copy.out], bytes_of(part), at)
            if self.durable:
                for fd in outs.values():
                    _posix.fsync(fd)

    def _pieces(
        self, file: int, block: int, fd: Handle, folding: Folding
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a block's bytes and where they begin, then compare their checksum."""
        record = self.source.index.files[file]
        path = self.source.folder / record.name
        low, high = block_range(block, record.nbytes)
        folding.restart()
        for at in range(low, high, len(folding.view)):
            view = folding.view[: high - at]
            if not read_exactly(fd, [view], offset=at):
                raise CheckpointError(f"{path}: got shorter while it was being read")
            yield at, folding.tensor[: len(view)]
            folding.absorb(len(view))
            self.progress.advance(len(view))
        grains = grains_in(low, high)
        if folding.value() != record.crc(*grains):
            raise CheckpointError(altered(self.source, file, fd=fd, piece=grains))


def _part(blocks: Sequence[tuple[int, int]], number: int, count: int) -> Sequence[tuple[int, int]]:
    return blocks[len(blocks) * number // count : len(blocks) * (number + 1) // count]


def order_blocks(copies: Mapping[int, Sequence[Copy]]) -> list[tuple[int, int]]:
    """Return the blocks that copies read, and each file's first, which holds the header. Local.

    They are in the order in which what they hold goes out, so that ranks that do a run each write
    different parts of the export: writes to one file wait for one another.

    Returns:
        Source file and block.
    """
    goals: dict[tuple[int, int], tuple[int, int]] = {(file, 0): (0, 0) for file in copies}
    for file, listed in copies.items():
        seen: set[int] = set()
        for copy in listed:
            if copy.offset == copy.stop:
                continue
            for block in range(copy.offset // BLOCK_BYTES, (copy.stop - 1) // BLOCK_BYTES + 1):
                grown = max(0, block * BLOCK_BYTES - copy.offset)  # enough to sort by
                goal = (copy.out, copy.at + grown)
                goals[file, block] = min(goals[file, block], goal) if block in seen else goal
                seen.add(block)
    return sorted(goals, key=lambda block: (goals[block], block))


def _parts(
    copies: Sequence[Copy], piece: torch.Tensor, low: int
) -> Iterator[tuple[Copy, int, torch.Tensor]]:
    """Yield what of each copy lies in a piece, as it goes out, and the byte where it goes.

    Pieces begin at multiples of every element size, so no element lies in two.

    Args:
        copies: those of the piece's file.
        piece: uint8 ``[n]``.
        low: where the piece begins in its file.
    """
    high = low + piece.numel()
    for copy in copies[bisect_right(copies, low, key=_stop_of) :]:
        if copy.offset >= high:
            return
        for first, last, at in copy.spans(low, high):
            part = piece[first - low : last - low]
            if copy.stored != copy.dtype:
                part = part.view(copy.stored).to(copy.dtype)
            yield copy, at, part


def _stop_of(copy: Copy) -> int:
    return copy.stop
