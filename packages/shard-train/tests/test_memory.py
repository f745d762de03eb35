from __future__ import annotations

from pathlib import Path

import pytest

from shard_train import _memory


def test_a_big_allocation_shows() -> None:
    before = _memory.held_bytes()
    block = bytearray(b"x" * 64_000_000)
    assert _memory.held_bytes() - before > 50_000_000
    assert len(block) == 64_000_000


def test_without_a_process_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    held = _memory.held_bytes()
    monkeypatch.setattr(_memory, "_STATM", Path("/nowhere"))
    assert held / 2 < _memory.held_bytes() < held * 50
