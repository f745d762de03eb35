"""Replicated parameters laid end to end, of which each rank updates its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shard_comm import Comm
from shard_flat import FlatLayout, ParamSpec, ShardTensor, plan_layout


@dataclass(frozen=True)
class Shelf:
    """Parameters of one dtype on one device, moved into one buffer.

    Attributes:
        layout: where each parameter lies.
        buffer: ``[layout.numel]``; the parameters are views of it.
        params: the parameters.
        pieces: this rank's share of each, in the same memory.
        comm: the ranks.
    """

    layout: FlatLayout
    buffer: torch.Tensor
    params: list[torch.Tensor]
    pieces: list[ShardTensor]
    comm: Comm

    @classmethod
    def of(cls, named: Sequence[tuple[str, torch.Tensor]], comm: Comm) -> Shelf:
        """Move parameters into a new buffer; their values and objects stay. Local."""
        specs = [ParamSpec(name, tuple(param.shape), param.dtype) for name, param in named]
        layout = plan_layout(specs, comm.size)
        buffer = comm.empty(layout.numel, layout.dtype).zero_()
        pieces: list[ShardTensor] = []
        for index, (start, (_, param)) in enumerate(zip(layout.starts, named, strict=True)):
            view = buffer[start : start + param.numel()].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            spec = layout.shard_spec(comm.rank, index)
            begin = start + spec.start
            own = buffer[begin : begin + spec.stop - spec.start]
            piece = nn.Parameter(ShardTensor(own, spec, comm=comm), param.requires_grad)
            assert isinstance(piece, ShardTensor)
            pieces.append(piece)
        return cls(layout, buffer, [param for _, param in named], pieces, comm)

    def lend_grads(self) -> None:
        """Give each piece the gradient that its parameter has, without a copy. Local."""
        for param, piece in zip(self.params, self.pieces, strict=True):
            grad = param.grad
            spec = piece.spec
            piece.grad = None
            if grad is not None:
                piece.grad = piece.like(grad.reshape(-1)[spec.start : spec.stop])

    def gather(self) -> None:
        """Fetch what other ranks have updated.

        **Collective**: one all_gather over all ranks.
        """
        numel = self.layout.shard_numel
        rank = self.comm.rank
        if self.comm.size > 1 and numel:
            self.comm.all_gather(self.buffer, self.buffer[rank * numel : (rank + 1) * numel])
        torch.autograd.graph.increment_version(self.params)

    def check_place(self) -> str | None:
        """Name a parameter that was moved out of the buffer, if one was. Local."""
        for spec, start, param in zip(
            self.layout.specs, self.layout.starts, self.params, strict=True
        ):
            if param.numel() and param.data_ptr() != self.buffer[start:].data_ptr():
                return spec.name
        return None
