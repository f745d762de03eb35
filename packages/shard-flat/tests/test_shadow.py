"""The copy of a shard in another dtype: when it may be written, and when it is to be trusted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shard_flat import ParamSpec, Shadow, ShardTensor, plan_layout, shadow_of


class _OneRank:
    rank, size = 0, 1

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        out.copy_(inp)

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
        """Leave it: it is the sum."""


def _shadowed() -> tuple[torch.Tensor, Shadow, ShardTensor]:
    """A shard of 4 and 2 elements with a current copy, and the first of its tensors."""
    specs = [ParamSpec("a", (2, 2), torch.float32), ParamSpec("b", (2,), torch.float32)]
    layout = plan_layout(specs, 1)
    flat = torch.ones(layout.shard_numel)
    shadow = Shadow(flat)
    shadow.attach(torch.ones(flat.numel(), dtype=torch.bfloat16), lambda: True)
    shadow.settle()
    return flat, shadow, ShardTensor(flat[:4], layout.shard_spec(0, 0), comm=_OneRank())


def test_every_piece_leads_to_the_shadow_of_its_shard() -> None:
    flat, shadow, a = _shadowed()
    assert shadow_of(a.piece) is shadow_of(flat[4:].detach()) is shadow_of(flat[6:6]) is shadow
    assert shadow_of(torch.ones(6)) is None
    del shadow
    gc.collect()
    assert shadow_of(flat) is None


def test_what_was_lent_is_not_current_until_it_is_settled() -> None:
    flat, shadow, _ = _shadowed()
    copy = shadow.lend()
    assert copy is shadow.copy
    assert copy is not None
    assert not shadow.is_current
    assert shadow.lend() is None  # who borrowed it may have failed half way
    flat.fill_(2)
    copy.fill_(2)
    shadow.settle()
    assert shadow.is_current
    assert shadow.lend() is copy


def test_nothing_is_lent_where_there_is_no_copy_or_somebody_reads_it() -> None:
    flat = torch.ones(4)
    shadow = Shadow(flat)
    shadow.settle()
    assert shadow.lend() is None
    with pytest.raises(ValueError, match=r"expected a copy of shape \[4\], got \[3\]"):
        shadow.attach(torch.ones(3, dtype=torch.float16), lambda: True)
    read = [True]
    shadow.attach(torch.ones(4, dtype=torch.float16), lambda: not read[0])
    assert not shadow.is_current  # nothing was copied there
    shadow.settle()
    assert shadow.lend() is None
    assert shadow.is_current
    read[0] = False
    assert shadow.lend() is shadow.copy


COUNTED: dict[str, Callable[[ShardTensor], object]] = {
    "in place": lambda a: a.add_(1),
    "a list": lambda a: torch._foreach_mul_([a], 2),
    "through .data": lambda a: a.data.add_(1),
    "through detach": lambda a: a.detach().zero_(),
    "copied": lambda a: a.copy_(torch.zeros(2, 2)),
    "through piece": lambda a: a.piece.add_(1),
}
UNCOUNTED: dict[str, Callable[[Any], object]] = {
    "numpy": lambda a: a.to_local().numpy().fill(3),
    "numpy of local": lambda a: a.local.numpy().fill(3),
    "numpy of a copy": lambda a: a.detach().to_local().numpy().fill(3),
    "data of a piece": lambda a: a.local.data.fill_(3),
}


@pytest.mark.parametrize("how", COUNTED)
def test_a_change_is_told_by_the_version(how: str) -> None:
    _, shadow, a = _shadowed()
    with torch.no_grad():
        COUNTED[how](a)
    assert not shadow.is_current
    assert shadow.lend() is None
    shadow.settle()
    assert shadow.lend() is not None


def test_in_inference_mode_too() -> None:
    _, shadow, a = _shadowed()
    with torch.inference_mode():
        a.add_(1)
    assert not shadow.is_current


@pytest.mark.parametrize("how", UNCOUNTED)
def test_who_has_a_piece_may_write_it_unseen(how: str) -> None:
    flat, shadow, a = _shadowed()
    version = flat._version
    UNCOUNTED[how](a)
    assert flat[:4].tolist() == [3.0] * 4
    assert flat._version == version
    assert not shadow.is_current
    shadow.settle()  # its owner casts anew
    assert shadow.is_current
    assert shadow.lend() is None  # and again after each change: the piece may be kept
    UNCOUNTED[how](a)  # which takes another piece
    assert not shadow.is_current


def test_a_new_shadow_of_the_same_shard_knows_that_pieces_are_out() -> None:
    flat, shadow, a = _shadowed()
    assert a.local.numel() == 4
    again = Shadow(flat)
    again.attach(torch.ones(flat.numel(), dtype=torch.bfloat16), lambda: True)
    again.settle()
    assert again.lend() is None
    assert shadow_of(flat) is again
    assert not shadow.is_current


def test_reading_the_whole_hands_nothing_out() -> None:
    _, shadow, a = _shadowed()
    a.full_tensor().zero_()
    assert shadow.is_current
    assert shadow.lend() is not None
