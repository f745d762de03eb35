from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from shard_ckpt import _posix
from shard_ckpt._blocks import (
    BLOCK_BYTES,
    BlockWriter,
    block_count,
    block_range,
    read_exactly,
    write_file,
)
from shard_ckpt._grains import FileRecord, sums_of


def test_what_is_fed_is_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "f"
    writer = BlockWriter(path)
    parts = [os.urandom(n) for n in (0, 1, 4095, 70_000)] + [b"x"] * 1500
    for part in parts:
        writer.feed(memoryview(part))
    data = b"".join(parts)
    assert writer.finish() == FileRecord("f", len(data), zlib.crc32(data).to_bytes(4, "big"))
    assert path.read_bytes() == data


def test_each_block_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    write = _posix.write

    def counted(fd: int, views: Sequence[memoryview]) -> int:
        calls.append([len(view) for view in views])
        return write(fd, views)

    monkeypatch.setattr(_posix, "write", counted)
    data = os.urandom(BLOCK_BYTES) + bytes(BLOCK_BYTES) + b"tail"
    writer = BlockWriter(tmp_path / "f")
    writer.feed(memoryview(data)[:10])
    writer.feed(memoryview(data)[10:])
    record = writer.finish()
    assert calls == [[10, BLOCK_BYTES - 10], [BLOCK_BYTES], [4]]
    assert record == FileRecord("f", len(data), sums_of(data))


def test_small_parts_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    write = _posix.write

    def counted(fd: int, views: Sequence[memoryview]) -> int:
        calls.append(len(views))
        return write(fd, views)

    monkeypatch.setattr(_posix, "write", counted)
    writer = BlockWriter(tmp_path / "f")
    for _ in range(1200):
        writer.feed(memoryview(b"ab"))
    assert writer.finish().nbytes == 2400
    assert calls == [512, 512, 176]


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def a_little(fd: int, views: Sequence[memoryview]) -> int:
        return os.write(fd, b"".join(views)[:3])

    monkeypatch.setattr(_posix, "write", a_little)
    record = write_file(tmp_path / "f", b"0123456789")
    assert (tmp_path / "f").read_bytes() == b"0123456789"
    assert record == FileRecord("f", 10, zlib.crc32(b"0123456789").to_bytes(4, "big"))


def test_partial_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")

    def a_little(fd: int, views: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [views[0][:3]], offset)

    monkeypatch.setattr(_posix, "read_into", a_little)
    first, second = bytearray(4), bytearray(3)
    with (tmp_path / "f").open("rb") as file:
        assert read_exactly(file.fileno(), [memoryview(first), memoryview(second)], offset=1)
        assert not read_exactly(file.fileno(), [memoryview(bytearray(4))], offset=7)
    assert (bytes(first), bytes(second)) == (b"1234", b"567")


def test_a_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError, match=r"f'$"):
        write_file(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_mode_follows_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_file(tmp_path / "f", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("step", ["write", "fsync", "close"])
def test_errors_name_the_file_and_leave_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    opened = len(os.listdir("/proc/self/fd"))

    def fail(fd: int, *_: object) -> int:
        if step == "close":
            os.close(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_posix, step, fail)
    with pytest.raises(OSError, match=r"\[Errno 5\] .*/f'$"):
        write_file(tmp_path / "f", b"x")
    assert len(os.listdir("/proc/self/fd")) == opened


def test_block_arithmetic() -> None:
    assert [block_count(n) for n in (0, 1, BLOCK_BYTES, BLOCK_BYTES + 1)] == [0, 1, 1, 2]
    assert block_range(1, BLOCK_BYTES + 5) == (BLOCK_BYTES, BLOCK_BYTES + 5)
