"""torch.distributed.checkpoint writes and reads pieces as what they are: parts of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shard_flat import ShardTensor, shard_tensor

# torch says so whenever there is no process group, asked for or not.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

Silent = Callable[[int, int], Any]
FULL = torch.arange(15.0).view(3, 5)


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def test_a_piece_is_described_by_its_boxes(silent: Silent) -> None:
    first, second = (shard_tensor(FULL, comm=silent(rank, 2), name="w") for rank in (0, 1))
    assert first.__create_chunk_list__() == [chunk([0, 0], [1, 5]), chunk([1, 0], [1, 3])]
    assert second.__create_chunk_list__() == [chunk([1, 3], [1, 2]), chunk([2, 0], [1, 5])]
    items = second.__create_write_items__("w", second)
    assert [item.index for item in items] == [
        MetadataIndex("w", torch.Size([1, 3])),
        MetadataIndex("w", torch.Size([2, 0])),
    ]
    written = [second.__get_tensor_shard__(item.index).tolist() for item in items]
    assert written == [[[8.0, 9.0]], [[10.0, 11.0, 12.0, 13.0, 14.0]]]
    assert items[0].tensor_data is not None
    assert items[0].tensor_data.size == torch.Size([3, 5])
    assert items[0].tensor_data.properties.dtype == torch.float32


def test_boxes_are_views_of_the_piece(silent: Silent) -> None:
    tensor = shard_tensor(FULL, comm=silent(1, 2), name="w")
    tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([1, 3]))).fill_(-1)
    assert tensor.local.tolist()[:3] == [-1.0, -1.0, 10.0]
    with pytest.raises(ValueError, match=r"w: no box at \(0, 0\) in the piece \[8, 15\)"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([0, 0])))


def test_tensors_without_elements_are_on_record_once(silent: Silent) -> None:
    first, second = (shard_tensor(torch.zeros(0, 3), comm=silent(r, 2), name="e") for r in (0, 1))
    (item,) = first.__create_write_items__("e", first)
    assert item.tensor_data is not None
    assert item.tensor_data.chunk == chunk([0, 0], [0, 3])
    assert first.__get_tensor_shard__(item.index).shape == (0, 3)
    assert second.__create_write_items__("e", second) == []
    assert first.__create_chunk_list__() == []


def test_round_trip_in_one_process(tmp_path: Path, silent: Silent) -> None:
    fulls = {"w": FULL, "s": torch.tensor(7.0), "e": torch.zeros(0, 3), "q": torch.ones(2, 3, 7)}
    pieces = {n: shard_tensor(f, comm=silent(0, 1), name=n) for n, f in fulls.items()}
    save(dict(pieces), checkpoint_id=tmp_path, no_dist=True)
    whole: dict[str, Any] = {name: torch.zeros_like(full) for name, full in fulls.items()}
    load(whole, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(whole[name], full) for name, full in fulls.items())


@pytest.mark.parametrize("size", [2, 3, 4])
def test_any_rank_reads_its_piece_from_a_whole_tensor(
    size: int, tmp_path: Path, silent: Silent
) -> None:
    """Written plain, read by every rank of several worlds, cut in the middle of rows."""
    save({"w": FULL, "s": torch.tensor(7.0)}, checkpoint_id=tmp_path, no_dist=True)
    for rank in range(size):
        w = shard_tensor(torch.zeros(3, 5), comm=silent(rank, size), name="w")
        s = shard_tensor(torch.tensor(0.0), comm=silent(rank, size), name="s")
        load({"w": w, "s": s}, checkpoint_id=tmp_path, no_dist=True)
        assert w.local.tolist() == list(map(float, range(w.spec.start, w.spec.stop)))
        assert s.local.tolist() == [7.0][rank:]


def test_writing_a_piece_alone_puts_it_in_its_place(tmp_path: Path, silent: Silent) -> None:
    tensor = shard_tensor(FULL, comm=silent(1, 2), name="w")
    assert isinstance(tensor, ShardTensor)
    save({"w": tensor}, checkpoint_id=tmp_path, no_dist=True)
    whole = torch.full((3, 5), -1.0)
    load({"w": whole}, checkpoint_id=tmp_path, no_dist=True)
    assert whole.flatten().tolist() == [-1.0] * 8 + [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
