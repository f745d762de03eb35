"""Filling tensors from checked files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from shard_ckpt._blocks import Handle, read_exactly
from shard_ckpt._check import Source, open_checked
from shard_ckpt._collector import collector_paused
from shard_ckpt._errors import CheckpointError
from shard_ckpt._match import Read, Target
from shard_ckpt._memory import bytes_of, flat_range, is_flat
from shard_ckpt._staging import Windows

_ALIGNMENT = 16  # no dtype is wider


def fill(source: Source, targets: Sequence[Target], *, exact: bool = False) -> None:
    """Read every target's elements into it, in the order in which they lie in files. Local.

    Host tensors that are contiguous and of the stored dtype are read into directly.

    Args:
        source: the checkpoint.
        targets: what to fill.
        exact: nothing but these elements should be read from storage. For files that were checked
            just now and lie in the page cache; others are read faster without.

    Raises:
        CheckpointError: a file changed or got shorter since it was checked.
        OSError: reading failed. Targets may be filled in part.

    **Memory**: two windows of 16 MiB for each device whose tensors cannot be read into directly,
    and a copy of one tensor at a time for those that are not contiguous.
    """
    flat = [target for target in targets if is_flat(target.leaf.tensor)]
    direct = [target for target in flat if _is_direct(target)]
    staged = [target for target in flat if not _is_direct(target)]
    with torch.inference_mode():  # so that inference tensors can be filled too
        _read_direct(source, _sorted_reads(direct), exact)
        by_device = sorted(staged, key=lambda target: str(target.leaf.tensor.device))
        for device, group in groupby(by_device, key=lambda target: target.leaf.tensor.device):
            _read_staged(source, _sorted_reads(group), device, exact)
        for target in targets:
            if not is_flat(target.leaf.tensor):
                _fill_scattered(source, target, exact)
    _count_writes(targets)


def _is_direct(target: Target) -> bool:
    tensor = target.leaf.tensor
    return tensor.device.type == "cpu" and tensor.dtype == target.stored_dtype


@collector_paused()
def _sorted_reads(targets: Iterable[Target]) -> list[Read]:
    reads = [read for target in targets for read in target.reads() if read.nbytes]
    return sorted(reads, key=lambda read: (read.file, read.offset))


def _read_direct(source: Source, reads: Sequence[Read], exact: bool) -> None:
    for file, group in groupby(reads, key=lambda read: read.file):
        with open_checked(source, file, exact=exact) as fd:
            for run in _consecutive(group):
                views = []
                for read in run:
                    tensor = read.target.leaf.tensor
                    low = read.at * tensor.element_size()
                    views.append(bytes_of(tensor)[low : low + read.nbytes])
                _read(source, file, fd, views, run[0].offset)


def _read_staged(source: Source, reads: Sequence[Read], device: torch.device, exact: bool) -> None:
    windows = Windows(device)
    for file, group in groupby(reads, key=lambda read: read.file):
        with open_checked(source, file, exact=exact) as fd:
            for run in _consecutive(group):
                _stage_run(source, file, fd, run, windows)
    windows.drain()


def _stage_run(
    source: Source, file: int, fd: Handle, run: Sequence[Read], windows: Windows
) -> None:
    """Read consecutive bytes a window at a time and copy each window's parts to their targets.

    Bytes keep their offset modulo 16 in the window and windows end at multiples of 16 in the file,
    so every part begins and ends on an element and is aligned for its dtype.
    """
    at, end = run[0].offset, run[-1].offset + run[-1].nbytes
    rest = list(reversed(run))
    while at < end:
        shift = at % _ALIGNMENT
        stop = min(end, at - shift + windows.window_bytes)
        window = windows.take()[shift : shift + stop - at]
        _read(source, file, fd, [bytes_of(window)], at)
        while rest and rest[-1].offset < stop:
            read = rest[-1]
            low, high = max(read.offset, at), min(read.offset + read.nbytes, stop)
            _copy_part(read, window[low - at : high - at], low)
            if high < read.offset + read.nbytes:
                break
            rest.pop()
        windows.hand_over()
        at = stop


def _copy_part(read: Read, part: torch.Tensor, offset: int) -> None:
    values = part.view(read.target.stored_dtype)
    first = read.at + (offset - read.offset) // values.element_size()
    target = flat_range(read.target.leaf.tensor, start=first, stop=first + values.numel())
    target.copy_(values, non_blocking=target.device.type == "cuda")


def _fill_scattered(source: Source, target: Target, exact: bool) -> None:
    tensor = target.leaf.tensor
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    stand_in = replace(target, leaf=replace(target.leaf, tensor=flat, source=flat))
    fill(source, [stand_in], exact=exact)
    tensor.copy_(flat.view(tensor.shape))


def _consecutive(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Group reads of which each begins where the one before ends."""
    run: list[Read] = []
    for read in reads:
        if run and run[-1].offset + run[-1].nbytes != read.offset:
            yield run
            run = []
        run.append(read)
    if run:
        yield run


def _read(source: Source, file: int, fd: Handle, views: Sequence[memoryview], offset: int) -> None:
    if not read_exactly(fd, views, offset=offset):
        path = source.folder / source.index.files[file].name
        raise CheckpointError(f"{path}: got shorter while it was being read")


def _count_writes(targets: Sequence[Target]) -> None:
    """Tell autograd of writes that may have gone past it, as in-place operations would."""
    written = [t for target in targets for t in (target.leaf.source, target.leaf.tensor)]
    distinct = {id(tensor): tensor for tensor in written}.values()
    torch.autograd.graph.increment_version([t for t in distinct if not t.is_inference()])
