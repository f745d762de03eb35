"""One call, as it is remembered for the log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from shard_comm._calls import describe, noted_name


@dataclass
class CallEntry:
    """One call of a ``Checked`` comm.

    Attributes:
        number: its place among this rank's collective calls, from 1; for the claim of a shared
            array, that of the call before.
        call: what was called, in words, as in ``"reduce_scatter sum of 8 bfloat16 for layers.7"``.
        op: the operation.
        name: the caller's name for what is moved.
        numel: elements of the input; 0 without a tensor.
        dtype: of the input; None without a tensor.
        nbytes: bytes of the input.
        seconds: from the call to the end of its wait, or so far.
        state: ``"checking"`` while ranks compare, ``"running"``, ``"done"`` or ``"failed"``.
    """

    number: int
    call: str
    op: str
    name: str
    numel: int
    dtype: torch.dtype | None
    nbytes: int
    seconds: float = 0.0
    state: str = "checking"
    _began: float = field(default_factory=time.monotonic, repr=False, compare=False)

    @classmethod
    def of(cls, number: int, op: str, tensor: torch.Tensor | None) -> CallEntry:
        """Return the entry of a call that begins, with the name that was noted. Local."""
        return cls(
            number=number,
            call=describe(op, tensor),
            op=op,
            name=noted_name(),
            numel=0 if tensor is None else tensor.numel(),
            dtype=None if tensor is None else tensor.dtype,
            nbytes=0 if tensor is None else tensor.nbytes,
        )

    def turn(self, state: str) -> None:
        """Note a new state and the seconds so far. Local."""
        self.seconds, self.state = time.monotonic() - self._began, state

    def __str__(self) -> str:
        return (
            f"{self.number}: {self.call}, {self.nbytes} bytes, {self.state}, {self.seconds:.3f} s"
        )
