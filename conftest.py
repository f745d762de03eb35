"""Set up every test session: one arithmetic thread per process, before torch is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# Tests start several ranks on few cores; a thread pool in each would only make them wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says more about the machine than about the code.
settings.register_profile("here", deadline=None)
settings.load_profile("here")
