"""How much memory a process holds."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def held_bytes() -> int:
    """Return the memory that this process holds now.

    Returns:
        Bytes that are resident; where the system does not tell, the most there ever were.

    **Collective**: local.
    """
    if _STATM.exists():
        return int(_STATM.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
