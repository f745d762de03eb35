"""What each rank waits for, where the others can read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

STORY_BYTES = 512  # [chapter and heartbeats, bytes of text, awaited ranks, text]
_MASK_BYTES = 128
_TEXT_BYTES = STORY_BYTES - 16 - _MASK_BYTES
_BEATS = 3
_CHAPTER = 1 << 32  # of heartbeats; far more than one wait has


class Stories:
    """One line for each rank that has waited for a while: for what, and for whom.

    Ranks that wait for each other would wait for ever: one is in a barrier, say, and the other at
    a shared array. A rank tells its story again and again, each time after it has looked whether
    it can go on, and a new chapter once it has gone on and waits again. Where all of a ring of
    ranks told theirs three times, while no rank got any further, none of them ever will.

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
        self._tells = False

    def tell(self, what: str, awaited: Sequence[int]) -> None:
        """Say what this rank waits for, and for which ranks. Local."""
        start = self._rank * STORY_BYTES
        if not self._tells:
            self._words[start // 8] += _CHAPTER
        mask = sum(1 << rank for rank in awaited if rank < 8 * _MASK_BYTES)
        text = what.encode()[:_TEXT_BYTES]
        self._bytes[start + 16 : start + 16 + _MASK_BYTES] = mask.to_bytes(_MASK_BYTES, "little")
        begin = start + STORY_BYTES - _TEXT_BYTES
        self._bytes[begin : begin + len(text)] = text
        if self._fence is not None:
            self._fence()
        self._words[start // 8 + 1] = len(text)
        self._words[start // 8] += 1
        self._tells = True

    def hush(self) -> None:
        """Say, before others can see it, that this rank goes on. Local."""
        if self._tells:
            self._tells = False
            self._words[self._rank * STORY_BYTES // 8 + 1] = 0
            if self._fence is not None:
                self._fence()

    def beats(self) -> list[int]:
        """Return each rank's chapter, and how often it told what it waits for. Local."""
        return [self._words[rank * STORY_BYTES // 8] for rank in range(self._size)]

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

    def knot(self, since: list[int]) -> dict[int, str]:
        """Return what the ranks wait for that wait for each other, this one among them. Local.

        Args:
            since: ``beats()`` when this rank's wait began, or any rank last got further; brought up
                to date where one did.
        """
        told = self.told()
        awaited = {rank: self._awaited(rank) for rank in told}
        if self._fence is not None:
            self._fence()
        beats = self.beats()
        if any(now // _CHAPTER != then // _CHAPTER for now, then in zip(beats, since, strict=True)):
            since[:] = beats  # of all: a rank that stands still may wait for what was done
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
