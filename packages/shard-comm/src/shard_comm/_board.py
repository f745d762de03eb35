"""Where ranks of one host write down what they call and how far they are."""

from __future__ import annotations

import os
import platform
import threading
import zlib
from dataclasses import dataclass
from functools import cached_property

import torch

from shard_comm._arena import Place
from shard_comm._mapping import PAGE, round_up
from shard_comm._shared_file import SharedFile
from shard_comm._stories import STORY_BYTES, Stories

SLOTS = 256
"""Collectives that one rank may have under way; the next one waits for the oldest."""
ARRIVED = 1
DONE = (1 << 24) - 1
"""Step of a rank that reads nothing of a collective any more."""

_LINE_WORDS = 8  # a cache line of int64
_REASON_BYTES = 1024  # [bytes of text, process, processors, text]
_MASK_BYTES = 128
_TEXT_BYTES = _REASON_BYTES - 16 - _MASK_BYTES
_KINDS = (
    "barrier",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "all_gather_object",
)
_OPS = ("", "sum", "max", "min")
_DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_STEP, _KIND, _NUMEL, _SEGMENT, _SEGMENT_BYTES, _OFFSET, _NOTE, _LABEL = range(_LINE_WORDS)
_LABEL_BYTES = 128


@dataclass(frozen=True)
class Call:
    """What ranks must agree on.

    Attributes:
        kind: the operation's name.
        numel: elements of the tensor that the caller passed.
        dtype: its dtype, if there is a tensor.
        op: of a reduction.
        src: of a broadcast.
        label: what messages add, such as the caller's name for the tensor.
    """

    kind: str
    numel: int = 0
    dtype: torch.dtype | None = None
    op: str = ""
    src: int = -1
    label: str = ""

    def __str__(self) -> str:
        words = [self.kind]
        if self.op:
            words.append(self.op)
        if self.src >= 0:
            words.append(f"from {self.src}")
        if self.dtype is None:
            return f"{' '.join(words)}(){self.label}"
        what = f"of {self.numel} {str(self.dtype).removeprefix('torch.')}"
        return f"{' '.join(words)} {what}{self.label}"

    @cached_property
    def label_text(self) -> bytes:
        """As much of the label as others can read."""
        return self.label.encode()[:_LABEL_BYTES]

    @cached_property
    def label_code(self) -> int:
        """How long the label's text is, and a checksum of the whole label; 0 without one."""
        if not self.label:
            return 0
        return len(self.label_text) << 32 | zlib.crc32(self.label.encode())

    @cached_property
    def code(self) -> int:
        """All but ``numel`` and the label in one number."""
        dtype = 0 if self.dtype is None else _DTYPE_CODES[self.dtype] + 1
        code = _KINDS.index(self.kind) | _OPS.index(self.op) << 8 | dtype << 16
        return code | (self.src + 1) << 32

    @classmethod
    def read(cls, code: int, numel: int, label: str) -> Call:
        """Return the call with this code."""
        dtype = code >> 16 & 0xFFFF
        return cls(
            _KINDS[code & 0xFF],
            numel,
            _DTYPES[dtype - 1] if dtype else None,
            _OPS[code >> 8 & 0xFF],
            (code >> 32) - 1,
            label,
        )


class Board:
    """The control block of a group: a ring of slots and a last word for each rank.

    Collectives are numbered, and number ``n`` uses slot ``n % SLOTS`` of every rank. A rank
    writes its own slots only: what it calls and where its data lie, then the step it is at.
    Steps of a slot only grow, so ``reached`` stays true.

    Memory is ordered by ``fence()``: between writing data and the step that announces it, and
    between reading that step and the data. On x86 the machine orders as much by itself.

    Args:
        file: the file that all ranks have open.
        rank: this rank.
        size: number of ranks.

    Attributes:
        stories: what ranks wait for.
    """

    def __init__(self, file: SharedFile, rank: int, size: int) -> None:
        self._bytes = file.map(PAGE, self.nbytes(size))
        self.words = self._bytes.cast("q")
        self.size = size
        self._own = rank * SLOTS * _LINE_WORDS
        self._labels = size * SLOTS * _LINE_WORDS * 8
        self._reasons = self._labels + size * SLOTS * _LABEL_BYTES
        self.rank = rank
        self._fence = None if platform.machine() in ("x86_64", "AMD64") else _Fence()
        stories = self._reasons + size * _REASON_BYTES
        self.stories = Stories(
            self._bytes[stories : stories + size * STORY_BYTES], rank, size, fence=self._fence
        )
        start = self._reason_at(rank)
        self.words[start // 8 + 1] = os.getpid()
        mask = sum(1 << cpu for cpu in os.sched_getaffinity(0) if cpu < 8 * _MASK_BYTES)
        self._bytes[start + 16 : start + 16 + _MASK_BYTES] = mask.to_bytes(_MASK_BYTES, "little")
        self.peers = [r for r in range(size) if r != rank]
        self._peer_slots = [r * SLOTS * _LINE_WORDS for r in self.peers]

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of the board of ``size`` ranks, in whole pages."""
        raw = size * (SLOTS * (_LINE_WORDS * 8 + _LABEL_BYTES) + _REASON_BYTES + STORY_BYTES)
        return round_up(raw, PAGE)

    def fence(self) -> None:
        """Order what this rank reads and writes in the file before and after."""
        if self._fence is not None:
            self._fence()

    def post(self, seq: int, call: Call, place: Place | None = None, note: int = 0) -> None:
        """Announce this rank's call number ``seq``, where its data lie, and a number."""
        slot = self._own + seq % SLOTS * _LINE_WORDS
        words = self.words
        words[slot] = seq << 24  # who is late for a barrier in this slot sees that it is past
        self.fence()
        words[slot + _KIND] = call.code
        words[slot + _NUMEL] = call.numel
        words[slot + _NOTE] = note
        words[slot + _LABEL] = call.label_code
        if call.label:
            start, text = self._label_at(self.rank, seq), call.label_text
            self._bytes[start : start + len(text)] = text
        words[slot + _SEGMENT] = -1 if place is None else place.segment
        if place is not None:
            words[slot + _SEGMENT_BYTES] = place.segment_bytes
            words[slot + _OFFSET] = place.offset
        self.reach(seq, ARRIVED)

    def reach(self, seq: int, step: int) -> None:
        """Announce that this rank is at ``step`` of call number ``seq``."""
        self.fence()
        self.words[self._own + seq % SLOTS * _LINE_WORDS] = seq << 24 | step

    def reached(self, seq: int, step: int) -> bool:
        """Whether every other rank is at ``step`` of call number ``seq``, or past it."""
        words, line, wanted = self.words, seq % SLOTS * _LINE_WORDS, seq << 24 | step
        for slot in self._peer_slots:
            if words[slot + line] < wanted:
                return False
        self.fence()
        return True

    def meet(self, seq: int, rounds: int) -> bool:
        """Call a barrier; return whether all others came while this rank looked ``rounds`` times.

        The shortest call, and the one that must be fast. This rank is done as it arrives: it
        reads no data, and where another rank's slot has gone on, that rank has agreed.
        """
        words, line, arrived = self.words, seq % SLOTS * _LINE_WORDS, seq << 24 | ARRIVED
        words[self._own + line + _KIND] = 0
        fence = self._fence
        if fence is not None:
            fence()
        words[self._own + line] = seq << 24 | DONE
        for slot in self._peer_slots:
            at = slot + line
            while words[at] < arrived:
                rounds -= 1
                if rounds < 0:
                    return False
            if fence is not None:
                fence()
            if words[at + _KIND]:
                return False
        return True

    def behind(self, seq: int, step: int) -> list[int]:
        """Return the ranks that are not there yet."""
        line, wanted = seq % SLOTS * _LINE_WORDS, seq << 24 | step
        peers = zip(self.peers, self._peer_slots, strict=True)
        return [rank for rank, slot in peers if self.words[slot + line] < wanted]

    def agrees(self, seq: int, call: Call) -> bool:
        """Whether every other rank made the same call number ``seq``."""
        code, numel, label = call.code, call.numel, call.label_code
        words, line = self.words, seq % SLOTS * _LINE_WORDS
        for slot in self._peer_slots:
            at = slot + line
            if words[at + _KIND] != code or (
                code and (words[at + _NUMEL] != numel or words[at + _LABEL] != label)
            ):
                self.fence()
                if words[at] >> 24 == seq:  # else it has agreed and gone on
                    return False
        return True

    def call(self, rank: int, seq: int) -> Call:
        """Return what ``rank``, which has arrived, calls; of a long label the beginning."""
        at = self._at(rank, seq)
        code, start = self.words[at + _KIND], self._label_at(rank, seq)
        text = self._bytes[start : start + (self.words[at + _LABEL] >> 32)] if code else b""
        return Call.read(code, self.words[at + _NUMEL], bytes(text).decode(errors="replace"))

    def calls(self, rank: int, most: int) -> list[str]:
        """Return in words what a rank called last, the oldest first, and how far it is."""
        slots = [self.words[self._at(rank, slot)] for slot in range(SLOTS)]
        begun = sorted(word for word in slots if word & DONE)[-most:]
        return [self._in_words(rank, word >> 24, word & DONE) for word in begun]

    def _in_words(self, rank: int, seq: int, step: int) -> str:
        call = self.call(rank, seq)
        nbytes = 0 if call.dtype is None else call.numel * call.dtype.itemsize
        state = "done" if step == DONE else "arrived" if step == ARRIVED else f"at step {step}"
        if call.kind == "barrier":  # of which a rank says no more than that
            state = "arrived"
        return f"{seq + 1}: {call}, {nbytes} bytes, {state}"

    def place(self, rank: int, seq: int) -> Place | None:
        """Return where the data of ``rank``, which has arrived, lie."""
        at = self._at(rank, seq)
        segment = self.words[at + _SEGMENT]
        if segment < 0:
            return None
        return Place(segment, self.words[at + _SEGMENT_BYTES], self.words[at + _OFFSET])

    def note(self, rank: int, seq: int) -> int:
        """Return the number that ``rank``, which has arrived, gave to ``post``."""
        return self.words[self._at(rank, seq) + _NOTE]

    def give_up(self, reason: str) -> None:
        """Leave a last word; the first one of a rank stays."""
        start = self._reason_at(self.rank)
        text = reason.encode()[:_TEXT_BYTES]
        if self.words[start // 8] == 0:
            begin = start + _REASON_BYTES - _TEXT_BYTES
            self._bytes[begin : begin + len(text)] = text
            self.fence()
            self.words[start // 8] = len(text)

    def last_words(self) -> dict[int, str]:
        """Return the reasons of the ranks that gave up."""
        found = {}
        for rank in range(self.size):
            start = self._reason_at(rank)
            length = self.words[start // 8]
            if length:
                self.fence()
                begin = start + _REASON_BYTES - _TEXT_BYTES
                text = bytes(self._bytes[begin : begin + length])
                found[rank] = text.decode(errors="replace")
        return found

    def pid(self, rank: int) -> int:
        """Return the process of a rank, as that process numbers itself."""
        return self.words[self._reason_at(rank) // 8 + 1]

    def processors(self) -> int:
        """Return how many processors the ranks have between them, once all are here."""
        union = 0
        for rank in range(self.size):
            start = self._reason_at(rank) + 16
            union |= int.from_bytes(self._bytes[start : start + _MASK_BYTES], "little")
        return union.bit_count()

    def _label_at(self, rank: int, seq: int) -> int:
        return self._labels + (rank * SLOTS + seq % SLOTS) * _LABEL_BYTES

    def _reason_at(self, rank: int) -> int:
        return self._reasons + rank * _REASON_BYTES

    def _at(self, rank: int, seq: int) -> int:
        return rank * SLOTS * _LINE_WORDS + seq % SLOTS * _LINE_WORDS


class _Fence:
    """Order memory on every machine: what precedes two rounds of a lock precedes what follows.

    One round lets an earlier access sink into it and a later one rise into it, and meet there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self) -> None:
        for _ in range(2):
            with self._lock:
                pass
