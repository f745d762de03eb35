from __future__ import annotations

import os
import signal

import pytest

from shard_train._stop import LAUNCHED, StopFlag, was_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_remembered(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # whoever started the tests may ignore it
    try:
        with StopFlag() as stop:
            assert stop.number == 0
            signal.raise_signal(number)
            assert stop.number == number
    finally:
        signal.signal(number, before)


def test_the_first_signal_counts() -> None:
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGTERM


def test_a_second_interrupt_interrupts() -> None:
    with StopFlag() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.number == signal.SIGINT


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopFlag():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.number == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_end_of_the_starter_stops_the_ranks_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "1")
    stop = StopFlag()
    assert stop.number == 0
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.number == signal.SIGHUP


def test_end_of_another_parent_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    stop = StopFlag()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.number == 0


def test_exit_statuses() -> None:
    assert [status for status in range(-20, 256) if was_stopped(status)] == [129, 130, 143]
