"""What each rank waits for, where the others can read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

STORY_BYTES = 512  # [heartbeats, bytes of text, awaited ranks, text]
_MASK_BYTES = 128
_TEXT_BYTES = STORY_BYTES - 16 - _MASK_BYTES
_BEATS = 3
_TALE = 1 << 32  # heartbeats of one uninterrupted story, at most


class Stories:
    """One line for each rank that has waited for a while: for what, and for whom.

    Ranks that wait for each other would wait for ever: one is in a barrier, say, and the other at
    a shared array. A rank tells its story again and again, and is silent before it does anything
    that another one may wait for. So whoever sees stories three times, of ranks none of which was
    silent in between, knows that each was told after the last thing that any of them did.

    Args:
        memory: ``size * STORY_BYTES`` bytes that all ranks map, zero at first.
        rank: this rank.
        size: number of ranks.
        fence: orders memory, where the machine does not by itself.
    """

    def __init__(
        self, memory: memoryview, rank: int, size: int, *, fence: Callable[[], None] | None
    ) -> None:
        self._bytes = memory
        self._words = memory.cast("q")
        self._rank = rank
        self._size = size
        self._fence = fence

    def tell(self, what: str, awaited: Sequence[int]) -> None:
        """Say what this rank waits for, and for which ranks. Local."""
        start = self._rank * STORY_BYTES
        beats, length = self._words[start // 8 : start // 8 + 2]
        if not length:  # whoever sees the story must not count heartbeats of an earlier one
            beats = (beats // _TALE + 1) * _TALE
            self._words[start // 8] = beats
        mask = sum(1 << rank for rank in awaited if rank < 8 * _MASK_BYTES)
        text = what.encode()[:_TEXT_BYTES]
        self._bytes[start + 16 : start + 16 + _MASK_BYTES] = mask.to_bytes(_MASK_BYTES, "little")
        begin = start + STORY_BYTES - _TEXT_BYTES
        self._bytes[begin : begin + len(text)] = text
        if self._fence is not None:
            self._fence()
        self._words[start // 8 + 1] = len(text)
        self._words[start // 8] = beats + 1

    def hush(self) -> None:
        """Say that this rank does not only wait. Local."""
        self._words[self._rank * STORY_BYTES // 8 + 1] = 0

    def beats(self) -> list[int]:
        """Return how often each rank has told what it waits for. Local."""
        return [self._words[rank * STORY_BYTES // 8] for rank in range(self._size)]

    def continues(self, since: Sequence[int]) -> bool:
        """Whether no rank has begun another story since ``beats()`` was this. Local."""
        return [each // _TALE for each in self.beats()] == [each // _TALE for each in since]

    def told(self) -> dict[int, str]:
        """Return what the ranks wait for that wait now. Local."""
        found = {}
        for rank in range(self._size):
            start = rank * STORY_BYTES
            length = self._words[start // 8 + 1]
            if length:
                begin = start + STORY_BYTES - _TEXT_BYTES
                text = bytes(self._bytes[begin : begin + length])
                found[rank] = text.decode(errors="replace")
        return found

    def knot(self, since: Sequence[int]) -> dict[int, str]:
        """Return what the ranks wait for that wait for each other, this one among them. Local.

        Args:
            since: ``beats()`` at a time when this rank had told what it waits for.
        """
        told = self.told()
        awaited = {rank: self._awaited(rank) for rank in told}
        if self._fence is not None:
            self._fence()
        if not self.continues(since):
            return {}
        beats = self.beats()
        bound = {rank for rank in told if rank == self._rank or beats[rank] >= since[rank] + _BEATS}
        while True:
            held = {rank for rank in bound if awaited[rank] & bound}
            if held == bound:
                break
            bound = held
        return {rank: told[rank] for rank in sorted(bound)} if self._rank in bound else {}

    def _awaited(self, rank: int) -> set[int]:
        start = rank * STORY_BYTES + 16
        mask = int.from_bytes(self._bytes[start : start + _MASK_BYTES], "little")
        return {other for other in range(self._size) if mask >> other & 1}
