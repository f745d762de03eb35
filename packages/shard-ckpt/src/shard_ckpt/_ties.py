"""Tensors that are one, by declaration or in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from shard_ckpt._check import Source
from shard_ckpt._collector import collector_paused
from shard_ckpt._fill import fill
from shard_ckpt._leaf import Leaf
from shard_ckpt._match import Target
from shard_ckpt._memory import bytes_of, flat_range
from shard_ckpt._overlap import shared_parts
from shard_ckpt._state import FlatState
from shard_ckpt._values import TensorRef

WINDOW_BYTES = 4 << 20

Twins = Sequence[tuple[Target, Target]]
"""Pairs of targets that are the same memory in the template and two tensors in the checkpoint."""


def declare_ties(flat: FlatState, ties: Mapping[str, str]) -> FlatState:
    """Make tensors one that are declared to be, in every section that has the stored one. Local.

    A tensor that a section has under both names is stored once, if both hold the same bits. A name
    that a section lacks is added, so that the checkpoint has the tensor under it too.

    Args:
        flat: a state; a section's values that name tensors are changed.
        ties: for a name, the one that it shares its tensor with.

    Raises:
        ValueError: no section has the tensor, or the two are not alike.
    """
    leaves = {leaf.id: leaf for leaf in flat.leaves}
    for name, stored in ties.items():
        owners = [leaf for leaf in flat.leaves if leaf.name == stored]
        if not owners:
            raise ValueError(f"ties: {name} is tied to {stored}, which the state does not have")
        for owner in owners:
            mine = leaves.get((owner.section, name))
            if mine is None:
                section = flat.values[owner.section]
                if not isinstance(section, dict) or name in section:
                    raise ValueError(f"ties: {owner.section}: {name} is there, and no tensor")
                section[name] = TensorRef(owner.section, name)
            else:
                _check_alike(mine, owner)
            leaves[owner.section, name] = replace(owner, name=name)
    return replace(flat, leaves=sorted(leaves.values(), key=lambda leaf: leaf.id))


def _check_alike(mine: Leaf, owner: Leaf) -> None:
    text = f"ties: {mine.label} is declared to be {owner.name}, but they differ"
    for what in ("shape", "dtype", "start", "stop", "box", "shards"):
        left, right = getattr(mine, what), getattr(owner, what)
        if left != right:
            raise ValueError(f"{text} in {what}: {left} and {right}; tie them, or declare no tie")
    if mine.alias_key == owner.alias_key:
        return
    step = WINDOW_BYTES // mine.tensor.element_size()
    parts = [flat_range(leaf.tensor, start=0, stop=leaf.tensor.numel()) for leaf in (mine, owner)]
    for at in range(0, len(parts[0]), step):
        left, right = (part[at : at + step].view(torch.uint8) for part in parts)
        if not torch.equal(left, right):
            raise ValueError(f"{text} in their values; tie them, or declare no tie")


@collector_paused()
def part_twins(targets: Sequence[Target]) -> tuple[list[Target], Twins]:
    """Keep one target of those that are the same memory. Local.

    Returns:
        What to fill, and pairs of which the checkpoint must hold the same: not those that are one
        tensor there too. Of targets that share only part of their memory, those parts.

    Raises:
        ValueError: what targets share cannot be told.
    """
    first: dict[object, Target] = {}
    twins = []
    for number, target in enumerate(targets):
        key = target.leaf.alias_key
        owner = first.setdefault(number if key is None else key, target)
        if owner.record.ranges != target.record.ranges:
            twins.append((owner, target))
    kept = list(first.values())
    return kept, [*twins, *shared_parts(kept)]


def check_twins(source: Source, twins: Twins) -> None:
    """Check that files hold the same bits for what is the same memory here. Local.

    Raises:
        ValueError: they do not.
        OSError: reading failed.

    **Memory**: 8 MiB.
    """
    for one, other in twins:
        text = (
            f"{_name(one)} and {_name(other)} share memory here, but differ in the files; give "
            f"them memory apart, or rename both to the one that counts"
        )
        if one.record.dtype != other.record.dtype:
            raise ValueError(f"{text} (dtypes {one.record.dtype} and {other.record.dtype})")
        for left, right in zip(_windows(source, one), _windows(source, other), strict=True):
            if bytes_of(left) != bytes_of(right):
                raise ValueError(text)


def _windows(source: Source, target: Target) -> Iterator[torch.Tensor]:
    leaf = target.leaf
    step = WINDOW_BYTES // target.stored_dtype.itemsize
    for start in range(leaf.start, leaf.stop, step):
        stop = min(leaf.stop, start + step)
        part = torch.empty(stop - start, dtype=target.stored_dtype)
        fill(source, [replace(target, leaf=replace(leaf, tensor=part, start=start, stop=stop))])
        yield part


def _name(target: Target) -> str:
    leaf, record = target.leaf, target.record
    return leaf.label if leaf.name == record.name else f"{leaf.label} (stored as {record.name})"
