from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shard_ckpt._dtypes import dtype_name, header_shape, torch_dtype
from shard_ckpt._header import header_length, parse_header
from shard_testing import STORED_DTYPES


@pytest.mark.parametrize("dtype", STORED_DTYPES, ids=str)
def test_names_and_shapes_are_those_of_the_stock_writer(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.zeros(2, 4 * dtype.itemsize, dtype=torch.uint8)
    tensor = raw.view(dtype)
    path = tmp_path / "stock.safetensors"
    save_file({"t": tensor}, path)
    data = path.read_bytes()
    length = header_length(data[:8], file_bytes=len(data), label="stock")
    (entry,) = parse_header(data[8 : 8 + length], file_bytes=len(data), label="stock").entries
    name = dtype_name(dtype)
    assert name is not None
    assert (entry.dtype, entry.shape) == (name, header_shape(name, (2, 4)))
    assert torch_dtype(name) == dtype == load_file(path)["t"].dtype


def test_others_have_no_name() -> None:
    assert dtype_name(torch.complex128) is None
    assert torch_dtype("F6_E2M3") is None


def test_packed_values_are_counted_one_by_one() -> None:
    assert header_shape("F4", (3, 2)) == (3, 4)
    assert header_shape("BF16", (3, 2)) == (3, 2)
