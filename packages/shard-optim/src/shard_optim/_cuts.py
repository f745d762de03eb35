"""Blocks of elements that boundaries between ranks cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from shard_flat import GatherComm, ShardSpec, ShardTensor
from shard_optim._blocks import BLOCK

Scales = dict[int, torch.Tensor]
"""By block, ``[2]``: of both moments."""


@dataclass
class Cuts:
    """Blocks that boundaries between ranks cut, and the scales that all ranks have of them.

    Attributes:
        entries: for each comm, which parameter and which of its blocks.
        scales: for each parameter, what was exchanged last.
        device: where the parameters are.
    """

    entries: dict[GatherComm, list[tuple[int, int]]]
    scales: list[Scales]
    device: torch.device

    @classmethod
    def of(cls, params: Sequence[torch.Tensor]) -> Cuts:
        """Find the blocks of parameters that are cut. Local."""
        entries: dict[GatherComm, list[tuple[int, int]]] = {}
        for index, param in enumerate(params):
            if isinstance(param, ShardTensor):
                for block in cut_blocks(param.spec, param.comm.size):
                    entries.setdefault(param.comm, []).append((index, block))
        device = params[0].device if params else torch.device("cpu")
        return cls(entries, [{} for _ in params], device)

    def exchange(self, parts: Sequence[Callable[[int], torch.Tensor | None]]) -> None:
        """Take the largest scale that any rank has.

        Args:
            parts: for each parameter, what gives the scales of a block as far as they are known
                here, or None.

        **Collective**: one all_reduce per comm that has cut blocks.
        """
        scales: list[Scales] = [{} for _ in self.scales]
        for comm, entries in self.entries.items():
            table = torch.zeros(len(entries), 2, device=self.device)
            for row, (index, block) in zip(table, entries, strict=True):
                known = parts[index](block)
                if known is not None:
                    row.copy_(known)
            comm.all_reduce(table, op="max")
            for row, (index, block) in zip(table, entries, strict=True):
                scales[index][block] = row
        self.scales = scales


def cut_blocks(spec: ShardSpec, size: int) -> tuple[int, ...]:
    """Return the blocks of a parameter that lie on more than one rank, in order. Local.

    With blocks of 256, a parameter of 1,000 elements cut at 512 and 700 has one: block 2.
    """
    return _cut_blocks(spec.origin, spec.shard_numel, spec.numel, size)


@lru_cache(maxsize=1 << 16)
def _cut_blocks(origin: int, shard_numel: int, numel: int, size: int) -> tuple[int, ...]:
    first = origin // shard_numel + 1
    last = min((origin + numel - 1) // shard_numel, size - 1)
    cuts = [rank * shard_numel - origin for rank in range(first, last + 1)]
    return tuple(sorted({cut // BLOCK for cut in cuts if cut % BLOCK}))
