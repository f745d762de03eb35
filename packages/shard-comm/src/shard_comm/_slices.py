"""How long the slices of an exchange are where they are not all equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Slices:
    """Lengths of what one rank sends to and receives from each, in elements.

    Worked example, three ranks: rank 0 sends 2 elements to rank 1 and 1 to rank 2, and rank 2 sends
    3 to rank 0::

        rank 0  sent (0, 2, 1)  received (0, 0, 3)  longest 3
        rank 1  sent (0, 0, 0)  received (2, 0, 0)  longest 3
        rank 2  sent (3, 0, 0)  received (1, 0, 0)  longest 3

    Attributes:
        sent: to each rank, in rank order.
        received: from each rank.
        longest: the longest slice between any two ranks, the same number on all. Transports that
            move equal slices only pad to it.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    longest: int

    @property
    def back(self) -> Slices:
        """What goes back the same ways."""
        return Slices(self.received, self.sent, self.longest)

    def check(self, op: str, inp: torch.Tensor, size: int, *, where: str) -> None:
        """Check the lengths against each other and the input. Local.

        Raises:
            ValueError: they do not fit.
        """
        both = self.sent + self.received
        if len(self.sent) != size or len(self.received) != size or min(both) < 0:
            raise ValueError(
                f"{op}: expected slices of {size} lengths each way, none below 0, got {self.sent} "
                f"and {self.received} {where}"
            )
        if max(both) > self.longest:
            raise ValueError(f"{op}: expected slices of at most {self.longest}, got {both} {where}")
        if inp.numel() != sum(self.sent):
            raise ValueError(
                f"{op}: expected an inp of {sum(self.sent)} elements, got {inp.numel()} {where}"
            )

    def outline(self, inp: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor that is the same on all ranks, to describe the call by. Local."""
        return torch.empty(self.longest, dtype=inp.dtype, device="meta")

    def padded(self, inp: torch.Tensor) -> torch.Tensor:
        """Return the slices that are sent, each as long as the longest, ``[size * n]``. Local."""
        rows = inp.new_zeros(len(self.sent), self.longest)
        for row, part in zip(rows, inp.view(-1).split(self.sent), strict=True):
            row[: part.numel()].copy_(part)
        return rows.view(-1)

    def unpad(self, received: torch.Tensor, out: torch.Tensor) -> None:
        """Copy slices as long as the longest to where they belong. Local."""
        rows = received.view(len(self.received), self.longest)
        for row, part in zip(rows, out.view(-1).split(self.received), strict=True):
            part.copy_(row[: part.numel()])
