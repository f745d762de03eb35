"""The one error that the command line turns into one line."""

from __future__ import annotations


class UsageError(ValueError):
    """Something the user asked for cannot be done; the message is one line and says what to do."""
