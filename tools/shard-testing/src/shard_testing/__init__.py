"""Run a function on several ranks inside a test, and small models to run it with."""

from shard_testing._models import DecoderBlock, TinyDecoder, token_batches
from shard_testing._processes import run_ranks
from shard_testing._threads import run_threads

__all__ = ["DecoderBlock", "TinyDecoder", "run_ranks", "run_threads", "token_batches"]
