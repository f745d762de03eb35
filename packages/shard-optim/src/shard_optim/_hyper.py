"""Hyper-parameters: numbers, and the range that they may be in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from shard_comm import Comm
from shard_optim._groups import Group

_WORDS = {2: "two", 3: "three"}


def check_numbers(group: Group, names: Iterable[str], where: str) -> None:
    """Check that hyper-parameters are numbers, or scalar tensors.

    Args:
        group: all hyper-parameters.
        names: those to check.
        where: how the message begins, ``""`` or ``"group 1 (w): "``.

    Raises:
        TypeError: one is something else.

    **Collective**: local.
    """
    for name in names:
        if not _is_number(group[name]):
            raise TypeError(
                f"{where}expected {name} to be a number or a scalar tensor, got {group[name]!r}"
            )


def check_at_least_0(group: Group, names: Iterable[str], where: str) -> None:
    """Check hyper-parameters that may not be negative.

    Args:
        group: all hyper-parameters.
        names: those to check.
        where: how the message begins.

    Raises:
        TypeError: one is no number.
        ValueError: one is below 0 or NaN.

    **Collective**: local.
    """
    for name in names:
        check_numbers(group, (name,), where)
        if not group[name] >= 0:
            raise ValueError(f"{where}expected {name} >= 0, got {group[name]}")


def check_counts(group: Group, names: Iterable[str], where: str) -> None:
    """Check hyper-parameters that count something.

    Args:
        group: all hyper-parameters.
        names: those to check.
        where: how the message begins.

    Raises:
        TypeError: one is no integer.
        ValueError: one is below 1.

    **Collective**: local.
    """
    for name in names:
        if not isinstance(group[name], Integral):
            raise TypeError(f"{where}expected {name} to be an integer, got {group[name]!r}")
        if group[name] < 1:
            raise ValueError(f"{where}expected {name} >= 1, got {group[name]}")


def check_several(
    group: Group, name: str, where: str, *, count: int, or_none: bool = False
) -> Sequence[Any]:
    """Check a hyper-parameter of several numbers.

    Args:
        group: all hyper-parameters.
        name: the one to check.
        where: how the message begins.
        count: how many numbers it has.
        or_none: whether each may be None instead.

    Returns:
        The numbers.

    Raises:
        TypeError: it is no sequence, or holds something else.
        ValueError: it has more or fewer.

    **Collective**: local.
    """
    values = group[name]
    if (
        not isinstance(values, Sequence)
        or isinstance(values, str)
        or not all(_is_number(each) or (or_none and each is None) for each in values)
    ):
        raise TypeError(f"{where}expected {name} to be {_WORDS[count]} numbers, got {values!r}")
    if len(values) != count:
        raise ValueError(f"{where}expected {_WORDS[count]} {name}, got {values}")
    return values


def check_decay(group: Group, name: str, where: str, *, count: int = 1) -> None:
    """Check factors of moving averages.

    Args:
        group: all hyper-parameters.
        name: the one to check.
        where: how the message begins.
        count: how many numbers it has; more than one are in a sequence.

    Raises:
        TypeError: it is no number, or no sequence of numbers.
        ValueError: it has more or fewer, or one is outside of [0, 1).

    **Collective**: local.
    """
    if count == 1:
        check_numbers(group, (name,), where)
        values, many = [group[name]], ""
    else:
        values, many = list(check_several(group, name, where, count=count)), f"{_WORDS[count]} "
    if not all(0 <= value < 1 for value in values):
        raise ValueError(f"{where}expected {many}{name} in [0, 1), got {group[name]}")


def check_comm(comm: object) -> None:
    """Check that what is to be a communicator is one. Local.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(comm, Comm):
        raise TypeError(
            f"expected comm to be a Comm of shard_comm, got {comm!r}; comm_for() makes one of a "
            f"process group, a mesh, or all ranks"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)
