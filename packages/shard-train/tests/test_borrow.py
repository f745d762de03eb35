from __future__ import annotations

import logging
import os
import signal

import pytest

from shard_testing import logged
from shard_train._borrow import borrowed_environ, borrowed_handlers, silenced


def test_environ_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARD_KEPT", "1")
    monkeypatch.setenv("SHARD_REMOVED", "1")
    before = dict(os.environ)
    with borrowed_environ():
        os.environ["SHARD_KEPT"] = "2"
        os.environ["SHARD_ADDED"] = "1"
        del os.environ["SHARD_REMOVED"]
    assert dict(os.environ) == before


def test_handlers_are_put_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    with borrowed_handlers(numbers):
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
    assert [signal.getsignal(number) for number in numbers] == before


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("shard_train_test.below")
    with logged("") as heard:
        with silenced("shard_train_test"):
            logger.error("not this")
        logger.error("this")
    assert heard == ["this"]
    assert logging.getLogger("shard_train_test").handlers == []
