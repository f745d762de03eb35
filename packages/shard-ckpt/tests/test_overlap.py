"""Templates of which tensors share part of their memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shard_ckpt import _overlap as overlap
from shard_ckpt import load, save
from shard_ckpt._dtypes import dtype_name
from shard_ckpt._index import TensorRecord
from shard_ckpt._leaf import leaf_of
from shard_ckpt._match import Target
from shard_ckpt._overlap import shared_parts
from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor, shard_tensor
from shard_testing import run_threads

SOLO = SoloComm()


def target(tensor: torch.Tensor, name: str) -> Target:
    dtype = dtype_name(tensor.dtype) or ""
    shape = tuple(tensor.shape)
    return Target(leaf_of(tensor, "m", name), TensorRecord("m", name, dtype, shape, ()))


def pairs_of(one: torch.Tensor, other: torch.Tensor) -> set[tuple[int, int]]:
    """Return which element of one is which of the other, by what ``shared_parts`` says."""
    targets = [target(one, "one"), target(other, "other")]
    found: set[tuple[int, int]] = set()
    for parts in shared_parts(targets):
        left, right = sorted((part.leaf for part in parts), key=lambda leaf: leaf.name)
        assert left.start < left.stop
        found |= set(zip(range(left.start, left.stop), range(right.start, right.stop), strict=True))
    return found


def test_the_example() -> None:
    t = torch.zeros(6)
    (pair,) = shared_parts([target(t[:4], "a"), target(t[2:], "b")])
    assert [(part.leaf.start, part.leaf.stop) for part in pair] == [(2, 4), (0, 2)]


def test_what_is_shared_is_what_elements_say() -> None:
    dice = random.Random(5)
    base = torch.arange(600, dtype=torch.int32)
    seen = 0
    for _ in range(300):
        views = []
        for _ in range(2):
            shape = [dice.randint(1, 4) for _ in range(dice.randint(0, 3))]
            inner, outer = dice.randint(1, 2), dice.randint(1, 2)
            strides = [inner, 4 * inner, 16 * inner * outer][: len(shape)]
            dice.shuffle(strides)
            views.append(base.as_strided(shape, strides, dice.randint(0, 12)))
        one, other = (view.reshape(-1).tolist() for view in views)
        expected = {(at, other.index(value)) for at, value in enumerate(one) if value in other}
        assert pairs_of(*views) == expected
        seen += len(expected)
    assert seen > 200


def test_parts_that_agree_are_loaded_and_others_refused(tmp_path: Path) -> None:
    full = torch.arange(6.0)
    save({"m": {"a": full[:4].clone(), "b": full[2:].clone()}}, tmp_path / "same", comm=SOLO)
    save({"m": {"a": full[:4].clone(), "b": full[2:] + 1}}, tmp_path / "other", comm=SOLO)

    def rank(comm: Comm) -> list[float]:
        t = torch.full((6,), -1.0)
        template = {"m": {"a": t[:4], "b": t[2:]}}
        with pytest.raises(ValueError, match="m: a and m: b share memory here, but differ"):
            load(template, tmp_path / "other", comm=comm)
        assert t.unique().tolist() == [-1.0]
        load(template, tmp_path / "same", comm=comm)
        return list(t.tolist())

    assert run_threads(rank, 2) == [full.tolist()] * 2


def test_columns_side_by_side_and_a_transposed_view(tmp_path: Path) -> None:
    full = torch.arange(15.0).view(3, 5)
    state = {"left": full[:, :2], "right": full[:, 2:], "turned": full.t(), "mid": full[:, 1:4]}
    save({"m": state}, tmp_path / "a", comm=SOLO)
    t = torch.zeros(3, 5)
    columns = {"left": t[:, :2], "right": t[:, 2:]}
    load({"m": columns}, tmp_path / "a", comm=SOLO, strict=False)
    assert torch.equal(t, full)
    t.zero_()
    load({"m": {**columns, "turned": t.t(), "mid": t[:, 1:4]}}, tmp_path / "a", comm=SOLO)
    assert torch.equal(t, full)
    save({"m": {**state, "turned": full.t() + 1}}, tmp_path / "b", comm=SOLO)
    t.zero_()
    with pytest.raises(ValueError, match=r"m: (left|turned) and m: (left|turned) share memory"):
        load({"m": {**columns, "turned": t.t()}}, tmp_path / "b", comm=SOLO, strict=False)
    assert not t.any()


def test_pieces_are_compared_on_every_rank(tmp_path: Path) -> None:
    """Of each rank's five elements, the first four are its piece of a, the last four of b."""
    a = torch.arange(8.0)
    good, bad = torch.tensor([1.0, 2, 3, 9, 5, 6, 7, 8]), torch.tensor([1.0, 2, 3, 9, 5, 6, 0, 8])
    save({"m": {"a": a, "b": good}}, tmp_path / "good", comm=SOLO)
    save({"m": {"a": a, "b": bad}}, tmp_path / "bad", comm=SOLO)

    def rank(comm: Comm) -> list[float]:
        memory = torch.zeros(5)
        template = {
            "m": {
                name: ShardTensor(memory[at : at + 4], shard_tensor(a, comm=comm).spec, comm=comm)
                for at, name in enumerate("ab")
            }
        }
        with pytest.raises(ValueError, match=r"share memory here.* \(rank 1 of 2\)"):
            load(template, tmp_path / "bad", comm=comm)
        assert not memory.any()
        load(template, tmp_path / "good", comm=comm)
        return list(memory.tolist())

    assert run_threads(rank, 2) == [[0.0, 1.0, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 7.0, 8.0]]


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = torch.zeros(4, 4)
    state = {"a": torch.ones(4, 4), "b": torch.ones(4, 4, dtype=torch.int32)}
    save({"m": state}, tmp_path / "kinds", comm=SOLO)
    with pytest.raises(ValueError, match=r"m: a and m: b share memory, but not the same elements"):
        load({"m": {"a": t, "b": t.view(torch.int32)}}, tmp_path / "kinds", comm=SOLO)
    save({"m": {"a": torch.ones(4, 4)}}, tmp_path / "one", comm=SOLO)
    with pytest.raises(ValueError, match=r"m: a: elements share memory, as strides \(0, 1\)"):
        load({"m": {"a": t[0].expand(4, 4)}}, tmp_path / "one", comm=SOLO)
    save({"m": {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}}, tmp_path / "two", comm=SOLO)
    monkeypatch.setattr(overlap, "_MOST_PARTS", 15)
    with pytest.raises(ValueError, match="m: a and m: b share memory in more than 15 places"):
        load({"m": {"a": t, "b": t.t()}}, tmp_path / "two", comm=SOLO)
    assert not t.any()


def test_elements_that_overlap_in_steps_are_refused(tmp_path: Path) -> None:
    save({"m": {"a": torch.arange(9.0).view(3, 3)}}, tmp_path / "a", comm=SOLO)
    t = torch.zeros(9)
    with pytest.raises(ValueError, match=r"m: a: elements share memory, as strides \(1, 1\)"):
        load({"m": {"a": t.as_strided((3, 3), (1, 1))}}, tmp_path / "a", comm=SOLO)
    assert not t.any()
    interleaved = t.as_strided((2, 3), (1, 2))  # strides reach over one another, elements do not
    save({"m": {"a": torch.arange(6.0).view(2, 3)}}, tmp_path / "b", comm=SOLO)
    load({"m": {"a": interleaved}}, tmp_path / "b", comm=SOLO)
    assert t.tolist() == [0, 3, 1, 4, 2, 5, 0, 0, 0]


@pytest.mark.parametrize("lazy", ["conjugated", "negated"])
def test_lazy_views_are_not_the_same_elements(tmp_path: Path, lazy: str) -> None:
    z = torch.zeros(2, dtype=torch.complex64)
    one, other = (z, z.conj()) if lazy == "conjugated" else (z.imag, z.conj().imag)
    stored = torch.ones(2).to(one.dtype) * 3
    save({"m": {"a": stored, "b": stored.clone()}}, tmp_path / "a", comm=SOLO)
    with pytest.raises(ValueError, match=rf"m: a and m: b share memory, but .*, {lazy}\)"):
        load({"m": {"a": one, "b": other}}, tmp_path / "a", comm=SOLO)
    assert not z.any()


def test_columns_of_one_matrix_are_told_apart_by_their_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrix = torch.zeros(6, 5)
    columns = [target(matrix[:, :2], "a"), target(matrix[:, 2:], "b")]
    monkeypatch.setattr(overlap, "_shared_bytes", None)  # not needed, so not called
    assert list(shared_parts(columns)) == []
    with pytest.raises(TypeError, match="not callable"):
        list(shared_parts([target(matrix[:, :3], "a"), target(matrix[:, 2:], "b")]))
