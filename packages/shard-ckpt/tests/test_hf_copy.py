from __future__ import annotations

import torch

from shard_ckpt._blocks import BLOCK_BYTES
from shard_ckpt._hf_copy import order_blocks
from shard_ckpt._hf_layout import Copy

F32 = torch.float32


def copy(first: int, blocks: int, out: int, at: int) -> Copy:
    """Return a copy of whole blocks of a source file to blocks of an output file."""
    low, high = first * BLOCK_BYTES, (first + blocks) * BLOCK_BYTES
    return Copy(low, high, out, at * BLOCK_BYTES, F32, F32, (high - low) // 4, 0)


def test_ranks_write_different_parts() -> None:
    """Two ranks hold half of each of two tensors, which go to two files."""
    copies = {0: [copy(0, 2, 0, 0), copy(2, 2, 1, 0)], 1: [copy(0, 2, 0, 2), copy(2, 2, 1, 2)]}
    assert order_blocks(copies) == [
        *[(0, 0), (0, 1), (1, 0), (1, 1)],  # the first file, in order
        *[(0, 2), (0, 3), (1, 2), (1, 3)],  # the second
    ]


def test_headers_are_read_and_blocks_of_nothing_are_not() -> None:
    nothing = Copy(7 * BLOCK_BYTES, 7 * BLOCK_BYTES, 0, 0, F32, F32, 0, 0)
    assert order_blocks({3: [copy(5, 1, 1, 0), nothing]}) == [(3, 0), (3, 5)]


def test_a_block_of_several_tensors_is_read_once() -> None:
    tensors = [Copy(n * 8, n * 8 + 8, n % 2, 80 - n * 8, F32, F32, 2, 0) for n in range(10)]
    assert order_blocks({0: tensors}) == [(0, 0)]


def test_runs_go_where_their_rows_are() -> None:
    """Columns 1 and 2 of 3x5 float32, halved in size on the way; the piece cuts the second run."""
    columns = Copy(100, 124, 0, 50, F32, torch.float16, length=2, stride=5)
    assert list(columns.spans(0, 112)) == [(100, 108, 50), (108, 112, 60)]
    assert list(columns.spans(112, 200)) == [(112, 116, 62), (116, 124, 70)]
