"""Two checkpoints held against each other."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shard_ckpt._check import Source, open_source
from shard_ckpt._index import TensorRecord
from shard_ckpt._inspect import inspect
from shard_ckpt._memory import bytes_of
from shard_ckpt._own_read import read_span
from shard_ckpt._progress import Progress
from shard_ckpt._values import RankValues

_WINDOW_BYTES = 4 << 20
_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One thing in which two checkpoints differ.

    Attributes:
        where: ``section: name`` of a tensor, or the path of a value.
        what: ``only in a``, ``only in b``, ``dtype``, ``shape``, ``elements`` or ``value``.
        text: how they differ.
    """

    where: str
    what: str
    text: str


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> tuple[Difference, ...]:
    """Compare what two checkpoints hold, however many ranks wrote them.

    Tensors are compared bit for bit; of floating-point ones that differ, the largest difference
    is told. Other values are compared too. Checksums are not: see ``verify``.

    Returns:
        Differences by section and name, then those of values; empty for equal checkpoints.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: a folder is not a checkpoint, or its files are missing or truncated.

    **Collective**: local.
    **Memory**: a few windows of 4 MiB.
    """
    left, right = (open_source(path) for path in (a, b))
    both = sorted(left.index.tensors.keys() | right.index.tensors.keys())
    progress = Progress(sum(r.numel * r.itemsize for r in left.index.tensors.values()))
    found: list[Difference] = []
    for tensor in both:
        one, other = left.index.tensors.get(tensor), right.index.tensors.get(tensor)
        if one is not None and other is not None:
            found.extend(_tensor_differences(left, right, one, other))
        elif one is not None:
            found.append(Difference(one.label, "only in a", f"only in {os.fspath(a)}"))
        elif other is not None:
            found.append(Difference(other.label, "only in b", f"only in {os.fspath(b)}"))
        if one is not None:
            progress.advance(one.numel * one.itemsize)
    names = (os.fspath(a), os.fspath(b))
    return (*found, *_value_differences(inspect(a).values, inspect(b).values, "state", names))


def _tensor_differences(
    left: Source, right: Source, one: TensorRecord, other: TensorRecord
) -> Iterator[Difference]:
    if one.dtype != other.dtype:
        yield Difference(one.label, "dtype", f"{one.dtype} and {other.dtype}")
    if one.shape != other.shape:
        yield Difference(one.label, "shape", f"{one.shape} and {other.shape}")
    if one.dtype != other.dtype or one.shape != other.shape:
        return
    step = max(1, _WINDOW_BYTES // one.itemsize)
    count, largest = 0, 0.0
    for start in range(0, one.numel, step):
        stop = min(one.numel, start + step)
        mine, theirs = read_span(left, one, start, stop), read_span(right, other, start, stop)
        if bytes_of(mine) == bytes_of(theirs):
            continue
        raw = [part.view(torch.uint8).view(stop - start, one.itemsize) for part in (mine, theirs)]
        count += int((raw[0] != raw[1]).any(dim=1).sum())
        if one.dtype.startswith(("F", "BF")) and one.dtype != "F4":
            apart = (mine.double() - theirs.double()).abs()
            largest = max(largest, float(apart.nan_to_num(float("inf"), float("inf")).max()))
    if count:
        by = f", by {largest:.6g} at most" if largest else ""
        text = f"{count} of {one.numel} elements differ{by}"
        yield Difference(one.label, "elements", text)


def _value_differences(
    one: Any, other: Any, path: str, names: tuple[str, str]
) -> Iterator[Difference]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted(one.keys() | other.keys(), key=repr):
            here = f"{path}[{key!r}]"
            mine, theirs = one.get(key, _ABSENT), other.get(key, _ABSENT)
            yield from _value_differences(mine, theirs, here, names)
    elif one is _ABSENT:
        yield Difference(path, "only in b", f"only in {names[1]}")
    elif other is _ABSENT:
        yield Difference(path, "only in a", f"only in {names[0]}")
    elif not _same(one, other):
        yield Difference(path, "value", f"{_short(one)} and {_short(other)}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, RankValues) or type(one) is not type(other):
        return False
    return bool(one == other) or (one != one and other != other)  # nan is like nan


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
