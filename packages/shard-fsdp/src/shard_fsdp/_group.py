"""One group: the parameters of a unit that share a dtype and trainability."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shard_comm import Comm, SharedArray, Work
from shard_flat import ParamSpec, Shadow, ShardTensor, large_empty, plan_layout
from shard_fsdp._assigned import find_assigned, note_owner
from shard_fsdp._boundary import will_run
from shard_fsdp._full import CopiedFull, Full, MappedFull, OwnShard
from shard_fsdp._guard import ReadGuard
from shard_fsdp._params import ManagedParam
from shard_fsdp._policy import MixedPrecisionPolicy, UnitSettings
from shard_fsdp._reduce import GradReducer
from shard_fsdp._solo import SoloGrads


@dataclass(frozen=True)
class GroupContext:
    """What all groups of a unit share.

    Attributes:
        comm: the ranks to shard over.
        replicas: the ranks that hold the same pieces, in hybrid sharding.
        mesh: the mesh that sharded parameters report, if any.
        dp_dims: dimensions of DTensor parameters' meshes that are data-parallel.
        device: where shards live; another device than the comm's when they are offloaded.
        pin_memory: page-lock the shards.
        mp_policy: compute and reduction dtypes.
        settings: the unit's switches.
        on_arrival: called at each gradient, inside backward.
    """

    comm: Comm
    replicas: Comm | None
    mesh: DeviceMesh | None
    dp_dims: tuple[str, ...]
    device: torch.device
    pin_memory: bool
    mp_policy: MixedPrecisionPolicy
    settings: UnitSettings
    on_arrival: Callable[[], None]


class ParamGroup:
    """One layout, one flat shard, one full buffer, one collective each way.

    With one rank and one dtype the flat shard is the full buffer: nothing is ever gathered,
    copied or freed.

    Args:
        params: the parameters; all of one dtype, trainability and kind of device. Their values
            are copied, unless they are on the meta device.
        context: what the unit's groups share.

    Attributes:
        shard: ``[layout.shard_numel]`` in the storage dtype, what this rank owns.
        sharded_params: the ShardTensor parameters, views of ``shard``.
        exposes_shard: the shard is where other ranks read it, so it is not to be written while one
            of them runs a forward or a backward.
        full_params: the parameters that a forward sees, views of the full buffer.
        reducer: where full gradients go and sharded ones come from.

    **Memory**: the shard always, the full buffer between ``unshard`` and ``reshard``.
    """

    def __init__(self, params: Sequence[ManagedParam], context: GroupContext) -> None:
        self.context = context
        self.comm = context.comm
        self._builds = 0
        self._slots = [p.slots for p in params]
        self._parallel = [p.parallel for p in params]
        specs = [ParamSpec(p.name, tuple(p.local.shape), p.local.dtype, p.block) for p in params]
        self.layout = plan_layout(specs, self.comm.size)
        meta = params[0].original.device.type == "meta"
        self.shard = self._make_shard(torch.device("meta") if meta else context.device)
        if not meta:
            self._copy_in([p.local for p in params])
        self.sharded_params = [
            self._shard_param(i, p.original.requires_grad) for i, p in enumerate(params)
        ]
        self._build()

    def _make_shard(self, device: torch.device) -> torch.Tensor:
        numel, dtype = self.layout.shard_numel, self.layout.dtype
        if self.context.pin_memory and device.type == "cpu":
            return torch.zeros(numel, dtype=dtype, pin_memory=True)
        return large_empty(numel, dtype, device=device).zero_()

    def _build(self) -> None:
        """Make what follows from the shard's dtype and device: full buffer and reducer."""
        self._builds += 1
        note_owner(self, self.sharded_params)
        self._version = self._hand_outs = -1  # of the shard that was gathered
        self._pieces = [p.piece for p in self.sharded_params]
        self._part: tuple[Comm, torch.Tensor] | None = None
        # Of full parameters that have been trained, and so have a hook; None for the others.
        self._accumulators: list[Node | None] = [None] * len(self.sharded_params)
        self._seen_versions: list[int] = []
        self.full: Full | None = None
        self.exposes_shard = False
        self.full_params: list[nn.Parameter] = []
        self._guard = ReadGuard(self.full_params)
        context = self.context
        compute = context.mp_policy.compute_dtype(self.layout.dtype)
        fits = compute == self.layout.dtype and self.shard.device == self.comm.device
        self.aliased = fits and self.comm.size == 1
        self._shadow = None if self.aliased else Shadow(self.shard)
        self._needs_cast = not fits
        self.reducer: GradReducer | SoloGrads
        dtype = context.mp_policy.reduction_dtype(self.layout.dtype)
        if self.comm.size == 1 and context.replicas is None:
            self.reducer = SoloGrads(
                self.full_params,
                self.sharded_params,
                context=context,
                dtype=dtype,
                casts=dtype != compute,
            )
        else:
            self.reducer = GradReducer(
                self.layout, self.sharded_params, context=context, dtype=dtype, wire=compute
            )

    @torch.inference_mode(False)
    def _make_full(self) -> Full:
        """Make the full array and its parameters.

        **Collective**: where ranks share memory, all of them.
        """
        compute = self.context.mp_policy.compute_dtype(self.layout.dtype)
        full: Full
        if self.aliased:
            full = OwnShard(self.shard)
        elif (array := self._shared_array(compute)) is not None:
            if not self._needs_cast:
                self._shadow = None  # what is written to the shard is there
            full = MappedFull(array, self._shadow)
            if self._shadow is None:
                self._move_shard(full.own)
        else:
            full = CopiedFull(self.layout, self.comm, compute, self.context.settings)
        self._full_cdata = full.data.untyped_storage()._cdata
        views = self.layout.views(full.data)
        for view, how, p in zip(views, self._parallel, self.sharded_params, strict=True):
            shown = view if how is None else how.wrap(view)
            self.full_params.append(nn.Parameter(shown, p.requires_grad))
        self.full = full
        return full

    @torch.no_grad()
    def _move_shard(self, place: torch.Tensor) -> None:
        self.shard = place.copy_(self.shard)
        for index, param in enumerate(self.sharded_params):
            param.relocate(self._local(index))
        self._pieces = [p.piece for p in self.sharded_params]
        self.exposes_shard = True

    def _shared_array(self, dtype: torch.dtype) -> SharedArray | None:
        if self.layout.numel == 0 or self.context.settings.all_gather is not None:
            return None
        return self.comm.shared(self.layout.numel, dtype, name=self.name)

    @torch.no_grad()
    def _copy_in(self, values: Sequence[torch.Tensor | None]) -> None:
        """Take this rank's part of full parameters; None leaves a parameter as it is."""
        for value, piece in zip(values, self.layout.pieces(self.comm.rank), strict=True):
            if value is not None:
                target = self.shard[piece.offset : piece.offset + piece.numel]
                target.copy_(value.reshape(-1)[piece.start : piece.stop])

    def _local(self, index: int) -> torch.Tensor:
        piece = self.layout.piece(self.comm.rank, index)
        return self.shard[piece.offset : piece.offset + piece.numel]

    def _shard_param(self, index: int, requires_grad: bool) -> ShardTensor:
        how = self._parallel[index]
        spec = self.layout.shard_spec(self.comm.rank, index)
        if how is not None:
            spec = replace(spec, outer=how.outer)
        tensor = ShardTensor(self._local(index), spec, comm=self.comm, mesh=self.context.mesh)
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

    @property
    def name(self) -> str:
        """The first parameter's name, by which errors call the group's collectives."""
        return self.sharded_params[0].spec.name

    @property
    def was_trainable(self) -> bool:
        """Whether some parameter required a gradient in some forward."""
        return any(node is not None for node in self._accumulators)

    # --- parameters that others changed ---

    def settle(self) -> None:
        """Take in what was done to the parameters from outside since the last time. Local.

        Parameters that somebody assigned to the modules, and pieces that a cast or a move put
        into memory of their own, become part of the flat shard again.

        Raises:
            ValueError: an assigned parameter does not fit, or one was deleted or tied.
            RuntimeError: something else was assigned.
        """
        for index, slots in enumerate(self._slots):
            sharded: object = self.sharded_params[index]
            for module, attribute in slots:
                if module._parameters.get(attribute) is not sharded:
                    self._take_over(index)
                    break
        if any(p.piece is not q for p, q in zip(self.sharded_params, self._pieces, strict=True)):
            pieces = [p.piece for p in self.sharded_params]
            if len({(p.dtype, p.device) for p in pieces}) == 1:  # else more is still to come
                self._relink(pieces)

    @property
    def is_settled(self) -> bool:
        """Whether the modules have the sharded parameters, and none that somebody assigned."""
        params: Sequence[nn.Parameter] = cast("list[nn.Parameter]", self.sharded_params)
        return all(
            module._parameters.get(attribute) is param
            for slots, param in zip(self._slots, params, strict=True)
            for module, attribute in slots
        )

    @torch.inference_mode(False)
    @torch.no_grad()
    def _take_over(self, index: int) -> None:
        old = self.sharded_params[index]
        name = old.spec.name
        found = find_assigned(self._slots[index], old)
        if isinstance(found, ShardTensor):
            if not found.spec.is_cut_like(old.spec, self.comm.size):
                raise ValueError(
                    f"{name}: expected the piece [{old.spec.start}, {old.spec.stop}), got "
                    f"[{found.spec.start}, {found.spec.stop}); load it with shard_ckpt"
                )
            found.spec = old.spec
            self.sharded_params[index] = found
        else:
            piece = torch.empty_like(old.piece, dtype=found.dtype, device=self.context.device)
            tensor = ShardTensor(piece, old.spec, comm=self.comm, mesh=self.context.mesh)
            tensor.copy_(found.detach())
            self.sharded_params[index] = cast(
                ShardTensor, nn.Parameter(tensor, found.requires_grad)
            )
        for module, attribute in self._slots[index]:
            module._parameters[attribute] = cast(nn.Parameter, self.sharded_params[index])

    @torch.inference_mode(False)
    @torch.no_grad()
    def _relink(self, pieces: Sequence[torch.Tensor]) -> None:
        dtype, device = pieces[0].dtype, pieces[0].device
        self.layout = replace(
            self.layout, specs=tuple(replace(s, dtype=dtype) for s in self.layout.specs)
        )
        self.shard = self._make_shard(device)
        for index, (piece, param) in enumerate(zip(pieces, self.sharded_params, strict=True)):
            if device.type != "meta":
                self._local(index).copy_(piece)
            param.relocate(self._local(index))
        self._build()

    # --- gathering ---

    @property
    def version(self) -> tuple[int, int]:
        """Which shard this is of those the group has had, and how often it was changed."""
        return self._builds, self.shard._version

    @property
    def is_stale(self) -> bool:
        """Whether the shard changed since it was gathered, or is another one."""
        return self.full is None or (not self.aliased and self._version != self.shard._version)

    @property
    def may_be_stale(self) -> bool:
        """Whether the shard changed since it was gathered, or somebody took a piece of it since.

        Who has a piece may write to it without torch's counting, so this is asked before a forward,
        and ``is_stale`` where it is too late to gather again.
        """
        return self.is_stale or (
            self._shadow is not None and self._hand_outs != self._shadow.hand_outs
        )

    def unshard(self, *, use_part: bool = False) -> Work:
        """Start filling the full buffer from all ranks' shards. Collective.

        Args:
            use_part: fill it over fewer ranks, where ``keep_part`` left what that needs.
        """
        if self.shard.device.type == "meta":
            raise RuntimeError(
                f"{self.name}: the parameter is on the meta device and has "
                f"no values (rank {self.comm.rank} of {self.comm.size}); call materialize(), or "
                f"to_empty() and give it values"
            )
        part, self._part = self._part, None
        full = self.full if self.full is not None else self._make_full()
        self._version = self.shard._version
        if self._shadow is not None:
            self._hand_outs = self._shadow.hand_outs
        self._guard.open()
        return full.fill(self.shard, part if use_part else None, name=self.name)

    def release(self) -> None:
        """Free the full array. Local."""
        if self.full is not None:
            self.full.free()
            if self.full.is_lent:
                self._guard.close()

    def spoil(self) -> None:
        """Say that the full array no longer holds the shards' values. Local."""
        if self.full is not None:
            self.full.spoil()

    def unmap(self) -> None:
        """Make full parameters anew that are no longer in memory shared with others. Local."""
        if isinstance(self.full, MappedFull):
            self.full.free()
            self._build()

    def keep_part(self, comm: Comm) -> None:
        """Copy one part in ``comm.size`` of the full array, for the next gather. Local."""
        if isinstance(self.full, CopiedFull):
            numel = self.layout.numel // comm.size
            kept = self.full.data[comm.rank * numel : (comm.rank + 1) * numel].clone()
            self._part = (comm, kept)

    def lends(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the full buffer, and that is going to be freed. Local."""
        if type(tensor) is DTensor:
            tensor = tensor._local_tensor
        if self.full is None or not self.full.is_lent:
            return False
        if tensor.layout is not torch.strided or isinstance(tensor, ShardTensor):
            return False
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False  # it has no storage of its own to look at
        return bool(tensor.untyped_storage()._cdata == self._full_cdata)

    def expects_gradients(self) -> bool:
        """Whether the backward that runs accumulates gradients of the parameters at all.

        ``torch.autograd.grad`` does not, unless told to. Local, in a backward only.
        """
        return any(node is not None and will_run(node) for node in self._accumulators)

    def register_full(self) -> None:
        """Let the modules see the full parameters. Local."""
        for i, (slots, full, sharded) in enumerate(
            zip(self._slots, self.full_params, self.sharded_params, strict=True)
        ):
            if full.requires_grad != sharded.requires_grad:
                full.requires_grad_(sharded.requires_grad)
            if sharded.requires_grad and self._accumulators[i] is None:
                full.register_post_accumulate_grad_hook(self.reducer.hook_for(i))
                with (
                    torch._C._DisableFuncTorch(),
                    torch.inference_mode(False),
                    torch.enable_grad(),
                ):
                    self._accumulators[i] = get_gradient_edge(full).node
            for module, attribute in slots:
                module._parameters[attribute] = full
        self._seen_versions = [full._version for full in self.full_params]

    def register_sharded(self) -> None:
        """Let the modules see the sharded parameters. Local."""
        for slots, sharded in zip(self._slots, self.sharded_params, strict=True):
            for module, attribute in slots:
                module._parameters[attribute] = cast(nn.Parameter, sharded)

    def lost_change(self) -> str | None:
        """Say which full parameter was changed or replaced while the modules saw it, if any.

        Such a change is gone once the buffer is freed. Local.
        """
        assert self.full is not None
        base, itemsize = self.full.data.data_ptr(), self.full.data.element_size()
        places = (base + start * itemsize for start in self.layout.starts)
        for full, version, place, sharded, slots in zip(
            self.full_params,
            self._seen_versions,
            places,
            self.sharded_params,
            self._slots,
            strict=True,
        ):
            found = slots[0][0]._parameters.get(slots[0][1])
            own = full._local_tensor if isinstance(full, DTensor) else full
            replaced = found is not full or (own.numel() > 0 and own.data_ptr() != place)
            if replaced or (full._version != version and not self.aliased):
                what = "replaced" if replaced else "changed"
                return (
                    f"{sharded.spec.name}: the parameter was {what} inside a forward (rank "
                    f"{self.comm.rank} of {self.comm.size}), which would be lost when full "
                    f"parameters are freed; change the sharded one outside of forward"
                )
        return None

    def copy(self, context: GroupContext, memo: dict[int, Any]) -> ParamGroup:
        """Return a group with a shard of its own over copies of the same modules. Local.

        Args:
            context: of the copy's unit.
            memo: of ``copy.deepcopy``, which has or will have the modules and parameters.
        """
        new = object.__new__(ParamGroup)
        new.context = context
        new.comm = context.comm
        new.layout = self.layout
        new._builds = 0
        new._slots = [
            [(copy.deepcopy(module, memo), attribute) for module, attribute in slots]
            for slots in self._slots
        ]
        new._parallel = self._parallel
        new.sharded_params = [copy.deepcopy(p, memo) for p in self.sharded_params]
        new._relink([p.piece for p in new.sharded_params])
        return new

    # --- whole parameters, one at a time ---

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest full parameter. Local."""
        return max(p.numel() * p.element_size() for p in self.sharded_params)

    def initialise(self, fill: Callable[[str, torch.Tensor], None], scratch: torch.Tensor) -> None:
        """Give every parameter values, one full parameter at a time. Local.

        Args:
            fill: takes a name and an empty full tensor, and fills it, the same on every rank.
            scratch: ``largest_bytes`` or more of the comm's device, where full parameters lie.
        """
        if self.shard.device.type == "meta":
            self.shard = self._make_shard(self.context.device)
            for index, param in enumerate(self.sharded_params):
                piece = self._local(index)
                tensor = ShardTensor(piece, param.spec, comm=self.comm, mesh=self.context.mesh)
                # the parameter object stays, so optimizers built before keep it
                torch.utils.swap_tensors(param, nn.Parameter(tensor, param.requires_grad))
            self._build()
        for index in range(len(self.sharded_params)):
            self._initialise_one(index, fill, scratch)

    def _initialise_one(
        self, index: int, fill: Callable[[str, torch.Tensor], None], scratch: torch.Tensor
    ) -> None:
        param = self.sharded_params[index]
        nbytes = param.numel() * param.element_size()
        full = scratch[:nbytes].view(param.dtype).view(param.shape)
        fill(param.spec.name, full)
        values: list[torch.Tensor | None] = [None] * len(self.sharded_params)
        values[index] = full if param.spec.outer is None else param.spec.outer.part_of(full)
        self._copy_in(values)
