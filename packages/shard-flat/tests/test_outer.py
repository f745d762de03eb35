"""Pieces of what is itself the local part of a DTensor."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shard_flat import Outer, ParamSpec, ShardSpec, ShardTensor, plan_layout, shard_tensor


class Corner:
    """One rank of a comm that must not be asked anything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        raise AssertionError("a local operation gathered")

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
        raise AssertionError("a local operation reduced")


MESH = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int), _init_backend=False, _rank=0)


def _outer(shape: tuple[int, ...], placements: list[Placement], corners: list[Corner]) -> Outer:
    return Outer(shape, tuple(placements), tuple(corners), MESH)


def test_example_in_the_documentation() -> None:
    outer = _outer((4, 6), [Shard(1)], [Corner(1, 2)])
    assert outer.local_shape == (4, 3)
    assert outer.offsets == (0, 3)
    part = outer.part_of(torch.arange(24).view(4, 6))
    assert part.flatten()[1:5].tolist() == [4, 5, 9, 10]


def test_replicas_are_not_cut() -> None:
    assert _outer((4, 6), [Replicate()], [Corner(1, 2)]).sharded_comms == ()


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_part_is_what_torch_cuts(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    kinds = st.sampled_from([Replicate(), *(Shard(d) for d in range(len(shape)))])
    placements: list[Placement] = data.draw(st.lists(kinds, min_size=1, max_size=2))
    sizes = [data.draw(st.integers(1, 3)) for _ in placements]
    corners = [Corner(data.draw(st.integers(0, size - 1)), size) for size in sizes]
    outer = _outer(shape, placements, corners)
    whole = torch.arange(math.prod(shape)).view(shape)
    part = outer.part_of(whole)
    expected = whole
    for placement, corner in zip(placements, corners, strict=True):
        if isinstance(placement, Shard):  # as torch cuts DTensors
            chunks = list(expected.chunk(corner.size, placement.dim))
            empty = expected.narrow(placement.dim, 0, 0)
            chunks += [empty] * (corner.size - len(chunks))
            expected = chunks[corner.rank]
    assert torch.equal(part, expected)
    assert outer.local_shape == tuple(part.shape)
    if part.numel():
        assert outer.offsets == tuple(int(at) for at in (whole == part.flatten()[0]).nonzero()[0])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_uneven_parts_gather_to_the_whole(on_ranks: Any, dim: int, size: int) -> None:
    whole = torch.arange(35.0).view(5, 7)

    def gather(comm: Any) -> torch.Tensor:
        outer = Outer((5, 7), (Shard(dim),), (comm,), MESH)
        return outer.gather(outer.part_of(whole))

    assert all(torch.equal(found, whole) for found in on_ranks(size, gather))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_boxes_of_all_ranks_are_the_whole(placement: Placement) -> None:
    """What torch.distributed.checkpoint is told, with two ranks to cut over and three outside."""
    whole = torch.arange(35.0).view(5, 7)
    seen = torch.zeros(5, 7)
    for rank, corner in itertools.product(range(2), range(3)):
        outer = _outer((5, 7), [placement], [Corner(corner, 3)])
        layout = plan_layout([ParamSpec("w", outer.local_shape, whole.dtype)], 2)
        spec = replace(layout.shard_spec(rank, 0), outer=outer)
        piece = ShardTensor(spec.part_of(whole).clone(), spec, comm=Corner(rank, 2))
        assert piece.shape == (5, 7)
        assert piece.placements[1:] == (placement,)
        for item in piece.__create_write_items__("w", piece):
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            seen[box] += 1
            assert torch.equal(piece.__get_tensor_shard__(item.index), whole[box])
    assert torch.equal(seen, torch.full((5, 7), 3.0 if placement == Replicate() else 1.0))


def test_tensors_of_another_outer_are_not_mixed() -> None:
    specs = [
        ShardSpec("w", (2, 6), 0, 12, 0, 12, _outer((4, 6), [Shard(0)], [corner]))
        for corner in (Corner(0, 2), Corner(1, 2))
    ]
    a, b = (ShardTensor(torch.ones(12), spec, comm=Corner(0, 1)) for spec in specs)
    with pytest.raises(ValueError, match="shard both by one layout"):
        a + b
    plain = shard_tensor(torch.ones(2, 6), comm=Corner(0, 1))
    with pytest.raises(ValueError, match="shard both by one layout"):
        a + plain


def test_bad_outers_are_refused() -> None:
    corner = Corner(0, 2)
    for placement in (Partial(), Shard(2), Shard(-1)):
        with pytest.raises(ValueError, match=r"expected Replicate\(\) or Shard"):
            _outer((4, 6), [placement], [corner])
    with pytest.raises(ValueError, match="one comm for each"):
        _outer((4, 6), [Shard(0)], [])
    outer = _outer((4, 6), [Shard(0)], [corner])
    with pytest.raises(ValueError, match=r"w: expected the local shape \(2, 6\)"):
        ShardSpec("w", (4, 6), 0, 24, 0, 24, outer)
