"""What a collective is called in errors: its operation, its size, and the caller's name for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch

# The name that the caller gave, and what the transport's own operation does not say.
_note: ContextVar[tuple[str, str]] = ContextVar("shard_comm_note", default=("", ""))
_NOTHING = nullcontext()


def noted(name: str, detail: str = "") -> AbstractContextManager[None]:
    """Add a name and a detail to what describes the collectives begun inside.

    A call on a wrapper becomes calls on what is inside, and all of them are the caller's one call:
    what is noted first stays. Local.
    """
    if not (name or detail) or any(_note.get()):
        return _NOTHING
    return _noting(name, detail)


def noted_anew(detail: str) -> AbstractContextManager[None]:
    """Describe collectives begun inside by this detail alone, whatever was noted. Local."""
    return _noting("", detail)


@contextmanager
def _noting(name: str, detail: str) -> Iterator[None]:
    token = _note.set((name, detail))
    try:
        yield
    finally:
        _note.reset(token)


def noted_name() -> str:
    """Return the caller's name for what is moved, if it gave one. Local."""
    return _note.get()[0]


def describe(op: str, tensor: torch.Tensor | None = None) -> str:
    """Return what is being called, as in ``"all_gather of 6 float32 for layers.8"``. Local."""
    what = f"{op}()"
    if tensor is not None:
        what = f"{op} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
    return what + noted_suffix()


def noted_suffix() -> str:
    """Return what was noted as it follows a call, as in ``" (mean) for norm"``. Local."""
    name, detail = _note.get()
    return f"{f' ({detail})' if detail else ''}{f' for {name}' if name else ''}"


def listed(ranks: list[int], *, most: int = 16) -> str:
    """Return ``"rank 1"`` or ``"ranks [0, 2]"``; the first few of very many. Local."""
    if len(ranks) > most:
        return f"{len(ranks)} ranks {ranks[:most]} and so on"
    return f"ranks {ranks}" if len(ranks) != 1 else f"rank {ranks[0]}"
