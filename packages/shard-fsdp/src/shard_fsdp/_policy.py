"""Settings of a unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    """

    reshard_after_forward: bool | None = None
    reshard_after_backward: bool = True
    sync_gradients: bool = True
    zero_fill_unused: bool = False
    divide_factor: float | None = None
