"""What one step copies and what it sends, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, GroupComm, Recorded, SoloComm
from shard_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from shard_testing import DecoderBlock, TinyDecoder, run_ranks, run_threads, token_batches
from shard_wrap import by_class

aten = torch.ops.aten
MOVES = {
    aten.copy_.default,
    aten._to_copy.default,
    aten.clone.default,
    aten.cat.default,
    aten.add_.Tensor,
    aten.mul_.Tensor,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.zero_.default,
    aten.constant_pad_nd.default,
    aten._foreach_copy_.default,
}
ROWS, COLUMNS = 40, 36  # one weight of 1,440 elements, 720 per rank; nothing else is as large


class _Moves(TorchDispatchMode):
    """Counts, by number of elements, the operators that move data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_numel: Counter[int] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in MOVES:
            written = out if isinstance(out, torch.Tensor) else args[0][0]
            self.by_numel[written.numel()] += 1
        return out


class _Layer(nn.Module):
    """One matrix; its product with a vector makes no tensor of the matrix's size but its grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ROWS, COLUMNS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()


def _moves_of_one_step(
    comm: Comm, mp_policy: MixedPrecisionPolicy, *, change: bool = False
) -> Counter[int]:
    model = fully_shard(
        nn.Sequential(_Layer()), mesh=comm, reshard_after_forward=True, mp_policy=mp_policy
    )
    x = torch.ones(1, COLUMNS)
    model(x).sum().backward()
    model.zero_grad()
    if change:
        with torch.no_grad():
            next(model.parameters()).mul_(2)
    moves = _Moves()
    with moves:
        model(x).sum().backward()
    return moves.by_numel


def _all_moves(comm: Comm) -> list[Counter[int]]:
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return [
        _moves_of_one_step(GroupComm(), MixedPrecisionPolicy()),
        _moves_of_one_step(GroupComm(), mixed),
        _moves_of_one_step(comm, MixedPrecisionPolicy()),
        _moves_of_one_step(comm, MixedPrecisionPolicy(), change=True),
        _moves_of_one_step(comm, mixed, change=True),
    ]


def test_full_size_copies_are_one_pass_over_the_gradient() -> None:
    full, shard = ROWS * COLUMNS, ROWS * COLUMNS // 2
    for over_gloo, cast_over_gloo, same, changed, cast in run_ranks(_all_moves, 2):
        moves = (over_gloo, cast_over_gloo, same, changed, cast)
        assert [m[full] for m in moves] == [1] * 5  # the gradient into its slot, cast on the way
        # tree sum, its result, the mean: all of shard size, none of them a parameter
        assert over_gloo[shard] == 3
        assert cast_over_gloo[shard] == 3 + 2  # a cast before each of the two gathers
        # In shared memory the shard is where others read it: the sum alone, the mean in place.
        assert same[shard] == changed[shard] == 1
        assert cast[shard] == 1 + 3  # the slice of a changed shard; two terms widened, their sum


def test_one_rank_copies_nothing() -> None:
    assert _moves_of_one_step(SoloComm(), MixedPrecisionPolicy())[ROWS * COLUMNS] == 0


def _bytes_of_one_step(comm: Comm, mp_policy: MixedPrecisionPolicy, reshard: bool) -> None:
    recorded = Recorded(comm)
    model = TinyDecoder()
    fully_shard(
        model,
        mesh=recorded,
        policy=by_class(DecoderBlock),
        reshard_after_forward=reshard,
        mp_policy=mp_policy,
    )
    units = {m._shard_unit for m in model.modules() if isinstance(m, FSDPModule)}
    layouts = [group.layout for unit in units for group in unit.groups]
    numel = sum(layout.numel for layout in layouts)
    assert numel < sum(p.numel() for p in model.parameters()) + 4 * comm.size * len(layouts)
    comparison = 16  # once, whether all ranks have the same model
    for batch in token_batches(3, comm.size):
        recorded.reset()
        model.zero_grad()
        model.loss(batch[comm.rank]).backward()
        records = recorded.records
        gather_size = (mp_policy.param_dtype or torch.float32).itemsize
        reduce_size = gather_size  # gradients travel as they appear, and are added in float32
        gathers = 2 if reshard else 1
        assert records["all_gather"].payload_bytes == gathers * numel * gather_size
        assert records["all_gather"].calls == gathers * len(layouts)
        assert records["reduce_scatter"].payload_bytes == numel * reduce_size
        assert records["reduce_scatter"].calls == len(layouts)
        # which gradients arrived: one number per parameter and one per group, and a checksum
        flags = len(list(model.parameters())) + len(layouts) + 2
        assert records["all_reduce"].payload_bytes == 8 * flags + comparison
        comparison = 0
        assert set(records) == {"all_gather", "reduce_scatter", "all_reduce"}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "mp_policy",
    [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)],
    ids=["fp32", "bf16"],
)
def test_one_step_moves_the_bytes_of_the_layouts(
    mp_policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    run_threads(_bytes_of_one_step, 2, mp_policy, reshard)


def test_one_rank_sends_nothing() -> None:
    recorded = Recorded(SoloComm())
    model = TinyDecoder()
    fully_shard(model, mesh=recorded, policy=by_class(DecoderBlock))
    model.loss(token_batches(1, 1)[0][0]).backward()
    assert not recorded.records
