"""Means, and sums in another dtype than what travels."""

from __future__ import annotations

import pytest
import torch

from shard_comm import (
    Checked,
    Comm,
    HostStaged,
    Quantized,
    Recorded,
    SoloComm,
    ThreadComm,
    tree_sum,
)
from shard_testing import run_threads

CONTRIBUTIONS = 8
NUMEL = 24


def contributions(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(NUMEL, generator=generator).mul_(100).to(dtype) for _ in range(CONTRIBUTIONS)
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", ["mean", "premul_mean"])
def test_a_mean_is_no_sum(size: int, dtype: torch.dtype, op: str) -> None:
    """Local values 1, 3 and 5: means 1, 2 and 3."""

    def run(comm: Comm) -> list[float]:
        local = torch.full((4 * size,), 2.0 * comm.rank + 1, dtype=dtype)
        shard = torch.empty(4, dtype=dtype)
        wide = torch.empty(4)
        comm.reduce_scatter(wide, local.clone(), op=op, sum_dtype=torch.float32)
        comm.reduce_scatter(shard, local.clone(), op=op, async_op=True).wait()
        comm.all_reduce(local, op=op)
        return [*shard.tolist(), *wide.tolist(), *local.tolist()]

    for values in run_threads(run, size):
        if op == "mean":
            assert values == [float(size)] * (8 + 4 * size)
        else:
            near = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
            assert values == pytest.approx([float(size)] * (8 + 4 * size), rel=near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_is_the_sum_divided_and_not_times_an_inverse(dtype: torch.dtype) -> None:
    """A third has no exact inverse: 5 times the float32 nearest to it is not the nearest to 5/3."""

    def run(comm: Comm) -> list[torch.Tensor]:
        counted = torch.arange(120).to(dtype) if comm.rank == 0 else torch.zeros(120, dtype=dtype)
        shard, wide = counted.new_empty(40), torch.empty(40)
        comm.reduce_scatter(shard, counted.clone(), op="mean")
        comm.reduce_scatter(wide, counted.clone(), op="mean", sum_dtype=torch.float32)
        comm.all_reduce(counted, op="mean")
        return [shard, wide, counted]

    expected = (torch.arange(120.0) / 3).to(dtype)
    for rank, (shard, wide, counted) in enumerate(run_threads(run, 3)):
        assert torch.equal(counted, expected)
        assert torch.equal(shard, expected[40 * rank :][:40])
        assert torch.equal(wide, (torch.arange(120.0) / 3)[40 * rank :][:40])


def test_a_mean_divides_the_sum_and_a_premultiplied_one_what_is_summed() -> None:
    """Half precision ends at 65504: the sum of 60000 and 60000 is not there, its half is."""

    def run(comm: Comm) -> list[float]:
        results = []
        for op, sum_dtype in [("mean", None), ("premul_mean", None), ("mean", torch.float32)]:
            tensor = torch.full((1,), 60000.0).half()
            comm.all_reduce(tensor, op=op, sum_dtype=sum_dtype)
            results.append(tensor.item())
        return results

    expected = [float("inf"), 60000.0, 60000.0]
    assert run_threads(run, 2) == [expected] * 2


def test_contributions_divided_first_are_divided_in_the_dtype_of_the_sum() -> None:
    """Thirds of 1, 3 and 5, rounded to bfloat16 each, would add up to 3.0078."""

    def run(comm: Comm) -> float:
        tensor = torch.tensor([2.0 * comm.rank + 1]).bfloat16()
        inp, out = torch.cat([tensor] * 3), torch.empty(1)
        comm.reduce_scatter(out, inp, op="premul_mean", sum_dtype=torch.float32)
        return out.item()

    expected = ((torch.tensor(1.0) / 3 + torch.tensor(1.0)) + torch.tensor(5.0) / 3).item()
    assert run_threads(run, 3) == [expected] * 3


@pytest.mark.parametrize("sum_dtype", [torch.float32, None])
def test_the_same_bits_on_any_number_of_ranks(sum_dtype: torch.dtype | None) -> None:
    """Contribution ``t * size + r`` is rank r's microbatch t; microbatches are the tree's top.

    In float32 throughout where bfloat16 travels and sums are float32, in bfloat16 without.
    """

    def run(comm: Comm) -> bytes:
        shards = []
        for step in range(CONTRIBUTIONS // comm.size):
            mine = contributions(torch.bfloat16)[step * comm.size + comm.rank].clone()
            shard = torch.empty(NUMEL // comm.size, dtype=sum_dtype or torch.bfloat16)
            comm.reduce_scatter(shard, mine, sum_dtype=sum_dtype)
            shards.append(shard)
        total = tree_sum(shards)
        full = torch.empty(NUMEL, dtype=total.dtype)
        comm.all_gather(full, total)
        return bytes(full.view(torch.uint8).tolist())

    whole = [part.to(sum_dtype or torch.bfloat16) for part in contributions(torch.bfloat16)]
    expected = bytes(tree_sum(whole).view(torch.uint8).tolist())
    for size in (1, 2, 4, 8):
        assert run_threads(run, size) == [expected] * size
    ordered = torch.stack(whole).sum(0) if sum_dtype is None else whole[0].clone()
    assert bytes(ordered.view(torch.uint8).tolist()) != expected  # data on which the order shows


def test_sums_are_rounded_once() -> None:
    """256 + 1 + 1 + 1: bfloat16 has 256, 258 and 260 there.

    A quarter of 259 is 64.75, between 64.5 and 65, which is the even one; of 258, 64.5.
    """

    def run(comm: Comm) -> list[float]:
        mine = torch.full((4,), 256.0 if comm.rank == 0 else 1.0).bfloat16()
        wide, narrow, own = torch.empty(1), mine.new_empty(1), mine.new_empty(1)
        comm.reduce_scatter(wide, mine.clone(), sum_dtype=torch.float32)
        comm.reduce_scatter(narrow, mine.clone(), sum_dtype=torch.float32, async_op=True).wait()
        comm.reduce_scatter(own, mine.clone())
        reduced = mine.clone()
        comm.all_reduce(reduced, op="mean", sum_dtype=torch.float64)
        return [wide.item(), narrow.item(), own.item(), *reduced.tolist()]

    assert run_threads(run, 4) == [[259.0, 260.0, 258.0, *[65.0] * 4]] * 4


def test_integers_and_tiny_floats_are_added_in_what_holds_them() -> None:
    def run(comm: Comm) -> list[float]:
        small = torch.full((3,), 100, dtype=torch.int8)
        total = torch.empty(1, dtype=torch.int32)
        comm.reduce_scatter(total, small, sum_dtype=torch.int32)
        tiny = torch.full((3,), 1.5).to(torch.float8_e4m3fn)
        wide = torch.empty(1)
        comm.reduce_scatter(wide, tiny, sum_dtype=torch.float32, op="mean")
        return [float(total.item()), wide.item()]

    assert run_threads(run, 3) == [[300.0, 1.5]] * 3


def test_what_travels_is_counted_in_its_own_dtype() -> None:
    def run(comm: Comm) -> dict[str, tuple[int, int]]:
        recorded = Recorded(comm)
        inp = torch.ones(6).bfloat16()
        recorded.reduce_scatter(torch.empty(3), inp, sum_dtype=torch.float32)
        recorded.all_reduce(inp, op="mean", sum_dtype=torch.float32)
        return {op: (r.calls, r.payload_bytes) for op, r in recorded.records.items()}

    assert run_threads(run, 2) == [{"reduce_scatter": (1, 12), "all_reduce": (1, 12)}] * 2


def test_one_rank_and_staging_round_likewise() -> None:
    solo = SoloComm()
    wide, narrow = torch.empty(2), torch.tensor([1.0, 3.0]).bfloat16()
    solo.reduce_scatter(wide, narrow, op="mean", sum_dtype=torch.float32)
    assert wide.tolist() == [1.0, 3.0]
    solo.all_reduce(narrow, sum_dtype=torch.float32)
    assert narrow.tolist() == [1.0, 3.0]

    def run(comm: Comm) -> list[float]:
        staged = HostStaged(comm, "cpu")
        out = torch.empty(1)
        mine = torch.full((2,), 256.0 if comm.rank == 0 else 1.0).bfloat16()
        staged.reduce_scatter(out, mine.clone(), sum_dtype=torch.float32)
        staged.all_reduce(mine, op="mean", sum_dtype=torch.float32)
        return [out.item(), *mine.tolist()]

    assert run_threads(run, 2) == [[257.0, 128.0, 128.0]] * 2  # 128.5 ties to even


def scatter_own(comm: Comm) -> dict[str, torch.Tensor]:
    """Every reduction with this rank's own contribution apart, and NaN where it would be read."""
    numel = 30 * comm.size
    mine = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    results = {}
    for op in ("sum", "mean", "premul_mean", "max", "min"):
        for dtype, wide in ((torch.float32, None), (torch.bfloat16, torch.float32)):
            if wide is not None and op in ("max", "min"):
                continue
            plain, apart = (comm.empty(numel, dtype).copy_(mine) for _ in range(2))
            row = apart.view(comm.size, -1)[comm.rank]
            own = [row[:5].clone(), row[5:5], row[5:20], row[20:].clone()]
            row[:5], row[20:] = torch.nan, torch.nan
            expected, out = (torch.empty(30, dtype=wide or dtype) for _ in range(2))
            comm.reduce_scatter(expected, plain, op=op, sum_dtype=wide)
            comm.reduce_scatter(out, apart, op=op, sum_dtype=wide, own=own)
            assert torch.equal(out, expected), (op, dtype)
            results[f"{op} {dtype}"] = out
    return results


@pytest.mark.parametrize("size", [1, 2, 3])
def test_own_contributions_may_lie_apart(size: int) -> None:
    """On every transport the same bits, wherever they are read."""
    apart = run_threads(scatter_own, size)
    together = run_threads(scatter_own, size, shares_memory=True)
    recorded = run_threads(lambda comm: scatter_own(Recorded(comm)), size, shares_memory=True)
    for one, other, third in zip(apart, together, recorded, strict=True):
        assert len(one) == 8
        for name, values in one.items():
            assert torch.equal(values, other[name])
            assert torch.equal(values, third[name])


def test_what_wraps_a_comm_reads_in_place_as_it_does() -> None:
    (comm,) = ThreadComm.group(1, shares_memory=True)
    assert all(c.reads_own for c in (comm, Recorded(comm), Checked(comm)))
    assert not HostStaged(comm, torch.device("cpu")).reads_own
    assert not Quantized(comm).reads_own
    assert not ThreadComm.group(1)[0].reads_own
