"""Names of dtypes in safetensors files."""

from __future__ import annotations

import torch

_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float4_e2m1fn_x2: "F4",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return the name that safetensors gives ``dtype``; None where it has none. Local."""
    return _NAMES.get(dtype)


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the dtype behind a safetensors name; None for names that torch has none for. Local."""
    return _DTYPES.get(name)


def header_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a header states for a tensor of torch shape ``shape``. Local.

    They differ for F4 only: torch packs two values into one element, safetensors counts values.
    """
    if dtype == "F4" and shape:
        return (*shape[:-1], shape[-1] * 2)
    return shape
