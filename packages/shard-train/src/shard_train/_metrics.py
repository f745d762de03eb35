"""The record of a run: one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shard_train._files import write_atomically


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a record.

    Args:
        path: ``metrics.jsonl``; it may be missing.

    Returns:
        The entries in order. A last line that was cut off while it was written is left out.

    **Collective**: local.
    """
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            entries.append(json.loads(line))
    return entries


class MetricsLog:
    """Appends to a record, each entry once.

    Entries after the step that the run goes on from are dropped first: their steps are about
    to be taken again.

    Args:
        path: ``metrics.jsonl``.
        after: Last step to keep.
    """

    def __init__(self, path: Path, *, after: int) -> None:
        kept = [entry for entry in read_metrics(path) if entry["step"] <= after]
        write_atomically(path, "".join(map(_line, kept)))
        self._file = path.open("a", encoding="utf-8")

    def write(self, entry: dict[str, Any]) -> None:
        """Append one entry, and hand it to the operating system at once.

        Args:
            entry: Has the key ``step``.

        **Collective**: local.
        """
        self._file.write(_line(entry))
        self._file.flush()

    def close(self) -> None:
        """Close the file.

        **Collective**: local.
        """
        self._file.close()


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry) + "\n"
