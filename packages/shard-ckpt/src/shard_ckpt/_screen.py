"""What commands show: tables, sizes, a bar while they work."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

_WIDTH = 30
_PAUSE_S = 0.1


class Bar:
    """Shows on a terminal how far long work is; shows nothing elsewhere.

    Args:
        label: what is done.
        stream: where to show it.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._active = self._stream.isatty()
        self._shown_at = 0.0

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` bytes of ``total`` are done."""
        now = time.monotonic()
        if not self._active or total == 0 or (done < total and now - self._shown_at < _PAUSE_S):
            return
        self._shown_at = now
        share = min(1.0, done / total)
        bar = "#" * int(share * _WIDTH)
        text = f"{self._label} [{bar:<{_WIDTH}}] {share:4.0%} of {format_bytes(total)}"
        self._stream.write(f"\r{text}")
        self._stream.flush()

    def clear(self) -> None:
        """Take it away."""
        if self._active and self._shown_at:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def format_bytes(count: int) -> str:
    """Return a size as people read it: 1536 is ``1.54 kB``. Local."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.3g} {unit}"


def format_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns. Local."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
