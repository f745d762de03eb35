from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shard_ckpt import _posix
from shard_ckpt._ahead import pieces_in
from shard_ckpt._grains import GRAIN_BYTES, Spans

MIB = 4  # grains
Event = tuple[str, float, float]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """What the system is told, in MiB, in the order in which it is told."""
    events: list[Event] = []
    scale = MIB * GRAIN_BYTES

    def fetch(fd: int, offset: int, nbytes: int) -> None:
        events.append(("fetch", offset / scale, (offset + nbytes) / scale))

    monkeypatch.setattr(_posix, "fetch", fetch)
    monkeypatch.setattr(_posix, "read_ahead", lambda fd: events.append(("free", 0, 0)))
    monkeypatch.setattr(_posix, "read_no_further", lambda fd: events.append(("exact", 0, 0)))
    return events


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.open(os.devnull, os.O_RDONLY)
    yield fd
    os.close(fd)


def read(told: list[Event], runs: Spans, fd: int, file_mib: int) -> list[Event]:
    """Read runs given in MiB of a file."""
    grains = [(first * MIB, stop * MIB) for first, stop in runs]
    for first, stop in pieces_in(grains, fd=fd, file_bytes=file_mib * MIB * GRAIN_BYTES):
        told.append(("read", first / MIB, stop / MIB))
    return told


def test_a_run_to_the_end_of_a_file_is_left_to_the_system(told: list[Event], fd: int) -> None:
    assert read(told, [(0, 40)], fd, 40) == [
        ("free", 0, 0),
        ("read", 0, 16),
        ("read", 16, 32),
        ("read", 32, 40),
    ]


def test_the_end_of_a_run_is_asked_for_before_it_is_read(told: list[Event], fd: int) -> None:
    """Of 100 MiB, the first 50 and a run of 3 are needed."""
    assert read(told, [(0, 50), (60, 63)], fd, 100) == [
        ("free", 0, 0),
        ("read", 0, 16),
        ("read", 16, 18),
        ("exact", 0, 0),
        ("fetch", 18, 34),
        ("fetch", 34, 50),
        ("read", 18, 34),
        ("fetch", 60, 63),
        ("read", 34, 50),
        ("read", 60, 63),
    ]


def test_after_short_runs_the_system_is_free_again(told: list[Event], fd: int) -> None:
    assert read(told, [(0, 1), (4, 5), (8, 30)], fd, 30) == [
        ("exact", 0, 0),
        ("fetch", 0, 1),
        ("fetch", 4, 5),
        ("read", 0, 1),
        ("read", 4, 5),
        ("free", 0, 0),
        ("read", 8, 24),
        ("read", 24, 30),
    ]
