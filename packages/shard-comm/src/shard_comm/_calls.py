"""What a collective is called in errors: its operation, its size, and the caller's name for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_note: ContextVar[str] = ContextVar("shard_comm_note", default="")


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to the description of every collective begun inside; the outermost one stays.

    A call on a wrapper becomes calls on what is inside: all of them are the caller's one call.
    Local.
    """
    if not note or _note.get():
        yield
        return
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def note_of(name: str, detail: str = "") -> str:
    """Return ``"(detail) for name"``, or the part of it that there is. Local."""
    parts = [f"({detail})" if detail else "", f"for {name}" if name else ""]
    return " ".join(part for part in parts if part)


def describe(op: str, tensor: torch.Tensor | None = None) -> str:
    """Return what is being called, as in ``"all_gather of 6 float32 for layers.8"``. Local."""
    what = f"{op}()"
    if tensor is not None:
        what = f"{op} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
    note = _note.get()
    return f"{what} {note}" if note else what
