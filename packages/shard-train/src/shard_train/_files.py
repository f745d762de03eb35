"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's contents in one step.

    Args:
        path: The file; it need not exist.
        text: Its new contents.

    Raises:
        OSError: The contents could not be written; the file is as it was.

    **Collective**: local; one process at a time.
    """
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
