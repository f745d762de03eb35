"""What a rank does in each collective over shared memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from shard_comm._board import ARRIVED, DONE
from shard_comm._tree import block_numel, reduce_terms, sum_parts, tree_sum_wide
from shard_comm._turn import Body, Turn

CHUNK_BYTES = 4 << 20
"""Staging memory of one input; two of these are in use when the input is larger."""

_SMALL_BYTES = 32 << 10

Read = Callable[[int, int, Callable[[int], torch.Tensor]], None]
"""Takes columns ``[low, high)``; the function gives a rank's ``[rows, high - low]``."""

Fold = Callable[[list[torch.Tensor], torch.Tensor], None]
"""Reduces terms ``[n]`` in rank order into the second argument ``[n]``."""


def gather(turn: Turn, out: torch.Tensor, inp: torch.Tensor) -> Body:
    """Copy every rank's input into its row of ``out``."""
    rows = out.view(turn.size, inp.numel())
    turn.enlarge(out)

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        for rank in range(turn.size):
            into, part = rows[rank, low:high], theirs(rank)[0]
            if into.data_ptr() != part.data_ptr():
                into.copy_(part)

    return by_columns(turn, inp.view(1, -1), read, showing=True)


def scatter(turn: Turn, out: torch.Tensor, inp: torch.Tensor, fold: Fold) -> Body:
    """Fold this rank's row of every rank's input."""
    flat = out.view(-1)

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        terms = [theirs(rank)[turn.rank] for rank in range(turn.size)]
        fold(terms, flat[low:high])

    return by_columns(turn, inp.view(turn.size, out.numel()), read, showing=True, unread=turn.rank)


def scatter_sum(
    turn: Turn,
    out: torch.Tensor,
    inp: torch.Tensor,
    own: Sequence[torch.Tensor],
    divisor: int,
    *,
    donated: bool,
) -> Body:
    """Add this rank's row of every rank's input, its own as given apart, and divide the sum."""
    flat = out.view(-1)

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        rows = [theirs(rank)[turn.rank] for rank in range(turn.size)]
        sum_parts(rows, flat[low:high], mine=turn.rank, own=own, skip=low, divisor=divisor)

    rows = inp.view(turn.size, out.numel())
    return by_columns(turn, rows, read, showing=True, unread=turn.rank, donated=donated)


def sum_all_wide(turn: Turn, out: torch.Tensor, flat: torch.Tensor, divisor: int) -> Body:
    """Add every rank's input in ``out``'s wider dtype, each divided first; everyone adds all."""

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        terms = [theirs(rank)[0] for rank in range(turn.size)]
        tree_sum_wide(terms, out[low:high], divisor=divisor)

    return by_columns(turn, flat.view(1, -1), read, showing=True)


def exchange(turn: Turn, out: torch.Tensor, inp: torch.Tensor) -> Body:
    """Copy this rank's row of every rank's input."""
    width = inp.numel() // turn.size
    rows = out.view(turn.size, width)

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        for rank in range(turn.size):
            rows[rank, low:high].copy_(theirs(rank)[turn.rank])

    return by_columns(turn, inp.view(turn.size, width), read, showing=True, unread=turn.rank)


def broadcast(turn: Turn, flat: torch.Tensor, src: int) -> Body:
    """Copy the input of rank ``src``."""

    def read(low: int, high: int, theirs: Callable[[int], torch.Tensor]) -> None:
        if turn.rank != src:
            flat[low:high].copy_(theirs(src)[0])

    return by_columns(turn, flat.view(1, -1), read, showing=turn.rank == src)


def reduce_all(turn: Turn, flat: torch.Tensor, op: str) -> Body:
    """Reduce a part each, and collect the parts; of small tensors everyone reduces all."""
    dtype, width = flat.dtype, min(flat.numel(), CHUNK_BYTES // flat.dtype.itemsize)
    if flat.nbytes <= _SMALL_BYTES:
        return (yield from _reduce_small(turn, flat, op))
    stage = turn.stage(2, 2, width, dtype=dtype)  # [chunk % 2, input or result, width]
    for chunk, low in enumerate(range(0, flat.numel(), width)):
        now = flat[low : low + width]
        stage[chunk % 2, 0, : now.numel()].copy_(now)
        if chunk == 0:
            turn.arrive(turn.find(stage))
        else:
            turn.reach(2 * chunk + 1)
        yield 2 * chunk + 1
        pairs = [
            stage[chunk % 2]
            if rank == turn.rank
            else turn.theirs(rank, dtype, 2, width, skip=chunk % 2 * 2 * width)
            for rank in range(turn.size)
        ]
        share = -(-now.numel() // turn.size)
        parts = [slice(r * share, min((r + 1) * share, now.numel())) for r in range(turn.size)]
        mine = parts[turn.rank]
        reduce_blocks([pair[0, mine] for pair in pairs], op, stage[chunk % 2, 1, mine])
        turn.reach(2 * chunk + 2)
        yield 2 * chunk + 2
        for part, pair in zip(parts, pairs, strict=True):
            now[part].copy_(pair[1, part])
    turn.reach(DONE)
    return stage


def _reduce_small(turn: Turn, flat: torch.Tensor, op: str) -> Body:
    if flat.numel() == 0:
        turn.arrive()
        yield ARRIVED
        turn.reach(DONE)
        return None
    stage = turn.stage(flat.numel(), dtype=flat.dtype)
    stage.copy_(flat)
    turn.arrive(turn.find(stage))
    yield ARRIVED
    terms = [
        stage if rank == turn.rank else turn.theirs(rank, flat.dtype, flat.numel())
        for rank in range(turn.size)
    ]
    reduce_terms(terms, op, flat)
    turn.reach(DONE)
    return stage


def collect(turn: Turn, packed: bytes, everyone: list[bytes]) -> Body:
    """Read every rank's bytes, however many."""
    stage = turn.stage(len(packed), dtype=torch.uint8)
    stage.copy_(torch.frombuffer(bytearray(packed), dtype=torch.uint8))
    turn.arrive(turn.find(stage), note=len(packed))
    yield ARRIVED
    for rank in range(turn.size):
        if rank == turn.rank:
            everyone.append(packed)
        else:
            data = turn.theirs(rank, torch.uint8, turn.note(rank))
            everyone.append(ctypes.string_at(data.data_ptr(), data.numel()))
    turn.reach(DONE)
    return stage


def by_columns(
    turn: Turn,
    rows: torch.Tensor,
    read: Read,
    *,
    showing: bool,
    unread: int = -1,
    donated: bool = False,
) -> Body:
    """Show ``rows`` to the others and read theirs, all at once or in chunks of columns.

    All show as many rows; nobody else reads the row ``unread`` of this rank's.

    What lies in shared memory is read where it is. Anything else passes through two staging
    buffers; then all ranks go chunk by chunk: whoever has filled chunk ``c`` has read chunk
    ``c - 1``, so the buffer of that one is free when all have filled ``c``.

    Rows that the caller ``donated`` are kept until everyone has read them, which nobody waits for.
    """
    count, numel = rows.shape
    dtype = rows.dtype
    if numel == 0:
        turn.arrive()
        yield ARRIVED
        turn.reach(DONE)
        return None
    width = min(numel, max(CHUNK_BYTES // (count * dtype.itemsize), 1))
    place = turn.find(rows) if showing else None
    turn.enlarge(rows)
    stage: torch.Tensor | None = None
    if showing and place is None:
        stage = turn.stage(min(-(-numel // width), 2), count, width, dtype=dtype)
        place = turn.find(stage)
        _fill(stage[0], rows[:, :width], unread)
    turn.arrive(place, note=int(stage is not None))
    yield ARRIVED
    staged = {r: r != turn.rank and turn.note(r) == 1 for r in range(turn.size)}
    whole = stage is None and not any(staged.values())
    turn.exposed = not all(staged[rank] for rank in staged if rank != turn.rank)
    step = numel if whole else width
    for chunk, low in enumerate(range(0, numel, step)):
        high = min(low + step, numel)
        if chunk:
            if stage is not None:
                _fill(stage[chunk % 2], rows[:, low:high], unread)
            turn.reach(chunk + 1)
            yield chunk + 1

        def theirs(rank: int, chunk: int = chunk, low: int = low, high: int = high) -> torch.Tensor:
            if rank == turn.rank:
                return rows[:, low:high]
            if staged[rank]:
                skip = chunk % 2 * count * width
                return turn.theirs(rank, dtype, count, width, skip=skip)[:, : high - low]
            return turn.theirs(rank, dtype, count, numel)[:, low:high]

        read(low, high, theirs)
    turn.reach(DONE)
    if showing and stage is None:
        if donated:
            return rows
        yield DONE
    return stage


def _fill(into: torch.Tensor, rows: torch.Tensor, unread: int) -> None:
    """Copy what others read."""
    for row in range(rows.shape[0]):
        if row != unread:
            into[row, : rows.shape[1]].copy_(rows[row])


def reduce_blocks(terms: list[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce block by block, so that sums of sums stay in the cache; same bits as in one go."""
    if len(terms) == 2:
        reduce_terms(terms, op, out)
        return
    width = block_numel(len(terms))
    for low in range(0, out.numel(), width):
        block = slice(low, low + width)
        reduce_terms([term[block] for term in terms], op, out[block])


def folding(op: str) -> Fold:
    """Return what reduces terms in their own dtype."""
    return lambda terms, out: reduce_blocks(terms, op, out)


def adding(divisor: int) -> Fold:
    """Return what adds terms in the wider dtype of the result, each divided first."""
    return lambda terms, out: tree_sum_wide(terms, out, divisor=divisor)
