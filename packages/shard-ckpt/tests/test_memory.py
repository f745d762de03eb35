from __future__ import annotations

import pytest
import torch

from shard_ckpt._memory import bytes_of, copy_bytes, flat_range, is_flat, joined_runs


def test_bytes_are_the_tensors_own_memory() -> None:
    tensor = torch.tensor([1, 258], dtype=torch.int16)
    view = bytes_of(tensor)
    assert view.tobytes() == b"\x01\x00\x02\x01"
    view[2:] = b"\x07\x00"
    assert tensor.tolist() == [1, 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_bytes_of_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones((), dtype=dtype)
    assert len(bytes_of(tensor)) == dtype.itemsize
    assert len(bytes_of(torch.empty(0, 3, dtype=dtype))) == 0


def test_there_are_no_bytes_of_scattered_memory() -> None:
    with pytest.raises(AssertionError, match="stride"):
        bytes_of(torch.zeros(2, 3).t())


def test_flat_ranges_are_views_where_memory_is_in_order() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    part = flat_range(tensor, start=5, stop=8)
    assert part.tolist() == [5, 6, 7]
    assert part.data_ptr() == tensor.data_ptr() + 5 * 4
    assert flat_range(tensor.t(), start=1, stop=4).tolist() == [4, 8, 1]


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert not is_flat(tensor.conj())
    assert flat_range(tensor.conj(), start=0, stop=2).tolist() == [1 - 2j, 3 + 4j]
    assert flat_range(tensor.conj().imag, start=0, stop=2).tolist() == [-2, 4]


def test_neighbours_in_memory_become_one_run() -> None:
    flat = torch.arange(10, dtype=torch.int32)
    other = torch.arange(3, dtype=torch.int16)
    pieces = [flat[0:3], flat[3:3], flat[3:7], other[1:], flat[8:9], flat[9:], flat[7:8]]
    runs = list(joined_runs(pieces))
    assert [run.numel() for run in runs] == [28, 4, 8, 4]
    assert runs[0].data_ptr() == flat.data_ptr()
    assert b"".join(bytes_of(run).tobytes() for run in runs) == b"".join(
        bytes_of(piece).tobytes() for piece in pieces
    )


def test_temporary_copies_live_as_long_as_their_run() -> None:
    scattered = [torch.full((40, 25), float(at)).t() for at in range(20)]
    runs = joined_runs(flat_range(t, start=0, stop=1000) for t in scattered)
    seen = [set(run.view(torch.float32).tolist()) for run in runs]
    assert seen == [{float(at)} for at in range(20)]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 17, 32])
@pytest.mark.parametrize(("to", "of"), [(0, 0), (8, 16), (2, 8), (0, 6), (1, 0), (8, 3)])
def test_bytes_are_copied_wherever_they_lie(nbytes: int, to: int, of: int) -> None:
    source, target = torch.arange(64).byte(), torch.full((64,), 255).byte()
    copy_bytes(target[to : to + nbytes], source[of : of + nbytes])
    expected = [255] * to + list(range(of, of + nbytes)) + [255] * (64 - to - nbytes)
    assert target.tolist() == expected
