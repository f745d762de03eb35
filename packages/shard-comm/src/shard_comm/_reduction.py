"""Which reductions there are, and what surrounds the sum inside a mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

OPS = ("sum", "mean", "premul_mean", "max", "min")
SUMS = OPS[:3]


@dataclass(frozen=True)
class Reduction:
    """One reduction as its caller asked for it.

    Attributes:
        op: one of ``OPS``.
        sum_dtype: in which contributions are added; None for their own.
        size: number of ranks.

    **Collective**: local.
    """

    op: str
    sum_dtype: torch.dtype | None
    size: int

    def check(self, call: str, inp: torch.Tensor, out: torch.Tensor, *, where: str) -> None:
        """Raise ValueError where the operation and the dtypes do not go together."""
        if self.op not in OPS:
            raise ValueError(f"{call}: expected op to be one of {OPS}, got {self.op!r} {where}")
        dtypes = [inp.dtype]
        if self.sum_dtype is not None:
            if self.op not in SUMS:
                raise ValueError(
                    f"{call}: expected no sum_dtype with op={self.op!r}, got {self.sum_dtype} "
                    f"{where}; nothing is added there"
                )
            if not _holds(self.sum_dtype, inp.dtype):
                raise ValueError(
                    f"{call}: expected a sum_dtype that holds every {inp.dtype}, got "
                    f"{self.sum_dtype} {where}"
                )
            dtypes.append(self.sum_dtype)
        if out.dtype not in dtypes:
            raise ValueError(
                f"{call}: expected one dtype, got {inp.dtype} and {out.dtype} {where}"
                if self.sum_dtype is None
                else f"{call}: expected out to be one of {dtypes}, got {out.dtype} {where}"
            )
        added = dtypes[-1]
        if self.op in SUMS[1:] and not (added.is_floating_point or added.is_complex):
            raise ValueError(
                f"{call}: expected floating-point or complex numbers for op={self.op!r}, got "
                f"{added} {where}; pass sum_dtype=torch.float32"
            )
        if _is_tiny(added):
            raise ValueError(
                f"{call}: expected a dtype that can be reduced, got {added} {where}; pass "
                f"sum_dtype=torch.float32"
            )
        if added.is_complex and self.op not in SUMS:
            raise ValueError(f"{call}: expected ordered numbers, got {added} {where}")

    @property
    def inner(self) -> str:
        """The operation that the transport carries out."""
        return "sum" if self.op in SUMS else self.op

    @property
    def detail(self) -> str:
        """What the transport's own name for the operation does not say."""
        parts = [self.op] if self.op != self.inner else []
        if self.sum_dtype is not None:
            parts.append(f"{str(self.sum_dtype).removeprefix('torch.')} sums")
        return ", ".join(parts)

    @property
    def divisor(self) -> int:
        """What each contribution is divided by before it is added."""
        return self.size if self.op == "premul_mean" else 1

    def total(self, out: torch.Tensor) -> torch.Tensor:
        """Return where contributions are added up: ``out``, or memory in ``sum_dtype``."""
        if self.sum_dtype in (None, out.dtype):
            return out
        return out.new_empty(out.shape, dtype=self.sum_dtype)

    def finish(
        self,
        wait: Callable[[], None],
        total: torch.Tensor,
        out: torch.Tensor,
        *,
        divided: bool = False,
    ) -> Callable[[], None]:
        """Return what waits for the total, divides it for a mean and rounds it to ``out``."""
        divides = self.op == "mean" and self.size > 1 and not divided
        if not divides and total is out:
            return wait

        def finish() -> None:
            wait()
            if divides:
                total.div_(self.size)
            if total is not out:
                out.copy_(total)

        return finish


def _is_tiny(dtype: torch.dtype) -> bool:
    """Whether it is one of the eight-bit kinds of floats: torch has no arithmetic for them."""
    return dtype.itemsize == 1 and dtype.is_floating_point


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if _is_tiny(wide) or _is_tiny(narrow):
        return wide == narrow or (wide.itemsize > 1 and wide.is_floating_point)
    return torch.promote_types(narrow, wide) == wide
