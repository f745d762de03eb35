"""The reducer alone: what it packs, sends and hands out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded
from shard_flat import ParamSpec, ShardTensor, plan_layout
from shard_fsdp import fully_shard
from shard_fsdp._grad_buffer import GradBuffer
from shard_fsdp._group import GroupContext
from shard_fsdp._policy import MixedPrecisionPolicy, UnitSettings
from shard_fsdp._reduce import GradReducer
from shard_testing import run_threads


def _make(
    comm: Comm,
    settings: UnitSettings,
    dtype: torch.dtype = torch.float32,
    wire: torch.dtype | None = None,
) -> GradReducer:
    layout = plan_layout(
        [ParamSpec("a", (3,), torch.float32), ParamSpec("b", (2, 2), torch.float32)], comm.size
    )
    params = []
    for index in range(len(layout.specs)):
        spec = layout.shard_spec(comm.rank, index)
        piece = torch.zeros(spec.stop - spec.start)
        params.append(ShardTensor(piece, spec, comm=comm, requires_grad=True))
    context = GroupContext(
        comm=comm,
        replicas=None,
        mesh=None,
        dp_dims=(),
        device=comm.device,
        pin_memory=False,
        mp_policy=MixedPrecisionPolicy(),
        settings=settings,
        on_arrival=lambda: None,
    )
    return GradReducer(layout, params, context=context, dtype=dtype, wire=wire or dtype)


class _Memory(Recorded):
    """Keeps what ``empty`` gave out."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.given: list[torch.Tensor] = []

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.given.append(super().empty(numel, dtype))
        return self.given[-1]


def _where_gradients_lie(comm: Comm) -> tuple[list[int], bool]:
    memory = _Memory(comm)
    reducer = _make(memory, UnitSettings())
    reducer.receive(0, torch.ones(3))
    reducer.launch()
    reducer.finish()
    grad = reducer._handout.params[0].grad
    assert isinstance(grad, ShardTensor)
    place = grad.local.untyped_storage().data_ptr()
    return [t.numel() for t in memory.given], place == memory.given[-1].data_ptr()


def test_gradients_lie_in_memory_of_the_comm() -> None:
    """A buffer for all of both ranks, then one for the slice that stays."""
    for sizes, there in run_threads(_where_gradients_lie, 2):
        assert sizes == [8, 4]
        assert there


def _full_grads(reducer: GradReducer) -> list[list[float] | None]:
    grads = []
    for param in reducer._handout.params:
        assert param.grad is None or isinstance(param.grad, ShardTensor)
        grads.append(None if param.grad is None else param.grad.full_tensor().flatten().tolist())
    return grads


def _step(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings())
    reducer.receive(1, torch.full((2, 2), float(comm.rank)))
    assert reducer.arrived == [False, True]
    reducer.receive(1, torch.ones(2, 2))  # the same parameter again
    reducer.launch()
    assert reducer.arrived == [False, False]
    reducer.finish()
    mean = 1 + (comm.size - 1) / 2
    assert _full_grads(reducer) == [None, [mean] * 4]
    reducer.receive(0, torch.arange(3.0))
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[0, 1, 2], [mean] * 4]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_adds_up_and_hands_out_means(world_size: int) -> None:
    run_threads(_step, world_size)


def _buffer_is_freed(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings())
    reducer.receive(0, torch.ones(3))
    data = reducer._buffer._data
    assert data is not None
    reducer.launch()
    assert reducer._buffer._data is None
    assert reducer._flight is not None
    assert reducer._flight.buffer is data
    reducer.finish()
    assert reducer._flight is None
    reducer.receive(0, torch.ones(3))
    reducer.discard()
    assert reducer._buffer._data is None
    assert reducer.arrived == [False, False]


def test_buffer_lives_from_first_gradient_to_end_of_reduction() -> None:
    run_threads(_buffer_is_freed, 2)


def _zero_fill(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings(zero_fill_unused=True))
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[0] * 3, [0] * 4]


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_fill_hands_out_a_gradient_for_everything(world_size: int) -> None:
    run_threads(_zero_fill, world_size)


def _reduce_dtype(comm: Comm) -> None:
    recorded = Recorded(comm)
    reducer = _make(recorded, UnitSettings(), torch.bfloat16)
    reducer.receive(0, torch.full((3,), 1 + 2**-9))
    reducer.launch()
    reducer.finish()
    assert recorded.records["reduce_scatter"].payload_bytes == 2 * reducer._layout.numel
    assert _full_grads(reducer)[0] == [1.0] * 3  # rounded on the way


def test_wire_has_the_reduction_dtype() -> None:
    run_threads(_reduce_dtype, 2)


def _half(comm: Comm) -> None:
    """Eight numbers of 30000 do not fit into a float16 sum, though their mean does."""
    reducer = _make(comm, UnitSettings(), torch.float16)
    for _ in range(2):
        reducer.receive(0, torch.full((3,), 15000.0, dtype=torch.float16))
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[0] == [30000.0] * 3
    tiny = torch.tensor([6e-8, 2.0**-14, 1.0], dtype=torch.float16)
    reducer = _make(comm, UnitSettings(divide_factor=1.0), torch.float16)
    reducer.receive(0, tiny)  # nothing is divided, so nothing is scaled
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[0] == [comm.size * t for t in tiny.tolist()]


@pytest.mark.parametrize("world_size", [2, 8])
def test_float16_sums_do_not_overflow(world_size: int) -> None:
    run_threads(_half, world_size)


def _wide(comm: Comm) -> None:
    """256 + 1 is no bfloat16, so the sum is one only if it is taken in float32."""
    recorded = Recorded(comm)
    settings = UnitSettings(divide_factor=1.0)
    reducer = _make(recorded, settings, torch.float32, torch.bfloat16)
    mine = torch.full((3,), 256.0 if comm.rank == 0 else 1.0, dtype=torch.bfloat16)
    reducer.receive(0, mine)
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[0] == [256.0 + comm.size - 1] * 3
    assert recorded.records["reduce_scatter"].payload_bytes == 2 * reducer._layout.numel
    settings.sync_gradients = False  # two microbatches: 256 and 1 on each rank
    reducer = _make(recorded, settings, torch.float32, torch.bfloat16)
    reducer.receive(0, torch.full((3,), 256.0, dtype=torch.bfloat16))
    reducer.accumulate()
    settings.sync_gradients = True
    if comm.rank == 0:  # the others' last microbatch had no gradient
        reducer.receive(0, torch.ones(3, dtype=torch.bfloat16))
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[0] == [256.0 * comm.size + 1] * 3


def _narrow_then_unsynchronised(comm: Comm) -> None:
    """Synchronisation is switched off after the first gradient of a backward has come."""
    settings = UnitSettings(divide_factor=1.0)
    reducer = _make(comm, settings, torch.float32, torch.bfloat16)
    reducer.receive(0, torch.full((3,), 256.0, dtype=torch.bfloat16))
    reducer.accumulate()
    reducer.receive(0, torch.ones(3, dtype=torch.bfloat16))
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[0] == [257.0 * comm.size] * 3


@pytest.mark.parametrize("check", [_wide, _narrow_then_unsynchronised])
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_travel_narrow_and_are_added_wide(check: Any, world_size: int) -> None:
    run_threads(check, world_size)


def _kept(comm: Comm) -> None:
    """Rank 0 owns all of ``b``, rank 1 all of ``a``: neither copies that one."""
    reducer = _make(comm, UnitSettings())
    mine = 1 - comm.rank
    for _ in range(2):  # the second time in the memory of the first
        grads = [torch.full((3,), 1.0 + comm.rank), torch.full((2, 2), 10.0 + comm.rank)]
        for index, grad in enumerate(grads):
            reducer.receive(index, grad)
        assert reducer._buffer._kept == {mine: grads[mine]}
        assert reducer._buffer._slots[1 - mine].tolist() == grads[1 - mine].tolist()
        reducer.launch()
        assert reducer._buffer._kept == {}
        reducer.finish()
    assert _full_grads(reducer) == [[3.0] * 3, [21.0] * 4]


def _kept_and_more(comm: Comm) -> None:
    """More for the same parameter leaves alone what others may hold."""
    reducer = _make(comm, UnitSettings())
    grads = [torch.ones(3), torch.ones(2, 2)]
    for index in (0, 1, 0, 1):
        reducer.receive(index, grads[index])
    assert [grad.sum().item() for grad in grads] == [3.0, 4.0]
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[2.0] * 3, [2.0] * 4]


def _kept_across_microbatches(comm: Comm) -> None:
    """Kept, then left unsynchronised, then added to, in the order of microbatches."""
    settings = UnitSettings()
    reducer = _make(comm, settings)
    mine, shapes = 1 - comm.rank, [(3,), (2, 2)]
    reducer.receive(mine, torch.full(shapes[mine], 1e8))
    assert list(reducer._buffer._kept) == [mine]
    reducer.accumulate()
    assert reducer._buffer._kept == {}
    for index, shape in enumerate(shapes):
        reducer.receive(index, torch.full(shape, -1e8 if index == mine else 2.0))
        reducer.receive(index, torch.full(shape, 2.0))
    assert reducer._buffer._kept == {}
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[3.0] * 3, [3.0] * 4]  # (2 + 4) / 2


def _kept_and_forgotten(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings())
    mine = 1 - comm.rank
    reducer.receive(mine, torch.ones([(3,), (2, 2)][mine]))
    assert list(reducer._buffer._kept) == [mine]
    reducer.discard()
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [None, None]


def _strided_is_copied(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings())
    reducer.receive(0, torch.ones(3))
    reducer.receive(1, torch.tensor([[1.0, 3.0], [2.0, 4.0]]).t())
    assert list(reducer._buffer._kept) == [0][: comm.rank]
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer)[1] == [1.0, 2.0, 3.0, 4.0]


def _wider_is_copied(comm: Comm) -> None:
    """Gradients that are wider than the sum travel in the dtype of the sum."""
    reducer = _make(comm, UnitSettings(), torch.bfloat16, torch.float32)
    for index, shape in enumerate([(3,), (2, 2)]):
        reducer.receive(index, torch.full(shape, 1 + 2**-9))
    assert reducer._buffer._kept == {}
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[1.0] * 3, [1.0] * 4]  # bfloat16 has 8 bits


def _held_elsewhere_is_copied(comm: Comm) -> None:
    """Whoever else holds a gradient's memory may write to it before it is reduced."""
    reducer = _make(comm, UnitSettings())
    both = torch.ones(7)
    reducer.receive(0, both[:3])
    reducer.receive(1, both[3:].view(2, 2))
    both.fill_(100)
    reducer.launch()
    reducer.finish()
    assert _full_grads(reducer) == [[1.0] * 3, [1.0] * 4]


@pytest.mark.parametrize(
    "check",
    [
        _kept,
        _kept_and_more,
        _kept_across_microbatches,
        _kept_and_forgotten,
        _strided_is_copied,
        _wider_is_copied,
        _held_elsewhere_is_copied,
        _half,
    ],
)
def test_own_gradients_stay_where_they_are(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shard_fsdp._grad_buffer._KEPT_BYTES", 0)
    run_threads(check, 2, shares_memory=True)


def _copied(comm: Comm) -> None:
    reducer = _make(comm, UnitSettings())
    reducer.receive(0, torch.ones(3))
    reducer.receive(1, torch.ones(2, 2))
    assert reducer._buffer._kept == {}
    reducer.discard()


def test_small_gradients_are_copied_and_so_are_all_where_nothing_is_read_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_threads(_copied, 2, shares_memory=True)
    monkeypatch.setattr("shard_fsdp._grad_buffer._KEPT_BYTES", 0)
    run_threads(_copied, 2)


class _Sum(nn.Module):
    """Adds vectors as matrices: both have one gradient, which one of them doubles in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.a.view(2, 2) + self.b.view(2, 2)  # the gradient of b comes first
        self.a.register_hook(lambda grad: grad.mul_(2))
        return (total * x).sum()


def _one_memory(comm: Comm) -> list[float]:
    model = _Sum()
    fully_shard(model, mesh=comm)
    model(torch.ones(2, 2)).backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor().unique().item() for g in grads if isinstance(g, ShardTensor)]


def test_gradients_in_one_memory_are_apart(shares_memory: bool) -> None:
    assert run_threads(_one_memory, 2, shares_memory=shares_memory) == [[2.0, 1.0]] * 2


def test_gradients_of_a_backward_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd itself holds nothing of what it handed over."""
    monkeypatch.setattr("shard_fsdp._grad_buffer._KEPT_BYTES", 0)
    take, kept = GradBuffer.take, []

    def watched(buffer: GradBuffer) -> tuple[torch.Tensor, list[torch.Tensor]]:
        kept.append(sorted(buffer._kept))
        return take(buffer)

    def rank(comm: Comm) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        fully_shard(model, mesh=comm)
        model(torch.ones(2, 8)).sum().backward()

    monkeypatch.setattr(GradBuffer, "take", watched)
    run_threads(rank, 2, shares_memory=True)
    assert sorted(kept) == [[0, 1, 2], [3, 4, 5]]
