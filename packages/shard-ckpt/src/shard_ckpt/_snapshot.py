"""A copy of what a rank will write, in host memory that is used again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import torch

from shard_ckpt._commit import Prepared
from shard_ckpt._files import order_entries, pieces_of
from shard_ckpt._index import TensorId
from shard_ckpt._leaf import Leaf
from shard_ckpt._memory import copy_bytes, joined_runs
from shard_ckpt._plan import Entry, Holdings, Share, plan_entries
from shard_comm import Comm

_ALIGNMENT = 4096


class Staging:
    """Host memory for one copy of a rank's part of a state.

    It grows to the largest copy it was asked for and is used again by every later one. For
    tensors on CUDA it is pinned, and copies are launched on the devices' current streams: what is
    launched there afterwards, an optimizer's step say, comes after the copy.

    **Memory**: the rank's part of the state, for as long as the object lives. Where it is pinned,
    torch rounds it up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: list[tuple[torch.cuda.Event, list[torch.Tensor]]] = []

    @property
    def nbytes(self) -> int:
        """How many bytes are held."""
        return self._buffer.numel()

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, prepared: Prepared, *, comm: Comm) -> Prepared:
        """Return ``prepared`` with this rank's part in host memory and nothing of the original.

        The copy is whole only after ``ready``; the originals may be changed at once, on the streams
        that are current now. The copy before this one is overwritten. Local.

        Args:
            prepared: on any devices.
            comm: the ranks that will write it.
        """
        holdings = prepared.holdings
        entries = plan_entries(
            holdings,
            rank=comm.rank,
            world_size=comm.size,
            shares={group: Share(0, 1) for group in holdings.pieces},  # told apart when written
        )
        sections = order_entries(entries)
        starts = {}
        nbytes = 0
        for section, group in sections.items():
            starts[section] = nbytes
            nbytes += sum(entry.nbytes for entry in group)
            nbytes += -nbytes % _ALIGNMENT
        devices = {e.leaf.tensor.device for e in entries if e.leaf.tensor.device.type == "cuda"}
        self._reserve(nbytes, pinned=bool(devices))
        copies: dict[TensorId, Leaf] = {}
        sources = []
        for section, group in sections.items():
            sources += self._copy_section(group, starts[section], copies)
        self._copies = [
            (
                torch.cuda.current_stream(device).record_event(),
                [source for source in sources if source.device == device],
            )
            for device in devices
        ]
        return _replaced(prepared, copies)

    def ready(self) -> None:
        """Return when everything has arrived. Local."""
        copies, self._copies = self._copies, []
        for event, _ in copies:
            event.synchronize()

    def _reserve(self, nbytes: int, *, pinned: bool) -> None:
        if self.nbytes >= nbytes and (self._buffer.is_pinned() or not pinned):
            return
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")  # frees the old one first
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _copy_section(
        self, group: list[Entry], start: int, copies: dict[TensorId, Leaf]
    ) -> list[torch.Tensor]:
        """Copy one section to ``start`` on; add to ``copies`` and return what is read from."""
        at = start
        sources = []
        for run in joined_runs(pieces_of(group)):
            copy_bytes(self._buffer[at : at + run.numel()], run)
            at += run.numel()
            sources.append(run)
        at = start
        for _, runs in groupby(group, key=lambda entry: entry.leaf.id):  # one, or those of a box
            entries = list(runs)
            nbytes = sum(entry.nbytes for entry in entries)
            leaf = entries[0].leaf
            part = self._buffer[at : at + nbytes].view(leaf.tensor.dtype)
            first = leaf.start + entries[0].at
            copies[leaf.id] = replace(
                leaf, tensor=part, start=first, stop=first + part.numel(), source=part
            )
            at += nbytes
        return sources


def _replaced(prepared: Prepared, copies: Mapping[TensorId, Leaf]) -> Prepared:
    """Put copies in the place of leaves; what this rank does not write keeps only its name."""
    nothing: dict[torch.dtype, torch.Tensor] = {}

    def stand_in(leaf: Leaf) -> Leaf:
        if leaf.id in copies:
            return copies[leaf.id]
        dtype = leaf.tensor.dtype
        if dtype not in nothing:
            nothing[dtype] = torch.empty(0, dtype=dtype, device="cpu")
        return replace(leaf, tensor=nothing[dtype], source=nothing[dtype])

    old = prepared.holdings
    holdings = Holdings(
        tuple(map(stand_in, old.whole)),
        {group: tuple(map(stand_in, leaves)) for group, leaves in old.pieces.items()},
        {owner: tuple(map(stand_in, leaves)) for owner, leaves in old.ties.items()},
    )
    return replace(prepared, leaves=list(map(stand_in, prepared.leaves)), holdings=holdings)
