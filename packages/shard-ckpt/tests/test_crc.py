from __future__ import annotations

import os
import sys
import zlib
from types import ModuleType

import pytest

from shard_ckpt._crc import append_zeros, crc32, implementation


def test_the_check_value_of_the_polynomial() -> None:
    assert crc32(b"123456789") == 0xCBF43926
    assert crc32(memoryview(b"6789"), crc32(b"12345")) == 0xCBF43926


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    assert append_zeros(crc32(b"12345"), 4) ^ crc32(b"6789") == 0xCBF43926
    left, right = os.urandom(1000), os.urandom(123_457)
    assert append_zeros(crc32(left), len(right)) ^ crc32(right) == zlib.crc32(left + right)
    assert append_zeros(0x12345678, 0) == 0x12345678


def test_zlib_ng_is_preferred_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zlib_ng", ModuleType("zlib_ng"))
    module = ModuleType("zlib_ng.zlib_ng")
    module.crc32 = lambda data, value: 7  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", module)
    assert implementation.__wrapped__()(b"", 0) == 7
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    assert implementation.__wrapped__() is zlib.crc32
