"""The methods of FSDPModule beyond forward and backward."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.tensor import Shard

from shard_comm import Comm, Recorded, SoloComm, comm_for
from shard_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from shard_testing import (
    DecoderBlock,
    TinyDecoder,
    full_grad,
    run_ranks,
    run_threads,
    token_batches,
)
from shard_wrap import by_class


class _Layer(nn.Module):
    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([value]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + x


def _chain(comm: Comm, count: int = 3, **kwargs: Any) -> Any:
    layers = [_Layer() for _ in range(count)]
    for layer in layers:
        fully_shard(layer, mesh=comm, **kwargs)
    return fully_shard(nn.Sequential(*layers), mesh=comm, **kwargs)


class _Log(Recorded):
    """Names the unit of each gather by the size of its array."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.gathers: list[int] = []

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Any:
        self.gathers.append(out.numel())
        return super()._all_gather(out, inp, timeout_s)


class _Sized(nn.Module):
    """A layer whose gathers can be told apart: ``size`` elements on two ranks."""

    def __init__(self, size: int, log: list[str], name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.log, self.name = log, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(self.name)
        return x * self.weight.sum()


def _forward_prefetch(comm: Comm) -> None:
    log = _Log(comm)
    ran: list[str] = []
    layers = [_Sized(size, ran, str(size)) for size in (8, 16, 24)]
    for layer in layers:
        fully_shard(layer, mesh=log, reshard_after_forward=True)
    model: Any = fully_shard(nn.Sequential(*layers), mesh=log, reshard_after_forward=True)
    gathered_before: list[list[int]] = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda m, a: gathered_before.append(list(log.gathers)))
    x = torch.ones(1, requires_grad=True)
    for expected in (
        [[8], [8, 16], [8, 16, 24]],  # first step: nothing is known yet
        [[8, 16], [8, 16, 24], [8, 16, 24]],  # then one ahead
    ):
        log.gathers.clear()
        gathered_before.clear()
        out = model(x)
        assert gathered_before == expected
        log.gathers.clear()
        out.sum().backward()
        assert log.gathers == [24, 16, 8]
    # explicit lists replace the recorded order
    layers[0].set_modules_to_forward_prefetch([layers[1], layers[2]])  # type: ignore[operator]
    layers[2].set_modules_to_backward_prefetch([layers[0], layers[1]])  # type: ignore[operator]
    log.gathers.clear()
    gathered_before.clear()
    out = model(x)
    assert gathered_before[0] == [8, 16, 24]
    log.gathers.clear()
    out.sum().backward()
    assert log.gathers == [24, 8, 16]


def _at_most_two_full(comm: Comm) -> None:
    model = _chain(comm, 6, reshard_after_forward=True)
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(layer._shard_unit.has_storage for layer in model))

    for layer in model:
        layer.register_forward_pre_hook(count)
        layer.register_full_backward_hook(count)
    for _ in range(2):
        model(torch.ones(1, requires_grad=True)).sum().backward()
    assert max(counts) == 2
    assert not any(layer._shard_unit.has_storage for layer in model)
    for depth in (0, 2, 3):
        counts.clear()
        model.zero_grad()
        model.set_prefetch_depth(forward=depth, backward=depth)
        model(torch.ones(1, requires_grad=True)).sum().backward()
        assert max(counts[:6]) == max(counts[6:]) == depth + 1
        assert full_grad(model[0].weight).item() == 2**5
    with pytest.raises(ValueError, match="expected a depth of at least 0, got -1"):
        model.set_prefetch_depth(backward=-1)


class _Route(nn.Sequential):
    """Calls the layers that it is told to."""

    route: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.route:
            x = self[index](x)
        return x


def _changed_order(comm: Comm) -> None:
    """Another path than the recorded one: nothing stays gathered, values hold."""
    layers = [fully_shard(_Layer(), mesh=comm, reshard_after_forward=True) for _ in range(3)]
    model: Any = fully_shard(_Route(*layers), mesh=comm, reshard_after_forward=True)
    x = torch.ones(1, requires_grad=True)
    for route, grads in (((0, 1, 2), [4, 4, 4]), ((0, 2), [2, None, 2]), ((2, 1), [None, 2, 2])):
        model.route = route
        model.zero_grad()
        model(x).sum().backward()
        found = [None if p.grad is None else full_grad(p).item() for p in model.parameters()]
        assert found == grads
        assert comm.size == 1 or not any(layer._shard_unit.has_storage for layer in model)


def _forward_method(comm: Comm) -> None:
    layer: Any = _Layer()
    with pytest.raises(ValueError, match="_Layer has no method 'decode'"):
        register_fsdp_forward_method(layer, "decode")
    fully_shard(layer, mesh=comm)
    with pytest.raises(RuntimeError, match=r"weight: .*full_tensor\(\)"):
        layer.encode(torch.ones(2, 1))
    register_fsdp_forward_method(layer, "encode")
    out = layer.encode(torch.ones(2, 1))
    assert out.tolist() == [[3], [3]]
    out.sum().backward()
    assert full_grad(layer.weight).item() == 2
    assert layer.encode.__name__ == "encode"


def _unshard_handle(comm: Comm) -> None:
    layer: Any = fully_shard(_Layer(), mesh=comm, reshard_after_forward=True)
    handle = layer.unshard(async_op=True)
    handle.wait()
    handle.wait()
    assert layer._shard_unit.has_storage
    assert layer(torch.ones(1)).item() == 2
    assert not layer._shard_unit.has_storage
    assert layer.unshard() is None
    layer.reshard()
    assert not layer._shard_unit.has_storage


def _hooks_and_buffers(comm: Comm) -> None:
    model = _chain(comm)
    seen: list[int] = []

    def double(reduced: torch.Tensor) -> None:
        seen.append(reduced.numel())
        reduced.mul_(2)

    model[1].set_all_reduce_hook(double)
    model(torch.ones(1)).sum().backward()
    assert full_grad(model[0].weight).item() == 4
    if comm.size > 1:
        assert full_grad(model[1].weight).item() == 8
        assert seen == [4]
    for bad, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error):
            model.set_reduce_scatter_max_input_buffers(bad)
    model.set_reduce_scatter_max_input_buffers(2)
    model.zero_grad()
    model(torch.ones(1)).sum().backward()
    assert full_grad(model[2].weight).item() == 4
    model.set_force_sum_reduction_for_comms(True)
    share_comm_ctx([model, model[0]])
    with pytest.raises(ValueError, match="expected modules that fully_shard wrapped"):
        share_comm_ctx([nn.Linear(2, 2)])  # type: ignore[list-item]


def _not_last(comm: Comm) -> None:
    model = _chain(comm)
    a, b = model(torch.ones(1)).sum(), model(torch.ones(1)).sum()
    model.set_is_last_backward(False)
    a.backward()
    model.set_is_last_backward(True)
    b.backward()
    assert full_grad(model[0].weight).item() == 8


def _no_gather_in_backward(comm: Comm) -> None:
    """An embedding's backward needs indices only."""
    log = _Log(comm)
    layer: Any = nn.Embedding(4, 4)
    fully_shard(layer, mesh=log, reshard_after_forward=True)
    layer.set_unshard_in_backward(False)
    layer(torch.tensor([1])).sum().backward()
    assert len(log.gathers) == (1 if comm.size > 1 else 0)
    assert layer.weight.grad.full_tensor().sum(1).tolist() == [0, 4, 0, 0]


def _deepcopy(comm: Comm) -> None:
    model: Any = TinyDecoder()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    tokens = token_batches(1, 1)[0][0]
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=1.0)
    before = model.loss(tokens)
    twin.loss(tokens).backward()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert torch.equal(model.loss(tokens), before)
    assert not torch.equal(twin.loss(tokens), before)
    assert twin._shard_unit.schedule is not model._shard_unit.schedule
    assert [n for n, _ in twin.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert twin.blocks[0]._shard_unit.schedule is twin._shard_unit.schedule


@pytest.mark.parametrize(
    "check",
    [
        _changed_order,
        _forward_method,
        _unshard_handle,
        _hooks_and_buffers,
        _not_last,
        _no_gather_in_backward,
        _deepcopy,
    ],
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_methods(check: Any, world_size: int) -> None:
    run_threads(check, world_size)


@pytest.mark.parametrize("check", [_forward_prefetch, _at_most_two_full])
def test_order_of_gathers(check: Any) -> None:
    run_threads(check, 2)


def _blocks(comm: Comm) -> None:
    weights = {"rows": torch.ones(5, 3), "whole": torch.ones(4, 4), "free": torch.ones(7)}

    places: dict[int, Shard | int | None] = {5: Shard(0), 4: 16, 7: None}

    def place(param: nn.Parameter) -> Shard | int | None:
        return places[param.shape[0]]

    module: Any = nn.Identity()
    for name, value in weights.items():
        module.register_parameter(name, nn.Parameter(value))
    fully_shard(module, mesh=comm, shard_placement_fn=place)
    assert module.rows.spec.start % 3 == 0
    assert module.rows.spec.stop % 3 == 0
    assert module.whole.local.numel() in (0, 16)
    assert module.free.full_tensor().tolist() == [1] * 7


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_placement_function_sets_blocks(world_size: int) -> None:
    run_threads(_blocks, world_size)


def test_bad_placements_are_named() -> None:
    for bad in (0, True, "row", Shard(2)):
        with pytest.raises(ValueError, match="weight: "):
            fully_shard(
                nn.Linear(2, 2),
                mesh=SoloComm(),
                shard_placement_fn=lambda p, bad=bad: bad,  # type: ignore[misc]
            )


def test_torchs_own_policies_are_understood() -> None:
    model: Any = nn.Linear(2, 2)
    fully_shard(
        model,
        mesh=SoloComm(),
        mp_policy=torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16),  # type: ignore[call-overload]
        offload_policy=torch_fsdp.CPUOffloadPolicy(pin_memory=False),
    )
    config = model._shard_unit.config
    assert config.mp_policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert config.offload_policy == CPUOffloadPolicy(pin_memory=False)
    assert model(torch.ones(1, 2)).dtype == torch.bfloat16
    for name in ("mp_policy", "offload_policy"):
        with pytest.raises(TypeError, match="expected a"):
            fully_shard(nn.Linear(2, 2), mesh=SoloComm(), **{name: "bf16"})  # type: ignore[call-overload]


def test_ranks_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 of a job, but .*init_process_group"):
        comm_for()


def _launched(comm: Comm) -> None:
    """A job whose program never calls init_process_group, as torch's FSDP2 allows."""
    dist.destroy_process_group()
    port = 20_000 + os.getppid() % 20_000
    os.environ.update(
        WORLD_SIZE=str(comm.size),
        RANK=str(comm.rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    model: Any = fully_shard(_Layer())
    assert model._shard_unit.comm.size == comm.size
    (model(torch.ones(1)) * comm.rank).sum().backward()
    assert full_grad(model.weight).item() == (comm.size - 1) / 2


def test_a_launched_job_is_joined() -> None:
    run_ranks(_launched, 2)
