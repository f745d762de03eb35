"""Run a function on several ranks inside a test: as threads, or as processes over Gloo."""

from shard_testing._processes import run_ranks
from shard_testing._threads import run_threads

__all__ = ["run_ranks", "run_threads"]
