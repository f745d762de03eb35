from __future__ import annotations

import pytest
import torch

from shard_flat import FullBuffer, ParamSpec, plan_layout


def make() -> FullBuffer:
    """``a`` of 3 and ``b`` of 2x2 elements on two ranks: 4 elements each, b first."""
    specs = [ParamSpec("a", (3,), torch.float32), ParamSpec("b", (2, 2), torch.float32)]
    layout = plan_layout(specs, 2)
    assert layout.starts == (4, 0)
    return FullBuffer(layout, torch.empty(layout.numel))


def fill(buffer: FullBuffer) -> None:
    buffer.allocate()
    with torch.no_grad():
        buffer.data.copy_(torch.arange(8.0))


def test_views_have_the_parameters_shapes_and_places() -> None:
    buffer = make()
    fill(buffer)
    a, b = buffer.views()
    assert torch.equal(a, torch.tensor([4.0, 5.0, 6.0]))
    assert torch.equal(b, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert buffer.slice_of(1).tolist() == [4.0, 5.0, 6.0, 7.0]
    a[0] = 9.0
    assert buffer.data[4] == 9.0


def test_release_frees_the_bytes_and_allocate_gives_them_back() -> None:
    buffer = make()
    storage = buffer.data.untyped_storage()
    fill(buffer)
    assert (buffer.allocated, storage.size()) == (True, 32)
    buffer.release()
    assert (buffer.allocated, storage.size()) == (False, 0)
    buffer.release()
    assert storage.size() == 0
    buffer.allocate()
    assert (buffer.allocated, storage.size()) == (True, 32)
    pointer = buffer.data.data_ptr()
    buffer.allocate()
    assert buffer.data.data_ptr() == pointer


def test_views_outlive_the_data_and_see_the_refill() -> None:
    buffer = make()
    fill(buffer)
    a, b = buffer.views()
    buffer.release()
    assert (a.shape, b.shape) == ((3,), (2, 2))
    assert a.untyped_storage().size() == 0
    fill(buffer)
    assert a.tolist() == [4.0, 5.0, 6.0]
    assert b.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert a.data_ptr() == buffer.data.data_ptr() + 16


def test_refilling_is_no_in_place_change_of_a_parameter() -> None:
    buffer = make()
    fill(buffer)
    views = buffer.views()
    versions = [view._version for view in views]
    buffer.release()
    fill(buffer)
    assert [view._version for view in views] == versions


def test_backward_uses_what_the_refill_brought() -> None:
    """Autograd saved a view of the array; between forward and backward its bytes were gone."""
    buffer = make()
    fill(buffer)
    weight = torch.nn.Parameter(buffer.views()[1])
    x = torch.tensor([1.0, 10.0], requires_grad=True)
    out = (weight @ x).sum()
    buffer.release()
    fill(buffer)
    out.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0 + 2.0, 1.0 + 3.0]
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0, 10.0], [1.0, 10.0]]


def test_writing_into_a_view_still_counts_as_a_change() -> None:
    buffer = make()
    fill(buffer)
    weight = torch.nn.Parameter(buffer.views()[1])
    x = torch.tensor([1.0, 10.0], requires_grad=True)
    out = (weight @ x).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected data of shape \(8,\), got \(7,\)"):
        FullBuffer(make().layout, torch.empty(7))
    with pytest.raises(ValueError, match=r"expected data of shape \(8,\), got \(2, 4\)"):
        FullBuffer(make().layout, torch.empty(2, 4))


def test_data_that_shares_its_storage_is_refused() -> None:
    """Releasing it would free its neighbours."""
    with pytest.raises(ValueError, match="32 bytes of a storage of 64"):
        FullBuffer(make().layout, torch.empty(16)[:8])
    with pytest.raises(ValueError, match="contiguous"):
        FullBuffer(make().layout, torch.empty(16)[::2])


def test_another_compute_dtype_has_its_own_byte_count() -> None:
    buffer = FullBuffer(make().layout, torch.empty(8, dtype=torch.bfloat16))
    assert buffer.data.untyped_storage().size() == 16
    assert {view.dtype for view in buffer.views()} == {torch.bfloat16}
