from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from shard_ckpt import _posix


def refusing(code: int) -> object:
    def refuse(*_: int) -> int:
        ctypes.set_errno(code)
        return -1

    return refuse


def test_a_file_gets_its_space_with_its_size(tmp_path: Path) -> None:
    fd = _posix.create(tmp_path / "f")
    _posix.resize(fd, 1 << 20)
    os.close(fd)
    found = (tmp_path / "f").stat()
    assert (found.st_size, found.st_blocks * 512 >= 1 << 20) == (1 << 20, True)
    assert (tmp_path / "f").read_bytes() == bytes(1 << 20)


def test_a_full_disk_is_noticed_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_posix, "_allocate", refusing(errno.ENOSPC))
    fd = _posix.create(tmp_path / "f")
    with pytest.raises(OSError, match="No space left") as caught:
        _posix.resize(fd, 1 << 20)
    os.close(fd)
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_need_not_promise_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(_posix, "_allocate", refusing(code))
    fd = _posix.create(tmp_path / "f")
    _posix.resize(fd, 1 << 20)
    os.close(fd)
    assert (tmp_path / "f").stat().st_size == 1 << 20


def test_advice_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    ends = os.pipe()  # which take no advice
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            os.posix_fadvise(ends[0], 0, 0, os.POSIX_FADV_RANDOM)
        _posix.read_no_further(ends[0])
        _posix.read_ahead(ends[0])
        _posix.fetch(ends[0], 0, 10)
    finally:
        for fd in ends:
            os.close(fd)


def test_much_is_asked_for_in_parts_that_are_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *args: asked.append(args))
    _posix.fetch(5, 100, 300 << 10)
    kib, advice = 1 << 10, os.POSIX_FADV_WILLNEED
    assert asked == [
        (5, 100, 128 * kib, advice),
        (5, 100 + 128 * kib, 128 * kib, advice),
        (5, 100 + 256 * kib, 44 * kib, advice),
    ]
