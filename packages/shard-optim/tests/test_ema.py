"""Moving averages: the same bits on any number of ranks, swapped in and out, saved by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import EMA
from shard_testing import run_threads

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]

worlds = pytest.mark.parametrize("world_size", [1, 2, 3])
SIZES = [37, 0, 2001, 5]


def test_by_hand() -> None:
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    average = EMA([param], 0.75)
    with torch.no_grad():
        param.fill_(5.0)
    average.update()
    assert average.state_dict()["averages"]["0.0"].tolist() == [2.0, 2.75]
    average.update()
    assert average.state_dict()["averages"]["0.0"].tolist() == [2.75, 3.3125]
    assert average.state_dict()["updates"] == 2
    with average.swapped_in():
        assert param.tolist() == [2.75, 3.3125]
    assert param.tolist() == [5.0, 5.0]


@worlds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_plain_parameters(
    make_params: MakeParams, world_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fulls = [torch.randn(n).to(dtype) for n in SIZES]
    moves = [[torch.randn(n).to(dtype) for n in SIZES] for _ in range(3)]

    def run(params: Sequence[torch.Tensor]) -> EMA:
        average = EMA(params, 0.9)
        for move in moves:
            with torch.no_grad():
                for param, value in zip(params, move, strict=True):
                    param.copy_(value)
            average.update()
        return average

    plain = run([nn.Parameter(full.clone()) for full in fulls])
    expected = list(plain.state_dict()["averages"].values())

    def rank(comm: Comm) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        average = run(params)
        assert not recorded.records
        with average.swapped_in():
            inside = [p.full_tensor().detach() for p in params]
        assert all(torch.equal(p.full_tensor(), v) for p, v in zip(params, moves[-1], strict=True))
        saved = average.state_dict()["averages"]
        assert list(saved) == ["p0", "p1", "p2", "p3"]
        return [saved[name].full_tensor() for name in saved], inside

    for averages, inside in run_threads(rank, world_size):
        for a, b, c in zip(averages, expected, inside, strict=True):
            assert a.dtype == torch.float32  # also of bfloat16
            assert torch.equal(a, b)
            assert torch.equal(c, b.to(dtype))


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += "mul_" in str(func)
        return func(*args, **(kwargs or {}))


def test_neighbours_are_averaged_as_one(make_params: MakeParams) -> None:
    average = EMA(make_params(SoloComm(), [torch.ones(5)] * 300))
    with Calls() as calls:
        average.update()
    assert calls.count == 2


@worlds
def test_saving_and_loading(make_params: MakeParams, world_size: int) -> None:
    def rank(comm: Comm) -> None:
        params = make_params(comm, [torch.ones(7), torch.zeros(4)])
        average = EMA(params, 0.5)
        with torch.no_grad():
            params[0].fill_(3.0)
        average.update()
        other = EMA(make_params(comm, [torch.zeros(7), torch.zeros(4)]))
        with average.swapped_in():
            other.load_state_dict(average.state_dict())
        saved = other.state_dict()
        assert (saved["decay"], saved["updates"]) == (0.5, 1)
        assert saved["averages"]["p0"].full_tensor().tolist() == [2.0] * 7
        whole = {"p0": torch.arange(7.0), "p1": torch.ones(4)}
        other.load_state_dict({**saved, "averages": whole})
        assert torch.equal(other.state_dict()["averages"]["p0"].full_tensor(), whole["p0"])

    run_threads(rank, world_size)


def test_swapping_counts_as_a_change(make_params: MakeParams) -> None:
    """What gathers a shard tells stale from fresh by versions, also of empty pieces."""

    def rank(comm: Comm) -> list[bool]:
        params = make_params(comm, [torch.ones(3), torch.ones(())])
        average = EMA(params)
        moved = []
        for swap in (average.swap_in, average.swap_out):
            before = [(p._version, p.local._version) for p in params]
            swap()
            after = [(p._version, p.local._version) for p in params]
            moved += [a > b and c > d for (a, c), (b, d) in zip(after, before, strict=True)]
        return moved

    assert run_threads(rank, 2) == [[True] * 4] * 2


def test_order_of_swaps() -> None:
    average = EMA([nn.Parameter(torch.ones(2))])
    with pytest.raises(RuntimeError, match="swap_out: the averages are not swapped in"):
        average.swap_out()
    average.swap_in()
    for call in (average.swap_in, average.update):
        with pytest.raises(RuntimeError, match=f"{call.__name__}: the averages are swapped in"):
            call()


def boom(average: EMA) -> None:
    with average.swapped_in():
        raise KeyError("inside")


def test_parameters_come_back_after_an_error() -> None:
    param = nn.Parameter(torch.ones(2))
    average = EMA([param])
    with torch.no_grad():
        param.fill_(4.0)
    with pytest.raises(KeyError, match="inside"):
        boom(average)
    assert param.tolist() == [4.0, 4.0]


def test_strided_parameters() -> None:
    param = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    average = EMA([("w", param)], 0.5)
    assert torch.equal(average.state_dict()["averages"]["w"], param)


def test_bad_input() -> None:
    param = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"expected decay in \[0, 1\), got 1"):
        EMA([param], 1.0)
    with pytest.raises(ValueError, match="expected at least one parameter, got none"):
        EMA([])
    with pytest.raises(ValueError, match=r"^0\.1: the parameter is already there as 0\.0"):
        EMA([param, param])
    with pytest.raises(ValueError, match=r"^w: two parameters have this name"):
        EMA([("w", param), ("w", nn.Parameter(torch.ones(2)))])
    average = EMA([("w", param)])
    saved = average.state_dict()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"averages": {}}, r"expected a state dictionary with \['decay', 'updates'\]"),
        ({**saved, "averages": {"v": param}}, r"averages: missing \['w'\], unexpected \['v'\]"),
        ({**saved, "averages": {"w": torch.ones(3)}}, r"^w: expected an average of shape \(2,\)"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            average.load_state_dict(state)


def test_pieces_of_another_sharding(make_params: MakeParams) -> None:
    halves = run_threads(lambda comm: EMA(make_params(comm, [torch.ones(32)])).state_dict(), 2)
    with pytest.raises(ValueError, match=r"^p0: the average is a piece \[16, 32\) of another"):
        EMA(make_params(SoloComm(), [torch.ones(32)])).load_state_dict(halves[1])
