"""The error for what lies on disk."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A folder is not a whole, unaltered checkpoint; the text names the file and what is wrong."""
