"""AdamW with moments of 8 bits: close to AdamW, the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ParamSpec, ShardSpec, ShardTensor, plan_layout
from shard_optim import Adam, AdamW, AdamW8bit
from shard_optim._blocks import (
    decode_signed,
    decode_square,
    encode_signed,
    encode_square,
)
from shard_optim._cuts import cut_blocks
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]

SIZES = [(37,), (70, 100), (5, 1000), (64,), (40_000,)]


def coded(rows: torch.Tensor, *, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of rows, and what they stand for."""
    scales, spare = rows.abs().amax(1), torch.empty_like(rows)
    codes = torch.empty_like(rows, dtype=torch.int8 if signed else torch.uint8)
    if signed:
        encode_signed(rows, rows.abs(), scales, codes)
        return codes, decode_signed(codes, scales, torch.empty_like(rows), spare)
    short = torch.empty_like(rows, dtype=torch.int16)
    encode_square(rows.clone(), scales, codes, spare=spare, short=short)
    return codes, decode_square(codes, scales, torch.empty_like(rows))


def test_codes_by_hand() -> None:
    codes, _ = coded(torch.tensor([[1.0, 0.25, -0.25, 0.0, 1e-9]]), signed=True)
    assert codes.tolist() == [[127, 64, -64, 0, 0]]
    codes, back = coded(torch.tensor([[2.0, 2.0 / 16, 1e-30, 0.0]]), signed=False)
    assert codes.tolist() == [[255, 128, 1, 0]]
    torch.testing.assert_close(back[0, :2], torch.tensor([2.0, 2 * (128 / 255) ** 4]))


@given(st.integers(0, 1000))
def test_codes_of_decoded_numbers_are_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 256, generator=generator) * torch.tensor([[1e-15], [1.0], [1e12]])
    for values, signed in ((rows, True), (rows.square(), False)):
        codes, back = coded(values, signed=signed)
        assert torch.equal(coded(back, signed=signed)[0], codes)
        error = (back - values).abs() / values.abs().amax(1, keepdim=True)
        assert float(error.max()) < 0.01


def test_blocks_that_are_cut() -> None:
    spec = ShardSpec("w", (1000,), 0, 0, 0, 512)
    assert cut_blocks(spec, 2) == ()
    assert cut_blocks(ShardSpec("w", (1000,), 0, 0, 200, 450), 3) == (0, 2)
    assert cut_blocks(ShardSpec("w", (1000,), 0, 0, 0, 10), 100) == (0, 1, 2, 3)
    assert cut_blocks(ShardSpec("w", (0,), 0, 0, 0, 10), 1) == ()


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SIZES, dtype, steps)
    grads[1][2] = None
    return fulls, grads


def train_plain(
    fulls: Sequence[torch.Tensor], steps: Any, kind: type[Any], **hyper: Any
) -> tuple[list[torch.Tensor], Any]:
    params, optimizer = take_steps(lambda params: kind(params, **hyper), fulls, steps)
    return [p.detach() for p in params], optimizer


def test_close_to_adamw() -> None:
    """After ten steps the paths differ by a few hundredths of what was gone."""
    fulls, steps = data(torch.float32, 10)
    hyper: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    ours, optimizer = train_plain(fulls, steps, AdamW8bit, **hyper)
    theirs, _ = train_plain(fulls, steps, AdamW, **hyper)
    for a, b, full in zip(ours, theirs, fulls, strict=True):
        if full.numel() < 4096:
            assert torch.equal(a, b)
        else:
            assert float((a - b).norm() / (b - full).norm()) < 0.05
    small, large = (optimizer.param_groups[0]["params"][i] for i in (0, 1))
    assert optimizer.state[small]["exp_avg"].dtype == torch.float32
    assert optimizer.state[large]["exp_avg"].dtype == torch.int8
    assert optimizer.state[large]["exp_avg_sq"].dtype == torch.uint8
    assert optimizer.state[large]["exp_avg_scale"].shape == (28,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_on_any_number_of_ranks(
    make_params: MakeParams, give_grads: GiveGrads, dtype: torch.dtype, world_size: int
) -> None:
    fulls, steps = data(dtype, 4)
    expected, plain = train_plain(fulls, steps, AdamW8bit, lr=0.01)
    slots = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    owner = plain.param_groups[0]["params"][2]
    expected += [plain.state[owner][slot] for slot in slots]

    def rank(comm: Comm) -> list[torch.Tensor]:
        params = make_params(comm, fulls)
        assert world_size == 1 or any(cut_blocks(p.spec, comm.size) for p in params)
        optimizer = AdamW8bit(params, lr=0.01)
        for grads in steps[:2]:
            give_grads(params, grads)
            optimizer.step()
        # Through a state dictionary on the way.
        twins = make_params(comm, [p.full_tensor().detach() for p in params])
        other = AdamW8bit(twins)
        other.state_dict(allocate=True)
        other.load_state_dict(optimizer.state_dict())
        for grads in steps[2:]:
            give_grads(twins, grads)
            other.step()
        state = other.state[twins[2]]
        moments = [state[slot].full_tensor() for slot in slots]
        return [p.full_tensor().detach() for p in twins] + moments

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_block_aligned_layout_sends_nothing() -> None:
    def rank(comm: Comm) -> tuple[dict[str, Any], int]:
        recorded = Recorded(comm)
        layout = plan_layout([ParamSpec("w", (8192,), torch.float32, block=256)], comm.size)
        spec = layout.shard_spec(comm.rank, 0)
        local = torch.zeros(spec.stop - spec.start)
        param = nn.Parameter(ShardTensor(local, spec, comm=recorded))
        assert isinstance(param, ShardTensor)
        param.grad = param.like(torch.ones_like(local))
        optimizer = AdamW8bit([param], lr=0.5, weight_decay=0)
        optimizer.step()
        torch.testing.assert_close(param.local, torch.full_like(local, -0.5))
        state = optimizer.state[param]
        held = [piece.local.nbytes for key, piece in state.items() if key != "step"]
        records = dict(recorded.records)
        return records, sum(held)

    # Two codes per element and two scales per block, cut in halves.
    assert run_threads(rank, 2) == [({}, 8192 + 2 * 4 * 16)] * 2


def test_three_small_collectives_where_blocks_are_cut(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    def rank(comm: Comm) -> dict[str, tuple[int, int]]:
        recorded = Recorded(comm)
        params = make_params(recorded, [torch.ones(5000), torch.ones(6000)])
        optimizer = AdamW8bit(params)
        give_grads(params, [torch.ones(5000), torch.ones(6000)])
        optimizer.step()
        return {op: (r.calls, r.payload_bytes) for op, r in recorded.records.items()}

    # One cut in the second: three flags of 4 bytes, and twice two scales.
    assert run_threads(rank, 2) == [{"all_reduce": (3, 12 + 2 * 8)}] * 2


def test_ranks_that_disagree_all_raise(make_params: MakeParams) -> None:
    def missing(comm: Comm) -> str:
        (param,) = make_params(comm, [torch.ones(5001)])
        optimizer = AdamW8bit([param])
        if comm.rank == 0:
            param.grad = param.like(torch.ones_like(param.local))
        with pytest.raises(ValueError, match="expected a gradient on all ranks") as caught:
            optimizer.step()
        assert param.local.eq(1).all()
        return str(caught.value)

    first, second = run_threads(missing, 2)
    assert first.startswith("p0: expected a gradient on all ranks or on none, got one here")
    assert "got none here" in second

    def wrong(comm: Comm) -> str:
        (param,) = make_params(comm, [torch.ones(5001)])
        optimizer = AdamW8bit([param])
        param.grad = param.like(torch.ones_like(param.local))
        if comm.rank == 0:
            param.grad_dtype = None
            param.grad = param.like(torch.ones_like(param.local, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"expected a dense|another rank") as caught:
            optimizer.step()
        return str(caught.value)

    first, second = run_threads(wrong, 2)
    assert first.startswith("p0: expected a dense gradient of torch.float32")
    assert second == "another rank refused this step; nothing was changed (rank 1 of 2)"


def test_zero_gradients_and_what_is_not_finite() -> None:
    param = nn.Parameter(torch.ones(5000))
    optimizer = AdamW8bit([param], lr=0.1, weight_decay=0)
    param.grad = torch.zeros(5000)
    optimizer.step()
    assert param.eq(1).all()
    param.grad[300] = float("nan")
    optimizer.step()
    assert param.detach()[300].isnan()
    assert param.detach()[:256].eq(1).all()


def test_a_small_language_model(train_decoder: TrainDecoder) -> None:
    """Final loss within a hundredth of AdamW's, on three ranks as on one."""

    def build(kind: type[Any]) -> Callable[[Any], Any]:
        return lambda params: kind(params, lr=2e-3)

    reference = train_decoder(None, build(AdamW), 25, 48)
    plain = train_decoder(None, build(AdamW8bit), 25, 48)
    assert reference[-1] < 0.5 * reference[0]
    assert plain[-1] == pytest.approx(reference[-1], rel=0.01)
    assert run_threads(train_decoder, 3, build(AdamW8bit), 25, 48) == [plain] * 3


def test_state_that_another_optimizer_saved() -> None:
    param = nn.Parameter(torch.ones(5000))
    param.grad = torch.ones(5000)
    wide, narrow = Adam([param]), AdamW8bit([param])
    wide.step()
    narrow.step()
    with pytest.raises(ValueError, match=r"^0\.0: expected exp_avg of torch.float32, got torch.in"):
        wide.load_state_dict(
            {**narrow.state_dict(), "param_groups": wide.state_dict()["param_groups"]}
        )


def test_pieces_of_another_sharding(make_params: MakeParams) -> None:
    halves = run_threads(
        lambda comm: AdamW8bit(make_params(comm, [torch.ones(5000)])).state_dict(allocate=True), 2
    )
    (whole,) = make_params(SoloComm(), [torch.ones(5000)])
    with pytest.raises(ValueError, match=r"^p0: exp_avg is a piece \[2500, 5000\) of another"):
        AdamW8bit([whole]).load_state_dict(halves[1])
