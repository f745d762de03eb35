"""AdamW on sharded parameters: the same bits as on plain ones, in one flat run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardSpec, ShardTensor, shard_tensor
from shard_optim import AdamW, _tails
from shard_optim._plan import StepPlan
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
Steps = Sequence[Sequence[torch.Tensor | None]]

HYPER = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.1}


def train_plain(fulls: Sequence[torch.Tensor], steps: Steps) -> dict[str, list[torch.Tensor]]:
    params, optimizer = take_steps(partial(AdamW, **HYPER), fulls, steps)  # type: ignore[arg-type]
    result = {"param": [p.detach() for p in params]}
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        result[slot] = [optimizer.state[p][slot] for p in params]
    return result


def train_sharded(
    comm: Comm, make_params: MakeParams, give_grads: GiveGrads, fulls: Any, steps: Steps
) -> dict[str, list[torch.Tensor]]:
    params = make_params(comm, fulls)
    optimizer = AdamW(params, **HYPER)  # type: ignore[arg-type]
    for grads in steps:
        give_grads(params, grads)
        optimizer.step()
    result = {"param": [p.full_tensor().detach() for p in params]}
    for slot in ("exp_avg", "exp_avg_sq"):
        result[slot] = [optimizer.state[p][slot].full_tensor() for p in params]
    result["step"] = [optimizer.state[p]["step"] for p in params]
    return result


def data(sizes: Sequence[int], dtype: torch.dtype, steps: int, seed: int = 0) -> Any:
    return draw_steps(sizes, dtype, steps, seed=seed, drawn=torch.float64)


def same_bits(left: dict[str, list[torch.Tensor]], right: dict[str, list[torch.Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for key in left for a, b in zip(left[key], right[key], strict=True)
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 70) | st.integers(900, 2500), min_size=1, max_size=8),
    seed=st.integers(0, 1000),
    absent=st.sets(st.integers(0, 15)),
)
def test_bits_of_plain_parameters(
    make_params: MakeParams,
    give_grads: GiveGrads,
    world_size: int,
    dtype: torch.dtype,
    sizes: list[int],
    seed: int,
    absent: set[int],
) -> None:
    """Wherever ranks are cut, however counters part, every element gets the same bits."""
    fulls, steps = data(sizes, dtype, 3, seed)
    for row in absent:
        if row < len(sizes):
            steps[1][row] = None
    plain = train_plain(fulls, steps)
    for sharded in run_threads(train_sharded, world_size, make_params, give_grads, fulls, steps):
        assert same_bits(sharded, plain)


SIZES = [37, 5, 2001, 1, 63, 1211, 7]


def test_bits_at_all_world_sizes(make_params: MakeParams, give_grads: GiveGrads) -> None:
    fulls, steps = data(SIZES, torch.float32, 20)
    plain = train_plain(fulls, steps)
    for world_size in (1, 2, 3, 4):
        ranks = run_threads(train_sharded, world_size, make_params, give_grads, fulls, steps)
        assert all(same_bits(rank, plain) for rank in ranks)


def test_bits_depend_on_the_tails(
    make_params: MakeParams, give_grads: GiveGrads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without padded tails the same training differs, or the padding has become pointless."""
    monkeypatch.setattr(_tails, "_VECTOR_BYTES", 4)  # no tail is ever cut off
    fulls, steps = data(SIZES, torch.float32, 20)
    plain = train_plain(fulls, steps)
    ranks = run_threads(train_sharded, 3, make_params, give_grads, fulls, steps)
    assert not same_bits(ranks[0], plain)


class Kernels(TorchDispatchMode):
    """Notes the sizes of the parameters that each fused call was given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused: list[list[int]] = []
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        if "_fused_adamw_" in str(func):
            self.fused.append([tensor.numel() for tensor in args[0]])
        return func(*args, **(kwargs or {}))


def test_a_group_is_one_call_on_one_run(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """300 parameters, a body and a tail; a step is a handful of operations, not hundreds."""
    fulls = [torch.ones(5) for _ in range(300)]
    params = make_params(SoloComm(), fulls)
    optimizer = AdamW(params, lr=0.1)
    give_grads(params, fulls)
    optimizer.step()
    give_grads(params, fulls)
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.fused == [[1488, 16]]
    assert kernels.calls < 30


def test_fresh_resumed_and_loaded_state_are_all_flat(
    make_params: MakeParams, give_grads: GiveGrads
) -> None:
    """State made by a checkpoint's template or by loading is joined like that of a first step."""
    fulls = [torch.ones(16) for _ in range(10)]
    params = make_params(SoloComm(), fulls)
    first = AdamW(params, lr=0.1)
    give_grads(params, fulls)
    first.step()
    resumed, loaded = AdamW(params, lr=0.1), AdamW(params, lr=0.1)
    resumed.state_dict(allocate=True)
    loaded.load_state_dict(first.state_dict())
    for optimizer in (first, resumed, loaded):
        with Kernels() as kernels:
            optimizer.step()
        assert kernels.fused == [[160]]


def plan_of(optimizer: AdamW) -> StepPlan:
    (plan,) = optimizer._plans.values()
    return plan


def test_a_plan_lasts_while_gradients_move(make_params: MakeParams, give_grads: GiveGrads) -> None:
    params = make_params(SoloComm(), [torch.ones(5), torch.ones(40)])
    optimizer = AdamW(params, lr=0.1)
    plans: list[StepPlan] = []
    for _ in range(3):
        give_grads(params, [torch.ones(5), torch.ones(40)])  # new memory each time
        optimizer.step()
        plans.append(plan_of(optimizer))
    assert plans[0] is plans[1] is plans[2]
    params[0].grad = params[0].like(torch.ones(5))  # one of them elsewhere
    optimizer.step()
    assert plan_of(optimizer) is not plans[0]
    assert [len(lane.runs) for lane in plan_of(optimizer).lanes] == [2]


def test_nothing_is_sent(make_params: MakeParams, give_grads: GiveGrads) -> None:
    def rank(comm: Comm) -> dict[str, Any]:
        recorded = Recorded(comm)
        params = make_params(recorded, [torch.ones(5), torch.ones(40)])
        optimizer = AdamW(params, lr=0.1)
        for _ in range(2):
            give_grads(params, [torch.ones(5), torch.ones(40)])
            optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict(allocate=True))
        return dict(recorded.records)

    assert run_threads(rank, 2) == [{}, {}]


@pytest.mark.parametrize("world_size", [1, 3])
def test_empty_pieces_keep_step(
    make_params: MakeParams, give_grads: GiveGrads, world_size: int
) -> None:
    """A rank that holds nothing counts steps, and its versions move, as everyone's do."""

    def rank(comm: Comm) -> tuple[list[float], list[bool]]:
        # Four elements fill rank 0's shard; the others hold padding alone.
        params = make_params(comm, [torch.ones(3), torch.ones(0, 3), torch.ones(())])
        optimizer = AdamW(params, lr=0.1)
        before = [(p._version, p.local._version) for p in params]
        for _ in range(2):
            give_grads(params, [torch.ones(3), torch.ones(0, 3), torch.ones(())])
            optimizer.step()
        after = [(p._version, p.local._version) for p in params]
        moved = [
            now[0] > then[0] and now[1] > then[1] for now, then in zip(after, before, strict=True)
        ]
        return [float(optimizer.state[p]["step"]) for p in params], moved

    assert run_threads(rank, world_size) == [([2, 2, 2], [True] * 3)] * world_size


def test_a_shard_of_padding_alone_changes_its_version() -> None:
    """What gathers a shard tells stale from fresh by the version of the whole buffer."""

    def rank(comm: Comm) -> bool:
        shard = torch.zeros(4)
        held = 2 if comm.rank == 0 else 0
        start = 0 if comm.rank == 0 else 2
        spec = ShardSpec("w", (2,), start, start + held, 0, 4)
        param = nn.Parameter(ShardTensor(shard[:held], spec, comm=comm))
        assert isinstance(param, ShardTensor)
        param.grad = param.like(torch.ones(held))
        before = shard._version
        AdamW([param]).step()
        return shard._version > before

    assert run_threads(rank, 2) == [True, True]


def test_saved_tensors_notice_the_step(make_params: MakeParams, give_grads: GiveGrads) -> None:
    """A graph that needs the parameter as it was refuses to go on, as for plain parameters."""
    (param,) = make_params(SoloComm(), [torch.ones(4)])
    loss = (param * param).sum()
    give_grads([param], [torch.ones(4)])
    AdamW([param]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_is_two_moments_and_no_more() -> None:
    """State of a cut parameter takes its share of the bytes."""

    def rank(comm: Comm) -> tuple[int, int]:
        param = nn.Parameter(shard_tensor(torch.ones(64, 16), comm=comm, name="w"))
        assert isinstance(param, ShardTensor)
        param.grad = param.like(torch.ones(param.local.numel()))
        optimizer = AdamW([param])
        optimizer.step()
        moments = [optimizer.state[param][slot].local for slot in ("exp_avg", "exp_avg_sq")]
        return sum(m.untyped_storage().nbytes() for m in moments), param.local.nbytes

    assert run_threads(rank, 2) == [(4096, 2048), (4096, 2048)]


def test_a_strided_local_gradient_is_read_by_index() -> None:
    param = nn.Parameter(shard_tensor(torch.zeros(16), comm=SoloComm(), name="w"))
    assert isinstance(param, ShardTensor)
    signs = torch.tensor([1.0, 7.0, -1.0, 7.0] * 8)
    param.grad = param.like(signs[::2])
    AdamW([param], lr=0.1, weight_decay=0).step()
    torch.testing.assert_close(param.local, torch.tensor([-0.1, 0.1] * 8))


def test_plain_and_sharded_in_one_group(make_params: MakeParams, give_grads: GiveGrads) -> None:
    sharded = make_params(SoloComm(), [torch.ones(20)])
    plain = nn.Parameter(torch.ones(20))
    optimizer = AdamW([*sharded, plain], lr=0.1)
    give_grads([*sharded, plain], [torch.ones(20), torch.ones(20)])
    optimizer.step()
    assert torch.equal(sharded[0].local, plain.detach())
    assert type(optimizer.state[plain]["exp_avg"]) is torch.Tensor
