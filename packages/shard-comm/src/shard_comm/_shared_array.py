"""One array that all ranks of a group map, each filling its own slice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, MutableSequence
from typing import Protocol

import torch

from shard_comm._comm import Work


class SharedArray(ABC):
    """An array that every rank reads whole and writes its own slice of: a gather without a copy.

    A rank goes round in this circle; only the two waits depend on others.

    | call | says | waits |
    |---|---|---|
    | ``claim()`` | I am about to write my slice | until nobody reads what I published before |
    | write ``own`` | | |
    | ``publish()`` | my slice is ready | its work: until every rank has published as often |
    | read ``data`` | | |
    | ``release()`` | I read no more | |

    A rank whose slice did not change publishes again without a claim. Without a ``release()``
    on every rank no claim returns, so nobody sees a slice change while it reads.

    Attributes:
        data: all slices ``[numel]``.
        own: this rank's slice of ``data``.
        name: what messages call it.
    """

    def __init__(self, data: torch.Tensor, rank: int, size: int, *, name: str) -> None:
        self.data = data
        self.own = data.view(size, -1)[rank]
        self.name = name

    @abstractmethod
    def claim(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has released what this one published.

        Raises:
            RuntimeError: a rank did not release in time, or is gone.
        """

    @abstractmethod
    def publish(self, *, timeout_s: float | None = None) -> Work:
        """Say that ``own`` is ready.

        Returns:
            The work; its wait returns when every rank has published as many times as this one.
            Until then ``data`` is not to be read.

        Raises:
            RuntimeError: at the wait: a rank did not publish in time, or is gone.
        """

    @abstractmethod
    def release(self) -> None:
        """Say that this rank no longer reads what was published so far. Local."""

    @abstractmethod
    def is_unread(self) -> bool:
        """Whether all ranks, this one too, have released what this one published. Local.

        Then ``own`` may be written until this rank publishes again, as after a ``claim``.
        """


class Waiting(Protocol):
    """How the ranks of a transport wait for marks to change."""

    def __call__(self, behind: Callable[[], list[int]], what: str, timeout_s: float | None) -> None:
        """Return when ``behind()``, the ranks that are awaited, is empty; else raise."""


class MarkedArray(SharedArray):
    """A shared array whose ranks count, where all can see it, what they published and released.

    Args:
        data: the array, the same memory on every rank.
        rank: this rank.
        published: a count for each rank, written by that rank alone.
        released: the same for releases.
        wait: waits until counts of others have changed.
        changed: called before and after this rank's counts change: orders memory, wakes others,
            raises where the group is broken.
        name: what messages call it.
    """

    def __init__(
        self,
        data: torch.Tensor,
        rank: int,
        *,
        published: MutableSequence[int] | memoryview[int],
        released: MutableSequence[int] | memoryview[int],
        wait: Waiting,
        changed: Callable[[], None],
        name: str,
    ) -> None:
        super().__init__(data, rank, len(published), name=name)
        self._rank = rank
        self._published = published
        self._released = released
        self._wait = wait
        self._changed = changed

    def claim(self, *, timeout_s: float | None = None) -> None:
        """Return when every rank has released what this one published."""
        self._wait(
            lambda: _below(self._released, self._published[self._rank], self._rank),
            self._what("claim"),
            timeout_s,
        )

    def publish(self, *, timeout_s: float | None = None) -> Work:
        """Say that ``own`` is ready; the work waits for everyone to say so."""
        self._changed()
        count = self._published[self._rank] + 1
        self._published[self._rank] = count
        self._changed()
        what = self._what("publish")
        return Work(
            lambda: self._wait(lambda: _below(self._published, count, self._rank), what, timeout_s)
        )

    def release(self) -> None:
        """Say that this rank no longer reads what was published so far."""
        self._changed()
        self._released[self._rank] = self._published[self._rank]
        self._changed()

    def is_unread(self) -> bool:
        """Whether all ranks, this one too, have released what this one published."""
        if min(self._released) < self._published[self._rank]:
            return False
        try:
            self._changed()  # their reads come before our writes
        except RuntimeError:  # the group is broken: its next collective says why
            return False
        return True

    def _what(self, verb: str) -> str:
        label = f" {self.name}" if self.name else ""
        return f"{verb} of the shared array{label} [{self.data.numel()}]"


def _below(marks: MutableSequence[int] | memoryview[int], count: int, rank: int) -> list[int]:
    return [other for other, mark in enumerate(marks) if mark < count and other != rank]
