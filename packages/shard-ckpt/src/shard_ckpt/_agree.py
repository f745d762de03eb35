"""Errors that all ranks raise together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shard_ckpt._errors import CheckpointError
from shard_comm import Comm

T = TypeVar("T")
S = TypeVar("S")

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CheckpointError, FileNotFoundError, ValueError, TypeError, AssertionError)
}


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a rank's own work came to: a result or an error."""

    result: T | None
    error: Exception | None

    def value(self) -> T:
        """Return the result of work that is known to have succeeded. Local."""
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None only where T is


@dataclass(frozen=True)
class _Failure:
    kind: str
    text: str
    errno: int | None
    filename: str | None


def check_comm(comm: object) -> None:
    """Raise where something else is given as the ranks: there is nobody to tell. Local."""
    if not isinstance(comm, Comm):
        raise TypeError(
            f"comm: expected a Comm, got {comm!r}; shard_comm.comm_for() returns that of the "
            f"process group, or of this process alone"
        )


def attempt(work: Callable[[], T]) -> Outcome[T]:
    """Do a rank's own work and keep its error for ``agree``: others wait for this rank. Local."""
    try:
        return Outcome(work(), None)
    except Exception as exc:  # noqa: BLE001  # agree() raises it, here and on every other rank
        return Outcome(None, exc)


def agree(
    comm: Comm, outcome: Outcome[T], *, share: Callable[[T], S], timeout_s: float | None
) -> list[S]:
    """Go on only if every rank succeeded, and exchange something small.

    Args:
        comm: the ranks.
        outcome: what this rank's work came to.
        share: what to tell the others of the result; must pickle.
        timeout_s: how long to wait for the slowest rank.

    Returns:
        What each rank shared, in rank order.

    Raises:
        Exception: the error of the first rank that failed, on all ranks: of the same type where
            it is an OSError or one this package raises, else a RuntimeError.

    **Collective**: all ranks of ``comm``.
    """
    if comm.size == 1:
        return [share(outcome.value())]
    if outcome.error is None:
        told: tuple[_Failure | None, S | None] = (None, share(outcome.value()))
    else:
        told = (_describe(outcome.error), None)
    replies: list[tuple[_Failure | None, S]] = comm.all_gather_object(told, timeout_s=timeout_s)
    for rank, (failure, _) in enumerate(replies):
        if failure is not None:
            raise _rebuild(failure, rank, comm.size) from outcome.error
    return [shared for _, shared in replies]


def check_same_save(save_ids: Sequence[str], where: str, *, purpose: str) -> None:
    """Raise where ranks see different saves at one path. Local; the same on all ranks.

    Args:
        save_ids: what each rank sees, in rank order.
        where: the path.
        purpose: what they want to do.

    Raises:
        CheckpointError: two ranks see different ones.
    """
    for rank, save_id in enumerate(save_ids):
        if save_id != save_ids[0]:
            raise CheckpointError(
                f"{where}: rank 0 sees save {save_ids[0]}, rank {rank} of {len(save_ids)} sees "
                f"{save_id}; {purpose} from a folder that all ranks share"
            )


def _describe(error: Exception) -> _Failure:
    if isinstance(error, OSError) and error.errno is not None:
        filename = None if error.filename is None else str(error.filename)
        return _Failure("OSError", str(error.strerror), error.errno, filename)
    for kind in _KINDS.values():
        if isinstance(error, kind):
            return _Failure(kind.__name__, str(error), None, None)
    return _Failure("RuntimeError", f"{type(error).__name__}: {error}", None, None)


def _rebuild(failure: _Failure, rank: int, size: int) -> Exception:
    text = f"{failure.text} (rank {rank} of {size})"
    if failure.errno is not None:
        return OSError(failure.errno, text, failure.filename)
    kind: Any = _KINDS.get(failure.kind, RuntimeError)
    error: Exception = kind(text)
    return error
