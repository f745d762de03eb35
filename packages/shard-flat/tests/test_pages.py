"""Arrays on large pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shard_flat import _pages, large_empty
from shard_flat._pages import LARGE_PAGE

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has large pages, as far as its switches say."""
    (tmp_path / "hpage_pmd_size").write_text(f"{LARGE_PAGE}\n")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    monkeypatch.setattr(_pages, "_SWITCHES", tmp_path)


def _advised(start: int, stop: int) -> set[bool]:
    """Whether parts of ``[start, stop)`` are to be on large pages; nothing if not mapped."""
    found, inside = set(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) < stop and int(match[2], 16) > start
        elif inside and line.startswith("VmFlags:"):
            found.add("hg" in line.split())
    return found


def test_worked_example() -> None:
    array = large_empty(5 << 18, torch.float32, device=CPU)
    start = array.data_ptr()
    assert start % LARGE_PAGE == 0
    assert array.untyped_storage().nbytes() == 5 << 20
    assert _advised(start, start + (4 << 20)) == {True}
    assert _advised(start + (4 << 20), start + (5 << 20)) == {False}
    assert array.zero_().add_(1).sum() == 5 << 18


def test_memory_goes_with_the_last_view() -> None:
    array = large_empty(5 << 20, torch.bfloat16, device=CPU)
    start = array.data_ptr()
    view = array[1:3].fill_(7)
    del array
    assert view.tolist() == [7, 7]
    assert _advised(start, start + LARGE_PAGE) == {True}
    del view
    assert True not in _advised(start, start + LARGE_PAGE)


def test_small_arrays_and_other_devices_are_ordinary() -> None:
    small = large_empty((4 << 18) - 1, torch.float32, device=CPU)
    assert small.untyped_storage().resizable()
    assert not large_empty(4 << 18, torch.float32, device=CPU).untyped_storage().resizable()
    assert large_empty(5 << 20, torch.int8, device=torch.device("meta")).shape == (5 << 20,)


@pytest.mark.parametrize(
    ("switch", "says"), [("enabled", "always madvise [never]"), ("hpage_pmd_size", "536870912")]
)
def test_without_large_pages_arrays_are_ordinary(tmp_path: Path, switch: str, says: str) -> None:
    (tmp_path / switch).write_text(says)
    assert large_empty(5 << 20, torch.int8, device=CPU).untyped_storage().resizable()


def test_a_system_without_switches_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pages, "_SWITCHES", Path("/nowhere"))
    assert large_empty(5 << 20, torch.int8, device=CPU).untyped_storage().resizable()
