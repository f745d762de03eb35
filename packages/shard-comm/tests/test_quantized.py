"""Small integers on the wire: how far results are off, and that training does not mind."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shard_comm import Comm, PlanComm, Quantized, Recorded, SoloComm
from shard_comm._codes import BlockCode
from shard_testing import TinyDecoder, run_ranks, run_threads

CODED = [torch.float32, torch.bfloat16, torch.float16]
FLOOR = 2.0**-142
STEPS = 100


def coded(numbers: torch.Tensor, bits: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What arrives, and the bytes that went."""
    code = BlockCode(bits, block)
    wire = torch.empty(code.nbytes(numbers.numel()), dtype=torch.uint8)
    code.encode(numbers, wire)
    return code.decode(wire, numbers.numel()), wire


def absmax(numbers: torch.Tensor, block: int) -> torch.Tensor:
    """The largest magnitude in each number's block, in double precision."""
    parts = [
        part.abs().max().expand(part.numel()) for part in numbers.double().view(-1).split(block)
    ]
    return torch.cat(parts)


def test_worked_example() -> None:
    numbers = torch.tensor([7.0, -2.4, 0.4, 3.6])
    arrived, wire = coded(numbers, 4, 4)
    assert arrived.tolist() == [7.0, -2.0, 0.0, 4.0]
    assert wire.tolist() == [0, 0, 128, 63, 15 | 6 << 4, 8 | 12 << 4, 0, 0]  # 1.0, codes plus 8
    arrived, wire = coded(torch.tensor([-127.0, 3.2, 0.0, 64.0, 254.0]), 8, 4)
    assert arrived.tolist() == [-127.0, 3.0, 0.0, 64.0, 254.0]
    assert wire[8:].view(torch.int8).tolist() == [-127, 3, 0, 64, 127, 0, 0, 0]


@settings(max_examples=60)
@given(
    st.integers(1, 70),
    st.sampled_from([(8, 4), (8, 32), (4, 2), (4, 32), (4, 100)]),
    st.sampled_from(CODED),
    st.integers(-44, 38),
    st.integers(0, 2**31),
)
def test_a_number_is_off_by_half_a_scale_at_most(
    numel: int, kind: tuple[int, int], dtype: torch.dtype, exponent: int, seed: int
) -> None:
    bits, block = kind
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(numel, generator=generator).mul_(10.0**exponent)
    numbers = numbers.clamp(-3e38, 3e38).to(dtype)
    numbers[numbers.isinf()] = 1.0
    arrived, wire = coded(numbers, bits, block)
    again, same = coded(numbers, bits, block)
    assert torch.equal(arrived, again)
    assert torch.equal(wire, same)
    top = 127 if bits == 8 else 7
    bound = absmax(numbers, block) / (2 * top) * (1 + 1e-4) + FLOOR
    assert bool(((arrived.double() - numbers.double()).abs() <= bound).all())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_smallest_numbers_keep_their_sign(bits: int) -> None:
    """Their scale is a few of the smallest steps there are, so codes may come out too large."""
    step = 2.0**-149
    for count in range(1, 500):
        arrived, _ = coded(torch.tensor([count * step, -count * step]), bits, 2)
        assert arrived[0].item() == -arrived[1].item()
        assert 0 <= arrived[0].item() <= (count + 64) * step
        assert abs(arrived[0].item() - count * step) <= FLOOR


@pytest.mark.parametrize("bits", [8, 4])
def test_what_is_no_number_spoils_its_block_and_no_other(bits: int) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        numbers = torch.ones(12)
        numbers[5] = bad
        arrived, _ = coded(numbers, bits, 4)
        assert arrived.isnan().tolist() == [False] * 4 + [True] * 4 + [False] * 4
        assert arrived[8:].tolist() == [1.0] * 4
    arrived, _ = coded(torch.zeros(6), bits, 4)
    assert arrived.tolist() == [0.0] * 6


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator).mul_(10.0 ** (rank - 1)).to(dtype)


def check_bounds(comm: Comm) -> list[bytes]:
    """Results within the stated bounds, the same bits on every rank and at every call."""
    bits_of = []
    numel, block, size = 150, 64, comm.size
    everyone = range(size)
    for bits in (8, 4):
        quantized = Quantized(comm, bits=bits, block=block)
        for dtype in CODED:
            tiny = torch.finfo(dtype).eps
            mine = contribution(comm.rank, numel, dtype)
            out = torch.empty(numel * size, dtype=dtype)
            quantized.all_gather(out, mine)
            exact = torch.cat([contribution(r, numel, dtype).double() for r in everyone])
            most = torch.cat([absmax(contribution(r, numel, dtype), block) for r in everyone])
            bound = most / 254 * (1 + 1e-4) + exact.abs() * tiny + FLOOR
            assert bool(((out.double() - exact).abs() <= bound).all())
            in_place = out.clone()
            own = in_place[comm.rank * numel :][:numel]
            own.copy_(mine)
            quantized.all_gather(in_place, own, async_op=True).wait()
            assert torch.equal(in_place, out)
            bits_of.append(bytes(out.view(torch.uint8).tolist()))

            inputs = [contribution(r, numel * size, dtype) for r in everyone]
            slices = [part.view(size, numel)[comm.rank] for part in inputs]
            exact = torch.stack([part.double() for part in slices]).sum(0)
            most = torch.stack([absmax(part, block) for part in slices]).sum(0)
            bound = most / (254 if bits == 8 else 14) * (1 + 1e-4) + most * tiny + FLOOR
            for op, sum_dtype in [("sum", None), ("mean", None), ("mean", torch.float32)]:
                shard = torch.empty(numel, dtype=sum_dtype or dtype)
                quantized.reduce_scatter(
                    shard, inputs[comm.rank].clone(), op=op, sum_dtype=sum_dtype
                )
                factor = size if op == "mean" else 1
                # A mean in a narrow dtype is rounded twice, sum and quotient.
                assert bool(((shard.double() * factor - exact).abs() <= bound + most * tiny).all())
                bits_of.append(bytes(shard.view(torch.uint8).tolist()))
    return bits_of


def test_bounds_on_threads_and_processes() -> None:
    """The same bytes arrive over either, so the same bits come out."""
    first, second = run_threads(check_bounds, 2), run_threads(check_bounds, 2)
    assert first == second
    assert run_ranks(check_bounds, 2) == first
    run_threads(check_bounds, 3)


def test_half_of_the_bytes_of_bfloat16_and_a_quarter() -> None:
    plan = PlanComm(64, 5, "cpu")
    quantized = Quantized(plan, bits=4, block=256)
    full, shard = torch.zeros(64 * 1024).bfloat16(), torch.zeros(1024).bfloat16()
    quantized.all_gather(full, shard)
    quantized.reduce_scatter(shard, full)
    records = plan.records
    assert records["all_gather"].payload_bytes == 64 * (1024 + 16)  # of 131072
    assert records["all_to_all"].payload_bytes == 64 * (512 + 16)
    assert set(records) == {"all_gather", "all_to_all"}


EXACT: dict[str, Callable[[Comm, torch.Tensor], torch.Tensor]] = {
    "max": lambda c, x: _scattered(c, x, "max"),
    "all_reduce": lambda c, x: _in_place(x, c.all_reduce),
    "wide all_reduce": lambda c, x: _in_place(
        x, lambda y: c.all_reduce(y, sum_dtype=torch.float64)
    ),
    "broadcast": lambda c, x: _in_place(x, lambda y: c.broadcast(y, src=1)),
    "all_to_all": lambda c, x: _exchanged(c, x),
    "gather of doubles": lambda c, x: _gathered(c, x.double()),
    "gather of integers": lambda c, x: _gathered(c, x.mul(1000).int()),
    "sum of doubles": lambda c, x: _scattered(c, x.double(), "sum"),
    "sum of integers": lambda c, x: _scattered(c, x.mul(1000).long(), "sum"),
    "nothing": lambda c, x: _gathered(c, x[:0]),
    "part of one": lambda c, x: _gathered(c.split(c.rank), x),
}


def _in_place(x: torch.Tensor, call: Callable[[torch.Tensor], object]) -> torch.Tensor:
    x = x.clone()
    call(x)
    return x


def _scattered(comm: Comm, x: torch.Tensor, op: str) -> torch.Tensor:
    out = x.new_empty(x.numel() // comm.size)
    comm.reduce_scatter(out, x.clone(), op=op)
    return out


def _gathered(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    out = x.new_empty(x.numel() * comm.size)
    comm.all_gather(out, x)
    return out


def _exchanged(comm: Comm, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    comm.all_to_all(out, x)
    return out


@pytest.mark.parametrize("name", EXACT)
def test_the_rest_is_exact(name: str) -> None:
    def run(comm: Comm) -> bool:
        x = contribution(comm.rank, 30, torch.float32)
        return torch.equal(EXACT[name](Quantized(comm, block=8), x), EXACT[name](comm, x))

    assert run_threads(run, 3) == [True] * 3


def test_objects_parts_memory_and_bad_arguments() -> None:
    def run(comm: Comm) -> list[object]:
        quantized = Quantized(Recorded(comm), bits=4, block=8)
        quantized.barrier()
        part = quantized.split(0)
        assert isinstance(part, Quantized)
        assert quantized.empty(3, torch.int8).shape == (3,)
        return [part.bits, part.block, part.size, *quantized.all_gather_object(comm.rank)]

    assert run_threads(run, 2) == [[4, 8, 2, 0, 1]] * 2
    with pytest.raises(ValueError, match="expected bits to be 8 or 4, got 2"):
        Quantized(SoloComm(), bits=2)
    for block in (0, 3):
        with pytest.raises(ValueError, match=f"expected an even block .*, got {block}"):
            Quantized(SoloComm(), block=block)
    closed = Quantized(SoloComm())
    closed.close()
    assert closed.inner.closed
    with pytest.raises(ValueError, match="barrier: this comm is closed"):
        closed.barrier()


def texts(seed: int, count: int, *, length: int = 17, vocab: int = 61) -> torch.Tensor:
    """Tokens ``[count, length]``: three in four follow from the one before, the rest are noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, vocab, (length, count), generator=generator)
    follows = torch.rand(length, count, generator=generator) < 0.75
    tokens = [noise[0]]
    for step in range(1, length):
        tokens.append(torch.where(follows[step], (5 * tokens[-1] + 7) % vocab, noise[step]))
    return torch.stack(tokens, 1)


def train(comm: Comm, bits: int | None) -> float:
    """Sharded by hand, bfloat16 over the wire, float32 shards and sums; the loss on other texts."""
    wire = comm if bits is None else Quantized(comm, bits=bits, block=64)
    model = TinyDecoder()
    flat = parameters_to_vector(model.parameters()).detach()
    numel = -(-flat.numel() // comm.size)
    full = torch.nn.functional.pad(flat, (0, numel * comm.size - flat.numel())).bfloat16()
    shard = full.view(comm.size, numel)[comm.rank].float().requires_grad_()
    shard.grad = torch.empty(numel)
    optimizer = torch.optim.Adam([shard], lr=5e-3)

    def gather() -> None:
        wire.all_gather(full, shard.detach().bfloat16())
        vector_to_parameters(full[: flat.numel()].float(), model.parameters())

    for step in range(STEPS):
        gather()
        model.zero_grad()
        model.loss(texts(step * comm.size + comm.rank, 16)).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        buffer = torch.zeros_like(full)
        buffer[: flat.numel()].copy_(parameters_to_vector(grads))
        wire.reduce_scatter(shard.grad, buffer, op="mean", sum_dtype=torch.float32)
        optimizer.step()
    gather()
    with torch.no_grad():
        return model.loss(texts(-1, 256)).item()


def test_training_reaches_the_loss_of_exact_collectives() -> None:
    """A model that knows nothing has a loss of 4.1, one that knows all of 1.57."""
    exact = run_threads(train, 2, None)[0]
    assert exact < 1.8
    for bits in (8, 4):
        quantized = run_threads(train, 2, bits)[0]
        assert quantized == pytest.approx(exact, rel=0.01)
        assert quantized != exact
