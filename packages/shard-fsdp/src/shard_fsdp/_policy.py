"""Settings of a unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shard_comm import Comm

if TYPE_CHECKING:
    from shard_fsdp._collectives import AllGather, ReduceScatter
    from shard_fsdp._unit import Unit


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtypes a unit computes and reduces in; the names and meaning of torch's FSDP2.

    Attributes:
        param_dtype: dtype of gathered floating-point parameters and of compute; None keeps the
            storage dtype.
        reduce_dtype: dtype in which gradients are summed over ranks and microbatches; None is the
            compute dtype.
        output_dtype: dtype that floating-point outputs are cast to; None leaves them.
        cast_forward_inputs: cast floating-point inputs of the forward to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, storage: torch.dtype) -> torch.dtype:
        """Return the dtype in which parameters stored as ``storage`` are gathered."""
        if self.param_dtype is None or not storage.is_floating_point:
            return storage
        return self.param_dtype

    def reduction_dtype(self, storage: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of parameters stored as ``storage`` are summed."""
        if self.reduce_dtype is None or not storage.is_floating_point:
            return self.compute_dtype(storage)
        return self.reduce_dtype


@dataclass(frozen=True)
class OffloadPolicy:
    """Where shards live: this one leaves them on the device that computes."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Keep shards, their gradients and so the optimizer's state in host memory.

    Attributes:
        pin_memory: page-lock the shards, so that copies to the device overlap with compute.
    """

    pin_memory: bool = True


def as_mixed_precision(policy: Any) -> MixedPrecisionPolicy:
    """Return the policy, taken over field by field where it is torch's own. Local.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise TypeError(f"expected a MixedPrecisionPolicy, got {policy!r}")
    return MixedPrecisionPolicy(**{name: getattr(policy, name) for name in names})


def as_offload(policy: Any) -> OffloadPolicy:
    """Return the policy, or ours for torch's own of the same name. Local.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(policy, OffloadPolicy):
        return policy
    if hasattr(policy, "pin_memory"):
        return CPUOffloadPolicy(pin_memory=policy.pin_memory)
    if type(policy).__name__ == "OffloadPolicy":
        return OffloadPolicy()
    raise TypeError(f"expected an OffloadPolicy, got {policy!r}")


@dataclass
class UnitSettings:
    """Switches of one unit that may change between steps.

    Attributes:
        reshard_after_forward: free the full buffer after each forward; None means yes except for
            the root.
        reshard_after_backward: free it after each backward.
        sync_gradients: reduce gradients at the end of each backward, else keep adding to them.
        zero_fill_unused: give parameters that got no gradient a zero one, so that ranks may use
            different parameters.
        divide_factor: what summed gradients are divided by; None is the number of ranks.
        all_reduce_gradients: in hybrid sharding, sum over replicas too, else keep adding up what
            one replica group reduced.
        all_reduce_hook: called with each reduced flat gradient, before it is handed out.
        unshard_in_backward: gather for backward; without it the unit's backward must not need its
            parameters.
        forward_prefetch: units to gather as soon as this one runs forward; None follows the
            recorded order.
        backward_prefetch: the same in backward.
        all_gather: what gathers in place of the comm; None is the comm.
        reduce_scatter: what reduces in place of the comm; None is the comm.
        reduce_comm: the comm to reduce on; None is the one to gather on.
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    sync_gradients: bool = True
    zero_fill_unused: bool = False
    divide_factor: float | None = None
    all_reduce_gradients: bool = True
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    unshard_in_backward: bool = True
    forward_prefetch: list[Unit] | None = None
    backward_prefetch: list[Unit] | None = None
    all_gather: AllGather | None = None
    reduce_scatter: ReduceScatter | None = None
    reduce_comm: Comm | None = None
