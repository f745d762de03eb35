"""Tensors of a template that share memory without being one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from shard_ckpt._match import Target

_MOST_PARTS = 10_000  # of one pair of tensors; each is read and compared by itself


def shared_parts(targets: Sequence[Target]) -> Iterator[tuple[Target, Target]]:
    """Yield the parts of targets that are the same elements of memory, in pairs. Local.

    Of a template that has elements 0 to 3 and 2 to 5 of one array, the last two of the former and
    the first two of the latter: the checkpoint must hold the same for both.

    Raises:
        ValueError: what two targets share are not the same elements, or too many parts; or elements
            of one target share memory.

    **Memory**: 8 bytes for each run of elements, where tensors that are not contiguous lie among
    others.
    """
    held = [target for target in targets if target.leaf.tensor.numel()]
    held.sort(key=lambda target: (str(target.leaf.tensor.device), target.leaf.tensor.data_ptr()))
    before: list[tuple[int, Target]] = []  # with where their memory ends
    for target in held:
        tensor = target.leaf.tensor
        if _overlaps_itself(tensor):
            raise ValueError(
                f"{target.leaf.label}: elements share memory, as strides {tensor.stride()} of "
                f"shape {tuple(tensor.shape)} say; load into a tensor of its own, such as a clone()"
            )
        before = [
            (end, other)
            for end, other in before
            if end > tensor.data_ptr() and other.leaf.tensor.device == tensor.device
        ]
        for _, other in before:
            yield from _shared(other, target)
        last = sum((size - 1) * stride for size, stride in _dims(tensor))
        before.append((tensor.data_ptr() + (last + 1) * tensor.element_size(), target))


def _shared(one: Target, other: Target) -> Iterator[tuple[Target, Target]]:
    left, right = one.leaf.tensor, other.leaf.tensor
    if _apart(left, right):
        return
    size, kinds = left.element_size(), (_kind(left), _kind(right))
    for places in _shared_bytes(one, other):
        if kinds[0] != kinds[1] or any(place % size for place in places):
            raise ValueError(
                f"{one.leaf.label} and {other.leaf.label} share memory, but not the same elements "
                f"({kinds[0]} and {kinds[1]}); load one of them, or give them memory apart"
            )
        at, to, numel = (place // size for place in places)
        yield _part(one, at, numel), _part(other, to, numel)


def _kind(tensor: torch.Tensor) -> str:
    """Return what bits mean to a tensor: of views that are lazy, also what is done to them."""
    lazy = ((", conjugated", tensor.is_conj()), (", negated", tensor.is_neg()))
    return f"{tensor.dtype}{''.join(text for text, on in lazy if on)}"


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in the same memory."""
    reach = 0
    for size, stride in sorted(_dims(tensor), key=lambda dim: dim[1]):
        if stride == 0:
            return True
        if stride <= reach:  # else this dimension steps over all that smaller strides reach
            starts, length = _runs(tensor)
            return bool((starts.sort().values.diff() < length).any())
        reach += (size - 1) * stride
    return False


def _apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether it follows from strides alone that two tensors share nothing.

    Columns 0 and 1, and columns 2 to 4, of a matrix with rows of 5: all runs of the former begin at
    multiples of 5 and end 2 later, those of the latter lie in the 3 that are left.
    """
    (length, dims), (other_length, other_dims) = _runs_by_strides(one), _runs_by_strides(other)
    width = math.gcd(*(stride for _, stride in (*dims, *other_dims)))
    if width == 0:
        return False
    distance = (other.data_ptr() - one.data_ptr()) % width
    return length <= distance and distance + other_length <= width


def _shared_bytes(one: Target, other: Target) -> Iterator[tuple[int, int, int]]:
    """Yield what two targets share: which byte of one, which of the other, and how many."""
    (left, left_bytes), (right, right_bytes) = _runs(one.leaf.tensor), _runs(other.leaf.tensor)
    ordered, numbers = right.sort()
    low = torch.searchsorted(ordered, left - right_bytes, right=True)
    high = torch.searchsorted(ordered, left + left_bytes)
    if int((high - low).sum()) > _MOST_PARTS:
        raise ValueError(
            f"{one.leaf.label} and {other.leaf.label} share memory in more than {_MOST_PARTS} "
            f"places; load one of them, or give them memory apart"
        )
    for number in (high > low).nonzero().view(-1).tolist():
        begin = int(left[number])
        for place in range(int(low[number]), int(high[number])):
            other_begin = int(ordered[place])
            start = max(begin, other_begin)
            stop = min(begin + left_bytes, other_begin + right_bytes)
            at = number * left_bytes + start - begin
            to = int(numbers[place]) * right_bytes + start - other_begin
            yield at, to, stop - start


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return where each run of consecutive bytes begins, int64 ``[runs]``, and their length."""
    length, dims = _runs_by_strides(tensor)
    starts = torch.tensor([tensor.data_ptr()], device="cpu")
    for size, stride in dims:
        steps = torch.arange(size, device="cpu") * stride
        starts = (starts[:, None] + steps).view(-1)
    return starts, length


def _runs_by_strides(tensor: torch.Tensor) -> tuple[int, list[tuple[int, int]]]:
    """Return how many bytes a run has, and how many runs follow at which distance in bytes."""
    length = tensor.element_size()
    dims = [(size, stride * length) for size, stride in _dims(tensor)]
    while dims and dims[-1][1] == length:
        length *= dims.pop()[0]
    return length, dims


def _dims(tensor: torch.Tensor) -> list[tuple[int, int]]:
    return [dim for dim in zip(tensor.shape, tensor.stride(), strict=True) if dim[0] != 1]


def _part(target: Target, first: int, numel: int) -> Target:
    start = target.leaf.start + first
    return replace(target, leaf=replace(target.leaf, start=start, stop=start + numel))
