"""How calls are described."""

from __future__ import annotations

import torch

from shard_comm._calls import describe, listed, noted, noted_anew, noted_name


def test_a_call_is_described_by_what_was_noted_first() -> None:
    """What is inside a wrapper adds nothing: it is the caller's one call."""
    tensor = torch.ones(6)
    assert (describe("barrier"), describe("all_gather", tensor)) == (
        "barrier()",
        "all_gather of 6 float32",
    )
    with noted("layers.8"):
        assert describe("barrier") == "barrier() for layers.8"
        with noted("inner", "mean"), noted(""):
            assert describe("all_gather", tensor) == "all_gather of 6 float32 for layers.8"
            with noted_anew("check"):
                assert (describe("barrier"), noted_name()) == ("barrier() (check)", "")
            assert noted_name() == "layers.8"
    with noted("layers.8", "mean"):
        assert describe("barrier") == "barrier() (mean) for layers.8"
    assert describe("barrier") == "barrier()"


def test_ranks_are_listed_up_to_a_point() -> None:
    assert [listed([]), listed([3]), listed([0, 2])] == ["ranks []", "rank 3", "ranks [0, 2]"]
    assert listed(list(range(9)), most=2) == "9 ranks [0, 1] and so on"
