"""A template against an index: what fits, what is missing, what has to be read."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from shard_ckpt._collector import collector_paused
from shard_ckpt._dtypes import torch_dtype
from shard_ckpt._index import Index, TensorId, TensorRecord
from shard_ckpt._leaf import Leaf
from shard_ckpt._log import logger
from shard_ckpt._lookup import Lookup
from shard_ckpt._naming import Naming, Rename
from shard_ckpt._rename import check_patterns, check_renames, is_picked
from shard_ckpt._runs import Runs, overlaps

_NUMBERED = re.compile(r": \d+#")
_NAMES_SHOWN = 5
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True)
class Target:
    """A tensor of the template and the record that fills it."""

    leaf: Leaf
    record: TensorRecord

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """The dtype on disk."""
        dtype = torch_dtype(self.record.dtype)
        if dtype is None:
            raise AssertionError(f"{self.leaf.label}: dtype {self.record.dtype!r} was let through")
        return dtype

    def reads(self) -> Sequence[Read]:
        """Return where the elements that this rank holds lie. Local."""
        return self._reads

    @cached_property
    def _reads(self) -> tuple[Read, ...]:
        return tuple(self._find_reads())

    def _find_reads(self) -> Iterator[Read]:
        ranges = self.record.ranges
        if self.record.numel == 0:  # nothing to read, but the file must be there
            yield from (Read(part.file, part.offset, 0, self, 0) for part in ranges)
            return
        for runs, at in self.leaf.runs(0, self.leaf.stop - self.leaf.start):
            yield from self._reads_of(runs, at)

    def _reads_of(self, runs: Runs, at: int) -> Iterator[Read]:
        ranges, size = self.record.ranges, self.record.itemsize
        first = bisect_right(ranges, runs.start - self.record.reach, key=_range_start)
        for part in ranges[first:]:
            if part.start >= runs.stop:
                return
            if part.times == 1 and runs.times == 1:  # of most there are very many
                start, stop = max(part.start, runs.start), min(part.stop, runs.stop)
                if start < stop:
                    offset = part.offset + (start - part.start) * size
                    to = at + start - runs.start
                    yield Read(part.file, offset, (stop - start) * size, self, to)
                continue
            for low, to, numel in overlaps(part.runs, runs):
                yield Read(part.file, part.offset + low * size, numel * size, self, at + to)


class Read(NamedTuple):
    """Bytes ``[offset, offset + nbytes)`` of file ``file``, for a target's element ``at`` on."""

    file: int
    offset: int
    nbytes: int
    target: Target
    at: int


@collector_paused()
def match(
    leaves: Sequence[Leaf],
    index: Index,
    *,
    strict: bool,
    cast: bool,
    rename: Rename | None = None,
    only: Sequence[str] | None = None,
) -> list[Target]:
    """Pair the template's tensors with the checkpoint's. Local.

    Names of one tensor count as one: it is enough if the checkpoint has one of those that are the
    same memory in the template, or the template one of those that are tied in the checkpoint.

    Args:
        leaves: the template's tensors.
        index: what the checkpoint holds.
        strict: both must have the same names.
        cast: floating-point (or complex) values may change their dtype.
        rename: from the template's names to the checkpoint's.
        only: patterns of ``section: name``; the rest of either side is not looked at.

    Raises:
        ValueError: names, shapes or dtypes do not fit.
        TypeError: ``rename`` or ``only`` is not as described.
    """
    check_patterns(only, leaves)
    check_renames(rename, leaves, strict=strict)
    picked = [leaf for leaf in leaves if is_picked(leaf.label, only)]
    lookup = Lookup(index.tensors, rename)
    found = {leaf.id: tensor for leaf in leaves if (tensor := lookup.find(leaf)) is not None}
    missing = [_asked_for(leaf, lookup.wanted(leaf)) for leaf in _unfilled(picked, found)]
    owners = {_tie_group(index.tensors[tensor]) for tensor in found.values()}
    strays = [
        record
        for _, record in sorted(index.tensors.items())
        if _tie_group(record) not in owners and is_picked(record.label, only)
    ]
    unexpected = [record.label for record in strays]
    if strict and (missing or unexpected):
        sections = {leaf.section for leaf in picked}
        alone = sections and sections.isdisjoint(record.section for record in strays)
        advice = _only(sections) if alone and not missing else ""
        raise ValueError("; ".join(_complaints(missing, unexpected)) + advice)
    if missing or unexpected:
        logger.warning(
            "loaded in part: the checkpoint lacks %s; the template lacks %s",
            _listed(missing),
            _listed(unexpected),
        )
    targets = [Target(leaf, index.tensors[found[leaf.id]]) for leaf in picked if leaf.id in found]
    problems = [text for text in (_misfit(target, cast) for target in targets) if text is not None]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(problems[0] + more)
    return targets


def _unfilled(leaves: Sequence[Leaf], found: Container[TensorId]) -> list[Leaf]:
    """Return the leaves that no stored tensor fills, under any of their names.

    Of a piece without elements nobody can tell what it is one with: it counts as filled where any
    such is. A rank that holds elements tells.
    """
    lacking = [leaf for leaf in leaves if leaf.id not in found]
    filled = {leaf.alias_key for leaf in leaves if leaf.id in found} if lacking else set()
    return [leaf for leaf in lacking if leaf.numel == 0 or leaf.alias_key not in filled]


def _tie_group(record: TensorRecord) -> tuple[str, TensorId]:
    """Return what is equal for a section's names of one tensor."""
    return record.section, record.tie or (record.section, record.name)


def _asked_for(leaf: Leaf, tensor: TensorId) -> str:
    return leaf.label if leaf.id == tensor else f"{tensor[0]}: {tensor[1]} (for {leaf.name})"


def _range_start(part: tuple[int, ...]) -> int:
    return part[0]


def _misfit(target: Target, cast: bool) -> str | None:
    leaf, record, stored = target.leaf, target.record, target.stored_dtype
    if leaf.shape != record.shape:
        return f"{leaf.label}: expected shape {leaf.shape}, got {record.shape} from the checkpoint"
    wanted = leaf.tensor.dtype
    if wanted == stored:
        return None
    text = f"{leaf.label}: expected dtype {wanted}, got {stored} from the checkpoint"
    if not _may_cast(leaf, stored):
        return f"{text}; this is never cast: integers, booleans and step counters keep their dtype"
    if not cast:
        return f"{text}; pass cast=True to convert"
    if not _can_convert(stored, wanted):
        return f"{text}; torch has no such conversion"
    return None


def _may_cast(leaf: Leaf, stored: torch.dtype) -> bool:
    wanted = leaf.tensor.dtype
    if leaf.name.endswith("#step"):
        return False
    both_float = wanted.is_floating_point and stored.is_floating_point
    return both_float or (wanted.is_complex and stored.is_complex)


def _can_convert(stored: torch.dtype, wanted: torch.dtype) -> bool:
    try:
        torch.zeros(1, dtype=torch.uint8).new_empty(1, dtype=wanted).copy_(
            torch.empty(1, dtype=stored)
        )
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _only(sections: Collection[str]) -> str:
    patterns = ", ".join(f'"{section}: *"' for section in sorted(sections))
    return f", or only=[{patterns}] to leave other sections alone"


def _complaints(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What does not match, and what to do about it."""
    parts = [
        f"the {side} lacks {_listed(names)}"
        for side, names in (("checkpoint", missing), ("template", unexpected))
        if names
    ]
    if any(_NUMBERED.search(name) for name in (*missing, *unexpected)):
        parts.append(
            "states without names are those of a torch.optim optimizer's state_dict(); use "
            "torch's get_optimizer_state_dict(), or an optimizer of shard_optim"
        )
    elif not missing and all("#" in name for name in unexpected):
        parts.append(
            "an optimizer that has not stepped has no states yet; take the template from "
            "state_dict(allocate=True)"
        )
    if wrappers := _wrappers_between(missing, unexpected):
        parts.append(f"names differ by wrappers: pass rename=Naming(strip={wrappers})")
    return [*parts, "pass strict=False to load only what both have"]


def _wrappers_between(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, ...]:
    """Return the components without which some of the names on both sides are the same."""
    naming = Naming(strip=_WRAPPERS)

    def bare(label: str) -> str:
        section, _, name = label.partition(": ")
        return f"{section}: {naming.bare(name)}"

    sides = [{label: bare(label) for label in labels} for labels in (missing, unexpected)]
    common = set(sides[0].values()) & set(sides[1].values())
    wrapped = [label for side in sides for label, text in side.items() if text in common]
    parts = {part for label in wrapped for part in label.partition(": ")[2].split(".")}
    return tuple(part for part in _WRAPPERS if part in parts)


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown
