"""Arrays of the CPU on large pages."""

from __future__ import annotations

import mmap
import sys
from functools import lru_cache
from pathlib import Path

import torch

LARGE_PAGE = 2 << 20
"""Bytes of a large page; where the machine's differ, none are asked for."""

_LEAST_BYTES = 2 * LARGE_PAGE
_SWITCHES = Path("/sys/kernel/mm/transparent_hugepage")


def large_empty(numel: int, dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory ``[numel]``, on large pages where the system has some.

    For arrays that live long. A pass over many of them at once, such as an optimizer's, is
    quicker on large pages. They lie outside of the allocator's heap, leave no holes in it, and go
    back to the system with the last tensor that holds them. Arrays below 4 MiB and those of other
    devices are ordinary ones.

    Worked example: of 5 MiB the first 4 lie on two large pages and the last one on small ones.

    Args:
        numel: elements.
        dtype: of the elements.
        device: where they live.

    Returns:
        A tensor with a storage of its own; on large pages it cannot be resized.

    **Collective**: local. **Memory**: what the elements need, in whole small pages.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _LEAST_BYTES or not _are_to_be_had(_SWITCHES):
        return torch.empty(numel, dtype=dtype, device=device)
    # One page more to begin at a multiple in; what lies before and behind is never touched.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=flags)
    except OSError:  # torch says better what there was no room for
        return torch.empty(numel, dtype=dtype, device=device)
    skip = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % LARGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, skip, nbytes // LARGE_PAGE * LARGE_PAGE)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=skip)


@lru_cache(maxsize=1)
def _are_to_be_had(switches: Path) -> bool:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        size = int((switches / "hpage_pmd_size").read_text())
        return size == LARGE_PAGE and "[never]" not in (switches / "enabled").read_text()
    except (OSError, ValueError):
        return False
