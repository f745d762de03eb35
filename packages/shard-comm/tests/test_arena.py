"""Blocks of shared memory, in one process."""

from __future__ import annotations

import os
import random
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shard_comm import _arena
from shard_comm._arena import Arena, Place
from shard_comm._mapping import (
    LARGE_PAGE,
    PAGE,
    address_of,
    give_back,
    make_large,
    map_file,
    pages_of,
)
from shard_comm._shared_file import SharedFile

MIB = 1 << 20


def new_file(*, named: bool = False) -> SharedFile:
    fd = os.memfd_create("shard-comm-test")
    os.ftruncate(fd, 1 << 40)
    return SharedFile(fd, named=named)


def take(arena: Arena, nbytes: int) -> torch.Tensor:
    return arena.take(nbytes, torch.uint8)


def held_bytes(file: SharedFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


def test_blocks_are_aligned_apart_and_in_the_file() -> None:
    file = new_file()
    arena = Arena(file, PAGE, 1 << 30)
    blocks = [take(arena, n) for n in (1, 64, 65, 3 * MIB, 40 * MIB)]
    assert [block.nbytes for block in blocks] == [1, 64, 65, 3 * MIB, 40 * MIB]
    starts = [block.data_ptr() for block in blocks]
    assert [start % 64 for start in starts] == [0] * 5
    assert [start - starts[0] for start in starts[:4]] == [0, 64, 128, 256]
    for number, block in enumerate(blocks):
        block.fill_(number)
    for number, block in enumerate(blocks):
        place = arena.find(block.data_ptr())
        assert place is not None
        assert os.pread(file.fd, block.nbytes, place.offset) == bytes([number]) * block.nbytes
    assert arena.find(starts[1] + 5) == Place(PAGE, 32 * MIB, PAGE + 69)
    assert arena.find(0) is None
    assert arena.find(torch.empty(1).data_ptr()) is None
    # 1, 64 and 65 bytes take 64, 64 and 128; the large ones are multiples of a page already.
    assert arena.taken_bytes == 256 + 43 * MIB


def test_a_block_is_used_again_when_its_last_view_is_gone() -> None:
    arena = Arena(new_file(), PAGE, 1 << 30)
    first, second, third = (take(arena, MIB) for _ in range(3))
    kept, view = second.data_ptr(), second.view(2, -1)[1, 5:7].detach()
    del second
    assert take(arena, MIB).data_ptr() != kept
    del view
    again = take(arena, MIB)
    assert again.data_ptr() == kept
    start = first.data_ptr()
    del first, again, third  # three neighbours join, in whichever order they came back
    assert take(arena, 3 * MIB).data_ptr() == start
    assert arena.taken_bytes == 0


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    arena = Arena(new_file(), PAGE, 1 << 30)
    blocks = [take(arena, n) for n in (4096, 64, 1024, 64)]
    large, small = blocks[0].data_ptr(), blocks[2].data_ptr()
    blocks[0] = blocks[2] = torch.empty(0)
    assert take(arena, 1000).data_ptr() == small
    assert take(arena, 1025).data_ptr() == large


def test_trim_gives_back_what_is_free_and_keeps_the_rest() -> None:
    file = new_file()
    arena = Arena(file, PAGE, 1 << 30)
    kept, dropped = take(arena, 2 * MIB), take(arena, 16 * MIB)
    kept.fill_(7)
    dropped.fill_(7)
    assert held_bytes(file) == 18 * MIB
    del dropped
    arena.trim()
    assert held_bytes(file) == 2 * MIB
    assert kept[-3:].tolist() == [7, 7, 7]
    assert take(arena, 16 * MIB)[0].item() == 0


def test_trim_gives_back_what_was_used_in_the_middle_of_what_it_gave_back() -> None:
    """A small block between free memory that went back before is free memory that did not."""
    file = new_file()
    arena = Arena(file, PAGE, 1 << 30)
    for nbytes in (16 * MIB, 4 * MIB, PAGE):
        block = take(arena, nbytes).fill_(7)
        assert held_bytes(file) == nbytes
        del block
        arena.trim()
        assert held_bytes(file) == 0


def test_large_blocks_that_nobody_takes_again_go_back() -> None:
    file = new_file()
    arena = Arena(file, PAGE, 1 << 30)
    large, small = take(arena, 8 * MIB), take(arena, PAGE)
    large.fill_(7)
    small.fill_(7)
    keeper = take(arena, 64)
    keeper.fill_(7)
    del large, small
    for _ in range(500):
        take(arena, 64)
    assert held_bytes(file) == 8 * MIB + 2 * PAGE
    for _ in range(200):
        take(arena, 64)
    assert held_bytes(file) <= 2 * PAGE
    large = take(arena, 8 * MIB)  # taken and dropped again and again, it stays
    large.fill_(7)
    del large
    for _ in range(1000):
        take(arena, 8 * MIB)
    assert held_bytes(file) >= 8 * MIB


def test_reserved_memory_is_reserved_and_kept() -> None:
    file = new_file(named=True)
    arena = Arena(file, PAGE, 1 << 30)
    block = take(arena, 5 * MIB)
    assert held_bytes(file) == 5 * MIB
    del block
    arena.trim()
    assert held_bytes(file) == 5 * MIB


def test_what_is_written_whole_is_made_large_once_until_it_goes_back() -> None:
    """Of a block of 7 MiB three large pages lie in it whole; the second is written last."""
    asked: list[range] = []
    file = new_file()
    arena = Arena(file, LARGE_PAGE, 1 << 30)
    first = take(arena, 7 * MIB)
    start = first.data_ptr()
    assert start % LARGE_PAGE == 0
    zero = start // LARGE_PAGE

    def pages(*numbers: int) -> range:
        return range(zero + numbers[0], zero + numbers[-1] + 1)

    with mock.patch.object(_arena, "make_large", lambda v: asked.append(pages_of(v, LARGE_PAGE))):
        arena.enlarge(start, 7 * MIB)
        assert asked == []
        first[: LARGE_PAGE + 1] = 1
        first[2 * LARGE_PAGE :] = 1
        for _ in range(2):
            arena.enlarge(start, 7 * MIB)
            assert asked == [pages(0), pages(2)]
        first.fill_(1)
        del first
        first = take(arena, 6 * MIB)  # the same memory
        assert first.data_ptr() == start
        assert asked == [pages(0), pages(2), pages(1)]
        del first
        arena.trim()
        first = take(arena, 6 * MIB).fill_(1)
        assert first.data_ptr() == start
        second = take(arena, 3 * MIB).fill_(1)  # too small, though it has a large page in it
        arena.enlarge(start, 6 * MIB)
        arena.enlarge(second.data_ptr(), 3 * MIB)
        arena.enlarge(torch.ones(2 << 20).data_ptr(), 8 * MIB)
        assert asked == [pages(0), pages(2), pages(1), pages(0, 2)]


def test_large_pages_take_no_memory() -> None:
    """Of 16 MiB five are written, whole large pages or not; that much is held, now and later."""
    file = new_file()
    arena = Arena(file, LARGE_PAGE, 1 << 30)
    block = take(arena, 16 * MIB)
    block[3 * MIB : 8 * MIB] = 7
    for _ in range(2):
        arena.enlarge(block.data_ptr(), 16 * MIB)
        del block
        block = take(arena, 16 * MIB)
        assert held_bytes(file) == 5 * MIB
    assert block[3 * MIB - 1 : 3 * MIB + 1].tolist() == [0, 7]
    assert block.sum().item() == 7 * 5 * MIB


def test_a_system_that_does_not_say_what_is_written_serves() -> None:
    arena = Arena(new_file(), LARGE_PAGE, 1 << 30)
    with (
        mock.patch.object(os, "lseek", side_effect=OSError("no such thing")),
        mock.patch.object(_arena, "make_large") as made,
    ):
        block = take(arena, 8 * MIB).fill_(1)
        arena.enlarge(block.data_ptr(), 8 * MIB)
    made.assert_not_called()


def test_large_pages_keep_what_is_in_them_and_lie_in_the_view() -> None:
    """From a page before a large one to a page behind three: three, and what is there stays."""
    file = new_file()
    view = file.map(3 * LARGE_PAGE - PAGE, 3 * LARGE_PAGE + 2 * PAGE)
    assert address_of(view) % LARGE_PAGE == LARGE_PAGE - PAGE
    first = address_of(view) // LARGE_PAGE + 1
    assert pages_of(view, LARGE_PAGE) == range(first, first + 3)
    assert not pages_of(view[PAGE + 1 : PAGE + LARGE_PAGE], LARGE_PAGE)
    data = torch.frombuffer(view, dtype=torch.uint8).copy_(torch.arange(len(view)) % 251)
    make_large(view)
    other = file.map(3 * LARGE_PAGE - PAGE, len(view))  # as another process sees it
    assert torch.equal(data, torch.arange(len(view)).remainder(251).to(torch.uint8))
    assert torch.equal(torch.frombuffer(other, dtype=torch.uint8), data)
    give_back(view[PAGE + 5 : PAGE + 2 * LARGE_PAGE])
    assert data[PAGE + 4 : 2 * PAGE + 1].any()
    assert not data[2 * PAGE : PAGE + 2 * LARGE_PAGE].any()
    assert data[PAGE + 2 * LARGE_PAGE :].any()


def test_an_arena_ends_where_it_must() -> None:
    arena = Arena(new_file(), PAGE, 64 * MIB)
    blocks = [take(arena, 32 * MIB) for _ in range(2)]
    with pytest.raises(MemoryError, match="no shared memory left for 64 bytes"):
        take(arena, 1)
    del blocks[0]
    assert take(arena, 1).nbytes == 1


def test_a_mapping_ends_with_its_last_view() -> None:
    file = new_file()
    view = file.map(PAGE, 3 * PAGE)
    start = address_of(view)
    part = view[PAGE : PAGE + 1]
    del view
    assert is_mapped(start)
    del part
    assert not is_mapped(start)


def test_a_mapping_takes_the_room_of_its_pages_alone() -> None:
    """Where to map is found with room to spare, of which nothing stays."""
    file = new_file()

    def reserves() -> tuple[bool, bool]:
        before = reserved_bytes()
        spans = [(offset, nbytes) for offset in (PAGE, LARGE_PAGE) for nbytes in (5, LARGE_PAGE)]
        views = [file.map(*span) for span in spans]
        mapped = reserved_bytes()
        assert len(views) == 4
        with pytest.raises(OSError, match="cannot map 5 bytes"):
            map_file(-1, PAGE, 5)
        return mapped != before, reserved_bytes() != mapped

    # Another thread of this process may reserve something meanwhile, though not every time.
    assert (False, False) in [reserves() for _ in range(5)]


def reserved_bytes() -> int:
    """Bytes of this process's address space that nothing may touch."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        spans = [line.split()[0].split("-") for line in maps if " ---p " in line]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        starts = [line.split("-")[0] for line in maps if "memfd:shard-comm-test" in line]
    return address in {int(start, 16) for start in starts}


@given(st.integers(0, 2**32), st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=40))
def test_no_two_blocks_overlap(seed: int, sizes: list[int]) -> None:
    """Whatever is taken and dropped: live blocks are apart, and all comes back in the end."""
    rng = random.Random(seed)
    file = new_file()
    arena = Arena(file, PAGE, 1 << 30)
    live: list[torch.Tensor] = []
    for size in sizes:
        live.append(take(arena, size))
        if rng.random() < 0.5:
            live.pop(rng.randrange(len(live)))
        spans = sorted((block.data_ptr(), block.nbytes) for block in live)
        for (low, length), (high, _) in pairwise(spans):
            assert low + length <= high
    assert arena.taken_bytes >= sum(block.nbytes for block in live)
    live.clear()
    assert arena.taken_bytes == 0
    file.close()
