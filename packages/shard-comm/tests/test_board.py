"""What ranks write down for one another; here both are in one process."""

from __future__ import annotations

import itertools
import os
import platform
import time
from unittest import mock

import pytest
import torch

from shard_comm._arena import Place
from shard_comm._board import ARRIVED, DONE, SLOTS, Board, Call, _Fence
from shard_comm._mapping import PAGE
from shard_comm._patience import SPINS, Patience
from shard_comm._shared_file import SharedFile

CALLS = [
    Call("barrier"),
    Call("all_gather_object"),
    Call("all_gather", 5, torch.float8_e4m3fn),
    Call("reduce_scatter", 2**40, torch.bfloat16, "max"),
    Call("all_reduce", 0, torch.bool, "min"),
    Call("broadcast", 7, torch.complex64, src=300),
    Call("broadcast", 7, torch.complex64, src=0),
    Call("all_to_all", 6, torch.int64),
    Call("all_gather", 5, torch.int8, label=" (float32 sums) for layers.7.mlp.weight"),
]


def two_boards() -> tuple[Board, Board]:
    fd = os.memfd_create("shard-comm-test")
    os.ftruncate(fd, PAGE + Board.nbytes(2))
    file = SharedFile(fd, named=False)
    return Board(file, 0, 2), Board(file, 1, 2)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_call_reads_as_it_was_written(call: Call) -> None:
    assert Call.read(call.code, call.numel, call.label) == call
    assert sum(other.code == call.code for other in CALLS) == 1


def test_calls_as_messages_name_them() -> None:
    assert [str(call) for call in CALLS[1:4]] == [
        "all_gather_object()",
        "all_gather of 5 float8_e4m3fn",
        f"reduce_scatter max of {2**40} bfloat16",
    ]
    assert str(CALLS[5]) == "broadcast from 300 of 7 complex64"


def test_a_slot_says_who_is_where() -> None:
    first, second = two_boards()
    assert not second.reached(1, ARRIVED)
    place = Place(PAGE, 1 << 25, 12345)
    first.post(1, CALLS[2], place, 17)
    second.post(1, CALLS[3])
    assert second.reached(1, ARRIVED)
    assert second.behind(1, ARRIVED + 1) == [0]
    assert (second.place(0, 1), second.note(0, 1)) == (place, 17)
    assert first.place(1, 1) is None
    assert not first.agrees(1, CALLS[2])
    assert first.agrees(1, CALLS[3])
    assert first.call(1, 1) == CALLS[3]
    first.reach(1, DONE)
    assert second.reached(1, DONE)
    assert not second.reached(2, ARRIVED)
    assert (first.pid(1), second.pid(0)) == (os.getpid(), os.getpid())


def test_the_last_calls_of_a_rank_are_read_in_order() -> None:
    """Two rounds and a half of the slots, of which the last three and all are asked for."""
    first, second = two_boards()
    assert second.calls(0, 64) == []
    last = SLOTS * 5 // 2
    for seq in range(last):
        first.post(seq, Call("all_reduce", seq, torch.bfloat16, "sum"))
        first.reach(seq, DONE)
    first.meet(last, 0)
    first.post(last + 1, Call("broadcast", 3, torch.int64, src=1, label=" for norm"))
    assert second.calls(0, 3) == [
        f"{last}: all_reduce sum of {last - 1} bfloat16, {2 * last - 2} bytes, done",
        f"{last + 1}: barrier(), 0 bytes, arrived",
        f"{last + 2}: broadcast from 1 of 3 int64 for norm, 24 bytes, arrived",
    ]
    first.reach(last + 1, 2)
    assert second.calls(0, 1)[0].endswith(", at step 2")
    assert len(second.calls(0, 2 * SLOTS)) == SLOTS
    assert second.calls(1, 64) == []


def test_what_was_reached_stays_reached_when_the_slot_goes_on() -> None:
    first, second = two_boards()
    first.post(3, CALLS[2])
    second.post(3, CALLS[2])
    first.reach(3, DONE)
    first.post(3 + SLOTS, CALLS[0])
    assert second.reached(3, DONE)
    assert second.agrees(3, CALLS[2])  # it could not have gone on otherwise
    assert not second.reached(3 + SLOTS, ARRIVED + 1)


def test_a_slot_that_is_being_written_has_gone_on() -> None:
    """The call is written before the rank arrives with it: by then the old one is past."""
    first, second = two_boards()
    assert not first.meet(3, 0)
    first.reach = lambda seq, step: None  # type: ignore[method-assign]
    first.post(3 + SLOTS, CALLS[2])
    assert second.reached(3, DONE)
    assert second.agrees(3, CALLS[0])
    assert not second.reached(3 + SLOTS, ARRIVED)


def test_a_barrier_is_met_once_all_have_come() -> None:
    first, second = two_boards()
    assert not first.meet(5, 10)
    assert second.meet(5, 10)
    assert first.reached(5, DONE)
    assert first.agrees(5, CALLS[0])
    second.post(6, CALLS[2])
    assert not first.meet(6, 10)
    assert not first.agrees(6, CALLS[0])
    assert not second.agrees(6, CALLS[2])


def test_the_first_last_word_of_a_rank_stays() -> None:
    first, second = two_boards()
    assert first.last_words() == {}
    second.give_up("because")
    second.give_up("for another reason")
    assert first.last_words() == second.last_words() == {1: "because"}
    first.give_up("ä" * 2000)  # cut in the middle of a character
    assert first.last_words()[0].startswith("ää")
    assert len(first.last_words()[0].encode()) <= 1024


def test_a_fence_may_be_passed_by_any_number_of_times() -> None:
    first, second = two_boards()
    first._fence = second._fence = _Fence()
    first.post(1, CALLS[2])
    assert second.reached(1, ARRIVED)
    assert not first.meet(2, 0)
    assert second.meet(2, 0)


class Noted:
    """Words that write down which of a line's are read and written, and when."""

    def __init__(self, words: memoryview, log: list[str]) -> None:
        self._words = words
        self._log = log

    def __getitem__(self, at: int) -> int:
        self._log.append(f"read {at % 8}")
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self._log.append(f"write {at % 8}")
        self._words[at] = value


def noted(board: Board) -> list[str]:
    log: list[str] = []
    board.words = Noted(board.words, log)  # type: ignore[assignment]
    board._fence = lambda: log.append("fence")  # type: ignore[assignment]
    return log


def test_fences_stand_between_data_and_the_step_that_announces_them() -> None:
    """Word 0 of a line is the step; the other words and the data are read or written beside it."""
    with mock.patch.object(platform, "machine", return_value="aarch64"):
        first, second = two_boards()
    assert isinstance(first._fence, _Fence)
    writes, reads = noted(first), noted(second)
    first.post(1, CALLS[2], Place(PAGE, 1 << 25, 12345), 17)
    assert writes[:2] == ["write 0", "fence"]  # not that slot any more, before it changes
    assert set(writes[2:-2]) == {f"write {word}" for word in range(1, 8)}
    assert writes[-2:] == ["fence", "write 0"]
    assert second.reached(1, ARRIVED)
    assert reads == ["read 0", "fence"]
    writes.clear()
    assert not first.meet(2, 0)
    assert writes == ["write 1", "fence", "write 0", "read 0"]
    reads.clear()
    assert second.meet(2, 0)
    assert reads == ["write 1", "fence", "write 0", "read 0", "fence", "read 1"]
    writes.clear()
    first.give_up("because")
    assert [what.split()[0] for what in writes] == ["read", "fence", "write"]
    reads.clear()
    assert second.last_words() == {0: "because"}
    assert [what.split()[0] for what in reads] == ["read", "fence", "read"]


def test_patience_spins_then_yields_then_sleeps_for_longer() -> None:
    """A clock that goes on by a quarter of a millisecond whenever somebody looks."""
    done: list[str] = []
    now = itertools.count(1)
    with (
        mock.patch.object(time, "monotonic", side_effect=lambda: next(now) * 2.5e-4),
        mock.patch.object(os, "sched_yield", side_effect=lambda: done.append("yield")),
        mock.patch.object(time, "sleep", lambda seconds: done.append(f"{1e6 * seconds:.0f}")),
    ):
        patience = Patience(crowded=False)
        for _ in range(SPINS):
            patience.pause()
        assert done == []
        for _ in range(6):
            patience.pause()
        assert done == ["yield"] * 4 + ["125", "156"]
        for _ in range(100):
            patience.pause()
        assert done[-1] == "1000"
        done.clear()
        Patience(crowded=True).pause()
        assert done == ["yield"]


def test_patience_spins_where_there_are_processors() -> None:
    idle, crowded = Patience(crowded=False), Patience(crowded=True)
    assert not crowded.spinning
    for _ in range(SPINS):
        assert idle.spinning
        idle.pause()
    assert not idle.spinning
    assert idle.waited_s == 0.0
    for _ in range(50):
        crowded.pause()
        idle.pause()
    assert idle.waited_s > 0.0
    while crowded.waited_s < 0.02:
        crowded.pause()
    began = crowded.waited_s
    crowded.pause()
    assert crowded.waited_s - began >= 0.0009  # a sleep of a millisecond by now


def test_processors_are_counted_over_all_ranks() -> None:
    """Ranks bound to a processor each have as many as they are, and may spin."""
    with mock.patch.object(os, "sched_getaffinity", side_effect=[{3}, {900, 3, 5000}]):
        first, second = two_boards()
    assert first.processors() == second.processors() == 2
