"""Run a function on several ranks inside a test, and small things to run it with."""

from shard_testing._casts import Casts
from shard_testing._dtypes import STORED_DTYPES
from shard_testing._logs import logged
from shard_testing._models import DecoderBlock, Scale, TiedTable, TinyDecoder, token_batches
from shard_testing._optimizers import draw_steps, take_steps
from shard_testing._processes import run_ranks
from shard_testing._tensors import full_grad, full_value
from shard_testing._threads import run_threads

__all__ = [
    "STORED_DTYPES",
    "Casts",
    "DecoderBlock",
    "Scale",
    "TiedTable",
    "TinyDecoder",
    "draw_steps",
    "full_grad",
    "full_value",
    "logged",
    "run_ranks",
    "run_threads",
    "take_steps",
    "token_batches",
]
