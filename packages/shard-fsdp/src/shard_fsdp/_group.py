"""One group: the parameters of a unit that share a dtype and trainability."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shard_comm import Comm, Work
from shard_flat import FullBuffer, ParamSpec, ShardSpec, ShardTensor, plan_layout
from shard_fsdp._params import ManagedParam
from shard_fsdp._policy import MixedPrecisionPolicy, UnitSettings
from shard_fsdp._reduce import GradReducer


class ParamGroup:
    """One layout, one flat shard, one full buffer, one collective each way.

    With one rank and one dtype the flat shard is the full buffer: nothing is ever gathered,
    copied or freed.

    Args:
        params: the parameters; all of one dtype and trainability. Their values are copied.
        comm: the ranks to shard over.
        mesh: the mesh that the sharded parameters report, if any.
        mp_policy: compute and reduction dtypes.
        settings: the unit's switches.
        on_arrival: called at each gradient, inside backward.

    Attributes:
        shard: ``[layout.shard_numel]`` in the storage dtype, what this rank owns.
        full: the gathered array in the compute dtype.
        sharded_params: the ShardTensor parameters, views of ``shard``; always the same objects.
        full_params: the parameters that a forward sees, views of ``full``; the same objects too.
        reducer: where full gradients go and sharded ones come from.

    **Memory**: ``shard`` always, ``full`` between ``unshard`` and ``reshard``.
    """

    def __init__(
        self,
        params: Sequence[ManagedParam],
        *,
        comm: Comm,
        mesh: DeviceMesh | None,
        mp_policy: MixedPrecisionPolicy,
        settings: UnitSettings,
        on_arrival: Callable[[], None],
    ) -> None:
        self._slots = [p.slots for p in params]
        self.comm = comm
        self.layout = plan_layout(
            [ParamSpec(p.name, tuple(p.original.shape), p.original.dtype) for p in params],
            comm.size,
        )
        storage = self.layout.dtype
        compute = mp_policy.compute_dtype(storage)
        self.aliased = comm.size == 1 and compute == storage
        self.shard = torch.zeros(self.layout.shard_numel, dtype=storage, device=comm.device)
        self._fill_shard(params)
        data = self.shard if self.aliased else comm.empty(self.layout.numel, compute)
        self.full = FullBuffer(self.layout, data)
        self.full_params = [
            nn.Parameter(view, p.original.requires_grad)
            for view, p in zip(self.full.views(), params, strict=True)
        ]
        self.sharded_params = [
            self._shard_param(i, p.original.requires_grad, mesh) for i, p in enumerate(params)
        ]
        if not self.aliased:
            self.full.release()
        self.reducer = GradReducer(
            self.layout,
            self.sharded_params,
            comm=comm,
            dtype=mp_policy.reduce_dtype or compute,
            settings=settings,
            on_arrival=on_arrival,
        )
        self.gathered_version = -1
        self._hooked = [False] * len(params)

    @torch.no_grad()
    def _fill_shard(self, params: Sequence[ManagedParam]) -> None:
        for managed, piece in zip(params, self.layout.pieces(self.comm.rank), strict=True):
            values = managed.original.detach().reshape(-1)[piece.start : piece.stop]
            self.shard[piece.offset : piece.offset + piece.numel].copy_(values)

    def _shard_param(self, index: int, requires_grad: bool, mesh: DeviceMesh | None) -> ShardTensor:
        piece = self.layout.piece(self.comm.rank, index)
        spec = ShardSpec(
            piece.spec.name,
            piece.spec.shape,
            piece.start,
            piece.stop,
            self.layout.starts[index],
            self.layout.shard_numel,
        )
        local = self.shard[piece.offset : piece.offset + piece.numel]
        tensor = ShardTensor(local, spec, comm=self.comm, mesh=mesh)
        param = nn.Parameter(tensor, requires_grad)
        assert isinstance(param, ShardTensor)
        return param

    def rename(self, names: Mapping[nn.Module, str]) -> None:
        """Name every parameter by its first module's name; modules not listed keep it. Local."""
        for sharded, slots in zip(self.sharded_params, self._slots, strict=True):
            module, attribute = slots[0]
            if module in names:
                path = names[module]
                name = f"{path}.{attribute}" if path else attribute
                sharded.spec = replace(sharded.spec, name=name)

    def is_stale(self) -> bool:
        """Whether the shard changed since it was gathered."""
        return self.gathered_version != self.shard._version

    def unshard(self) -> Work:
        """Start filling the full buffer from all ranks' shards. Collective."""
        self.gathered_version = self.shard._version
        if self.aliased:
            return Work()
        self.full.allocate()
        source = self.shard
        if source.dtype != self.full.data.dtype:
            source = self.full.slice_of(self.comm.rank)
            with torch.no_grad():
                source.copy_(self.shard)  # the cast
        return self.comm.all_gather(self.full.data, source, async_op=True)

    def reshard(self) -> None:
        """Free the full buffer. Local."""
        if not self.aliased:
            self.full.release()

    def register_full(self) -> None:
        """Let the modules see the full parameters. Local."""
        for i, (slots, full, sharded) in enumerate(
            zip(self._slots, self.full_params, self.sharded_params, strict=True)
        ):
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
            if sharded.requires_grad and not self._hooked[i]:
                self._hooked[i] = True
                hook = self.reducer.hook_for(i)
                full.register_post_accumulate_grad_hook(hook)
            for module, attribute in slots:
                module._parameters[attribute] = full

    def register_sharded(self) -> None:
        """Let the modules see the sharded parameters. Local."""
        for slots, sharded in zip(self._slots, self.sharded_params, strict=True):
            for module, attribute in slots:
                module._parameters[attribute] = cast(nn.Parameter, sharded)
