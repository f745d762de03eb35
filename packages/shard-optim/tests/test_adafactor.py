"""Adafactor: torch's results, with the rows and columns of whole matrices wherever cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shard_comm import Comm, Recorded
from shard_flat import ShardTensor
from shard_optim import Adafactor
from shard_optim._rows import Rows
from shard_optim._window import Scratch
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SHAPES: list[tuple[int, ...]] = [
    (7, 5),
    (3,),
    (4, 2, 3, 3),
    (90, 400),
    (),
    (1, 9),
    (0, 4),
    (4, 0),
]
HYPER: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "d": 1.0, "beta2_decay": -0.7}


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SHAPES, dtype, steps, drawn=torch.float64)
    grads[1][0] = grads[2][1] = None
    return fulls, grads


def train(kind: type[Any], fulls: Sequence[torch.Tensor], steps: Any) -> tuple[list[Any], Any]:
    return take_steps(lambda params: kind(params, **HYPER), fulls, steps)


def test_rows_by_hand() -> None:
    rows = Rows((2, 3), 2, 4)
    flat = torch.tensor([2.0, 3.0])
    assert list(rows.windows(flat.device)) == [(0, 2)]
    assert rows.take(flat, 0, 2).tolist() == [[0, 0, 2], [3, 0, 0]]
    by_row, by_column = rows.square_sums(flat, Scratch())
    assert by_row.tolist() == [4, 9]
    assert by_column.tolist() == [[9, 0, 4]]


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    cuts=st.lists(st.integers(0, 600), max_size=3),
)
def test_pieces_add_up_to_the_whole(shape: list[int], cuts: list[int]) -> None:
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    edges = sorted({0, whole.numel(), *(cut % whole.numel() for cut in cuts)})
    sums = [
        Rows(tuple(shape), a, b).square_sums(whole.view(-1)[a:b], Scratch())
        for a, b in pairwise(edges)
    ]
    squares = whole.double().square()
    by_row, by_column = (torch.stack(parts).sum(0) for parts in zip(*sums, strict=True))
    assert torch.equal(by_row, squares.sum(-1).view(-1))
    assert torch.equal(by_column, squares.sum(-2).view(by_column.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_torch(dtype: torch.dtype) -> None:
    fulls, steps = data(dtype, 5)
    full = [i for i, each in enumerate(fulls) if each.numel()]  # torch divides by the number
    fulls, steps = [fulls[i] for i in full], [[step[i] for i in full] for step in steps]
    theirs, other = train(torch.optim.Adafactor, fulls, steps)
    ours, mine = train(Adafactor, fulls, steps)
    close = 1e-5 if dtype == torch.float32 else 1e-12
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=close, atol=close)
        for slot, value in other.state[b].items():
            torch.testing.assert_close(mine.state[a][slot], value, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_on_any_number_of_ranks(
    make_params: MakeParams, give_grads: GiveGrads, dtype: torch.dtype, world_size: int
) -> None:
    fulls, steps = data(dtype, 4)
    params, plain = train(Adafactor, fulls, steps)
    matrix = plain.state[params[3]]

    def rank(comm: Comm) -> list[torch.Tensor]:
        sharded = make_params(comm, fulls)
        first = Adafactor(sharded, **HYPER)
        for grads in steps[:2]:
            give_grads(sharded, grads)
            first.step()
        # Through a state dictionary on the way.
        twins = make_params(comm, [p.full_tensor().detach() for p in sharded])
        second = Adafactor(twins)
        second.state_dict(allocate=True)
        second.load_state_dict(first.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            second.step()
        state = second.state[twins[3]]
        assert type(state["row_var"]) is torch.Tensor
        return [p.full_tensor().detach() for p in twins] + [state["row_var"], state["col_var"]]

    expected = [p.detach() for p in params] + [matrix["row_var"], matrix["col_var"]]
    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_three_collectives_for_all_parameters(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    fulls = [torch.ones(20, 30), torch.ones(7), torch.ones(40, 10)]

    def rank(comm: Comm) -> tuple[int, int]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        optimizer = Adafactor(params)
        give_grads(params, fulls)
        optimizer.step()
        assert set(recorded.records) == {"all_reduce"}
        record = recorded.records["all_reduce"]
        return record.calls, record.payload_bytes

    # Seven flags of 4 bytes; three squares and 50 + 50 sums; three squares again.
    assert run_threads(rank, 2) == [(3, 7 * 4 + (3 + 100 + 3) * 8)] * 2


def test_state_of_torch_goes_on_here() -> None:
    fulls, steps = data(torch.float32, 4)
    fulls, steps = fulls[:5], [step[:5] for step in steps]
    expected, _ = train(torch.optim.Adafactor, fulls, steps)
    params, theirs = train(torch.optim.Adafactor, fulls, steps[:2])
    ours = Adafactor(params)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["beta2_decay"] == -0.7
    for grads in steps[2:]:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        ours.step()
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-5)


def test_memory_is_one_number_per_row_and_column(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    def rank(comm: Comm) -> int:
        params = make_params(comm, [torch.ones(64, 32), torch.ones(10)])
        optimizer = Adafactor(params)
        give_grads(params, [torch.ones(64, 32), torch.ones(10)])
        optimizer.step()
        pieces = [
            value.local if isinstance(value, ShardTensor) else value
            for own in optimizer.state.values()
            for key, value in own.items()
            if key != "step"
        ]
        return sum(piece.numel() for piece in pieces)

    held = run_threads(rank, 2)
    assert sum(held) == 2 * (64 + 32) + 10


def test_a_small_language_model(train_decoder: TrainDecoder) -> None:
    plain = train_decoder(None, lambda params: Adafactor(params, lr=0.05))
    assert plain[-1] < 0.8 * plain[0]
    build = Adafactor
    assert run_threads(train_decoder, 3, lambda params: build(params, lr=0.05)) == [plain] * 3
    theirs = train_decoder(None, lambda params: torch.optim.Adafactor(params, lr=0.05))
    assert plain == pytest.approx(theirs, rel=1e-4)


def test_a_gradient_on_some_ranks_only(make_params: MakeParams) -> None:
    def rank(comm: Comm) -> str:
        first, second = make_params(comm, [torch.ones(4, 4), torch.ones(4, 4)])
        first.grad = first.like(torch.ones_like(first.local))
        if comm.rank == 1:
            second.grad = second.like(torch.ones_like(second.local))
        with pytest.raises(ValueError, match=r"^p1: expected a gradient on all ranks") as caught:
            Adafactor([first, second]).step()
        assert first.local.eq(1).all()
        return str(caught.value)

    messages = run_threads(rank, 2)
    assert "got none here and another elsewhere (rank 0 of 2)" in messages[0]


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": -1.0}, "expected lr >= 0, got -1.0"),
        ({"beta2_decay": 0.1}, "expected beta2_decay <= 0, got 0.1"),
        ({"d": 0.0}, "expected d > 0, got 0.0"),
        ({"eps": (None, None)}, "expected eps of two numbers"),
        ({"eps": (-1.0, 0.1)}, "expected eps of two numbers"),
        ({"weight_decay": -1.0}, "expected weight_decay >= 0, got -1.0"),
    ],
)
def test_hyper_parameters_out_of_range(hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Adafactor([nn.Parameter(torch.ones(2))], **hyper)


def test_what_it_does_not_do() -> None:
    param = nn.Parameter(torch.ones(4, 2).t())
    with pytest.raises(ValueError, match=r"^w: expected rows side by side in memory, got strides"):
        Adafactor([("w", param)])
    plain = nn.Parameter(torch.ones(2))
    theirs = torch.optim.Adafactor([plain], maximize=True)
    with pytest.raises(ValueError, match="saved with maximize=True, which this Adafactor"):
        Adafactor([plain]).load_state_dict(theirs.state_dict())
