"""Set up every test session: one arithmetic thread per process, before torch is imported."""

from __future__ import annotations

import os

# Tests start several ranks on few cores; a thread pool in each would only make them wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
