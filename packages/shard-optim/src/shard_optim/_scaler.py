"""Loss scaling on which all ranks agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shard_flat import GatherComm, ShardTensor
from shard_optim._groups import Group, labels_of
from shard_optim._runs import find_runs, join, piece_of


class GradScaler(torch.amp.GradScaler):
    """A loss scaler that skips a step on all ranks where one of them saw an inf or a NaN.

    Used as torch's is. Gradients are unscaled as flat runs, one call per dtype and device, and
    the verdict is taken over all ranks once per optimizer, also where some ranks hold no gradient
    at all. So scales never part.

    Args:
        device: kind of device, ``"cuda"`` or ``"cpu"``.
        init_scale: the first scale.
        growth_factor: what the scale is multiplied by after ``growth_interval`` good steps.
        backoff_factor: what it is multiplied by after a bad one.
        growth_interval: good steps in a row before the scale grows.
        enabled: whether to scale at all.
        comm: ranks that must agree besides those of the sharded parameters; needed where
            parameters are plain.

    **Collective**: ``unscale_``, and ``step`` where it was not called before: one max of one
    number per comm.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        comm: GatherComm | None = None,
    ) -> None:
        super().__init__(
            device,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._comm = comm

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        found: dict[torch.device, torch.Tensor] = {}
        for device, grads in _grads_by_device(optimizer.param_groups, allow_fp16).items():
            found[device] = found_inf.to(device, copy=True)
            for flats in _flat_by_dtype(grads):
                torch._amp_foreach_non_finite_check_and_unscale_(
                    flats, found[device], inv_scale.to(device)
                )
        comms = _comms_of(optimizer.param_groups)
        if self._comm is not None:
            comms.setdefault(self._comm)
        if not comms:
            return found
        verdict = found_inf.clone()
        for each in found.values():
            verdict = torch.maximum(verdict, each.to(verdict.device))
        for comm in comms:
            comm.all_reduce(verdict, op="max")
        return {device: verdict.to(device) for device in {**found, found_inf.device: verdict}}


def _comms_of(groups: Sequence[Group]) -> dict[GatherComm, None]:
    """The comms of all sharded parameters, with gradients or without, in their order."""
    return {
        param.comm: None
        for group in groups
        for param in group["params"]
        if isinstance(param, ShardTensor)
    }


def _grads_by_device(
    groups: Sequence[Group], allow_fp16: bool
) -> dict[torch.device, list[torch.Tensor]]:
    grads: dict[torch.device, list[torch.Tensor]] = {}
    for number, group in enumerate(groups):
        for param, name in zip(group["params"], labels_of(group, number), strict=True):
            if param.grad is None:
                continue
            grad = piece_of(param.grad)
            if grad.dtype == torch.float16 and not allow_fp16:
                raise ValueError(
                    f"{name}: expected a gradient of float32 or bfloat16, got torch.float16, "
                    f"which overflows when it is unscaled; keep parameters in float32"
                )
            if grad.is_sparse:
                grad = grad._values()
            grads.setdefault(grad.device, []).append(grad)
    return grads


def _flat_by_dtype(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for run in find_runs([grads]):
        flat = join([grads[row] for row in run])
        by_dtype.setdefault(flat.dtype, []).append(flat)
    return list(by_dtype.values())
