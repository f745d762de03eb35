"""Blocks of DTensors of which one dimension is cut several times, not from left to right."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shard_ckpt._runs import Box

_Spans = list[tuple[int, int]]


class Cut(NamedTuple):
    """How one dimension of a mesh cuts a tensor.

    Attributes:
        dim: of the tensor.
        parts: how many ranks share it.
        part: which of them this one is.
        factor: ``split_factor`` of torch's ``_StridedShard``, into how many parts later dimensions
            of the mesh had cut ``dim`` before this cut was made; 1 for ``Shard``.
    """

    dim: int
    parts: int
    part: int
    factor: int


def strided_boxes(
    shape: Sequence[int], local_shape: Sequence[int], cuts: Sequence[Cut]
) -> set[Box]:
    """Return the blocks that a local part of this shape may be. Local.

    Torch has two readings of a ``_StridedShard``, which agree where sizes are divisible. FSDP over
    tensor parallelism cuts what the later cut left: of 7 rows, tensor parallelism leaves 4 and 3
    to its two ranks, and of these the last of 3 data-parallel ranks gets none and row 6. A
    tensor that is distributed by its placements has every cut applied in turn, the strided one to
    each of ``factor`` parts: the last data-parallel rank gets nothing and row 6, and the two cut
    these into row 6 and none::

        strided_boxes((7,), (1,), [Cut(0, 3, 2, 2), Cut(0, 2, 1, 1)])  {Box((6,), (1,))}
        strided_boxes((7,), (1,), [Cut(0, 3, 2, 2), Cut(0, 2, 0, 1)])  {Box((6,), (1,))}

    Args:
        shape: of the whole.
        local_shape: of this rank's part; not empty.
        cuts: in the order of the mesh's dimensions.

    Returns:
        One block in nearly every case. An empty set where neither reading gives this shape, or one
        gives it in pieces; two where both give one block, and differ.
    """
    made = _in_order_of_making(cuts)
    found = set()
    for reading in (cuts,) if made is None else (cuts, made):
        spans = [_held(size, reading, dim) for dim, size in enumerate(shape)]
        sizes = tuple(sum(stop - start for start, stop in held) for held in spans)
        if sizes != tuple(local_shape):
            continue
        if any(len(held) > 1 for held in spans):
            return set()
        found.add(Box(tuple(held[0][0] for held in spans), sizes))
    return found


def _in_order_of_making(cuts: Sequence[Cut]) -> list[Cut] | None:
    """Return the cuts without factors, as if made one after the other in this order.

    None where a factor is not the product of the parts of cuts that may have been made before.
    """
    made: dict[int, list[Cut]] = {}
    for cut in reversed(cuts):
        others = made.setdefault(cut.dim, [])
        factor = 1
        for place in range(len(others) + 1):
            if factor == cut.factor:
                others.insert(place, cut._replace(factor=1))
                break
            if place < len(others):
                factor *= others[place].parts
        else:
            return None
    return [cut for others in made.values() for cut in others]


def _held(size: int, cuts: Sequence[Cut], dim: int) -> _Spans:
    """Return what the cuts of a dimension leave of ``[0, size)``, one after another."""
    held: _Spans = [(0, size)] if size else []
    for cut in cuts:
        if cut.dim != dim:
            continue
        groups = [_chunk(held, cut.factor, number) for number in range(cut.factor)]
        held = _joined(span for group in groups for span in _chunk(group, cut.parts, cut.part))
    return held


def _chunk(spans: _Spans, parts: int, part: int) -> _Spans:
    """Return a part as ``torch.chunk`` makes them: all of one length but for the last."""
    length = -(-sum(stop - start for start, stop in spans) // parts)
    result, at = [], 0
    for start, stop in spans:
        low = max(start, start + part * length - at)
        high = min(stop, start + (part + 1) * length - at)
        if low < high:
            result.append((low, high))
        at += stop - start
    return result


def _joined(spans: Iterable[tuple[int, int]]) -> _Spans:
    result: _Spans = []
    for start, stop in spans:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result
