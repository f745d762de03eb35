"""Ranks that do different things: they are told what, and nothing depends on one rank alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, Recorded, comm_for
from shard_fsdp import fully_shard
from shard_fsdp._agree import Trail
from shard_testing import run_ranks, run_threads


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Either(nn.Module):
    """Two layers of the same size, of which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Scale(), _Scale()])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.layers[which](x)
        return out


def _either(comm: Comm) -> Any:
    model = _Either()
    for layer in model.layers:
        fully_shard(layer, mesh=comm)
    return fully_shard(model, mesh=comm)


def _run_different_units(comm: Comm) -> str:
    """Equal sizes, so that no transport notices which knows no names."""
    model = _either(comm)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(1), comm.rank).sum().backward()
    return str(caught.value)


def _run_different_losses(comm: Comm) -> str:
    """All run both, but each rank's loss needs one of them."""
    model = _either(comm)
    model.set_reshard_after_forward(False)
    outs = [model(torch.ones(1), which) for which in (0, 1)]
    with pytest.raises(RuntimeError) as caught:
        outs[comm.rank].sum().backward()
    return str(caught.value)


def _different_units(comm: Comm) -> None:
    assert _run_different_units(comm) == (
        "ranks call different collectives: rank 0 calls all_gather of 4 float32 for "
        "layers.0.weight, rank 1 calls all_gather of 4 float32 for layers.1.weight"
    )


def _different_losses(comm: Comm) -> None:
    assert _run_different_losses(comm) == (
        "ranks call different collectives: rank 0 calls reduce_scatter sum of 8 float32 (mean) for "
        "layers.0.weight, rank 1 calls reduce_scatter sum of 8 float32 (mean) for "
        "layers.1.weight"
    )


def _where_names_do_not_travel(comm: Comm) -> None:
    """Over Gloo the trail that each rank leaves tells."""
    gloo = comm_for(shared_memory=False)
    _different_models(gloo)
    assert (
        "first difference is at number 0: rank 0: gather layers.0.weight, "
        "rank 1: gather layers.1.weight"
    ) in _run_different_units(gloo)
    assert "rank 0: reduce layers.0.weight, rank 1: reduce layers.1" in _run_different_losses(gloo)
    model = _either(gloo)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"gather layers\.0\.weight, rank 1: "):
        model(torch.ones(1), comm.rank)


def test_ranks_that_differ_over_gloo() -> None:
    run_ranks(_where_names_do_not_travel, 2)


def _different_models(comm: Comm) -> None:
    """Equal bytes per unit, another shape, another number of units, values on some ranks only."""
    widths = [(4, 3), (4, 3) if comm.rank == 0 else (3, 4)]
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in widths))
    fully_shard(model, mesh=comm)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(4))
    assert str(caught.value) == (
        "the ranks sharded different models; the first difference is at number 1: "
        "rank 0: 1.weight [3, 4] torch.float32 on cpu in unit 0, "
        "rank 1: 1.weight [4, 3] torch.float32 on cpu in unit 0. "
        "Build the same model on all ranks, and call fully_shard on the same modules in the same "
        "order"
    )
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if comm.rank == 1:
        fully_shard(model[0], mesh=comm)
    fully_shard(model, mesh=comm)
    with pytest.raises(RuntimeError, match=r"number 1: rank 0: 1\.w.* unit 0, rank 1: .* unit 1\."):
        model(torch.ones(4))
    with torch.device("meta" if comm.rank == 1 else "cpu"):
        lazy: Any = nn.Linear(4, 4, bias=False)
    fully_shard(lazy, mesh=comm)
    with pytest.raises(RuntimeError, match=r"on cpu in unit 0, rank 1: weight .* on meta in unit"):
        lazy(torch.ones(4))


def _alone(comm: Comm) -> None:
    model = _either(comm)
    model.unshard()
    for layer in model.layers:
        layer.unshard()
    if comm.rank == 0:
        with torch.no_grad():
            assert model(torch.ones(1), 1).item() == 2


def test_what_is_full_already_runs_on_one_rank_alone() -> None:
    run_threads(_alone, 2, timeout_s=5)


def test_the_trail_of_two_ranks() -> None:
    ours, theirs = Trail(), Trail()
    for trail in (ours, theirs):
        trail.append("gather a")
    assert ours.checksum == theirs.checksum
    ours.append("gather b")
    theirs.append("gather c")
    assert ours.checksum != theirs.checksum
    assert (ours.count, list(ours.last)) == (2, ["gather a", "gather b"])


class _Thing:
    """An output with a callable inside, which may hide tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.call = lambda: value


class _SometimesThing(_Scale):
    hides = False

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return _Thing(out) if self.hides else {"value": out}


def _callable_on_one_rank(comm: Comm) -> None:
    recorded = Recorded(comm)
    inner: Any = fully_shard(_SometimesThing(), mesh=recorded, reshard_after_forward=True)
    inner.hides = comm.rank == 0
    model: Any = fully_shard(nn.Sequential(inner), mesh=recorded)
    out = model(torch.ones(1))
    value = out.value if inner.hides else out["value"]
    value.sum().backward()
    assert recorded.records["all_gather"].calls == 2
    assert inner.weight.grad.full_tensor().item() == 1


def _changed_on_one_rank(comm: Comm) -> None:
    """Kept gathered, and only rank 1 changes its piece: all gather again."""
    model: Any = fully_shard(nn.Linear(1, 8, bias=False), mesh=comm)
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model.weight.fill_(1)
        assert model(torch.ones(1)).tolist() == [1.0] * 8
        if comm.rank == 1:
            model.weight.local.fill_(5)
        assert model(torch.ones(1)).tolist() == [1.0] * 4 + [5.0] * 4


def _no_grad_root(comm: Comm) -> None:
    """Without gradients no backward follows, so the root is freed as well."""
    model: Any = fully_shard(_Scale(), mesh=comm)
    with torch.no_grad():
        model(torch.ones(1))
    assert not model._shard_unit.has_storage
    model(torch.ones(1))
    assert model._shard_unit.has_storage


def _list_of_which_one_runs(comm: Comm) -> None:
    parts = nn.ModuleList([_Scale(), _Scale()])
    fully_shard(list(parts), mesh=comm, reshard_after_forward=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.parts[0](x)
            return out

    model: Any = fully_shard(Model(), mesh=comm, reshard_after_forward=True)
    for _ in range(2):
        with torch.no_grad():
            assert model(torch.ones(1)).item() == 2
        assert not any(u.has_storage for u in model._shard_unit.schedule.units)


def _changed_after_unshard(comm: Comm) -> None:
    model: Any = fully_shard(_Scale(), mesh=comm)
    model.unshard()
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"weight: .* changed after it was gathered"):
        model(torch.ones(1))
    model.reshard()
    assert model(torch.ones(1)).item() == 4


class _Exits(nn.Module):
    """Three layers, each of whose outputs is one of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Scale(), _Scale(), _Scale()])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        outs = []
        for layer in self.layers:
            x = layer(x)
            outs.append(x)
        return outs


def _exits(comm: Comm) -> None:
    """A loss on an inner unit's output reaches that unit before the model, on each rank another."""
    model: Any = _Exits()
    for layer in model.layers:
        fully_shard(layer, mesh=comm, reshard_after_forward=True)
    fully_shard(model, mesh=comm)
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(1))[comm.rank].sum().backward()
    # rank 0: w0 = 2, so 1 for w0; rank 1: w0 * w1, so 2 for each; weights are all 2
    grads = [layer.weight.grad.full_tensor().item() for layer in model.layers]
    assert grads == [1.5, 1, 0]


class _Residual(nn.Module):
    """Passes its input on, and adds a layer's output as a constant unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Scale()

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return x + (out if which else out.detach())


def _no_parameter(comm: Comm) -> None:
    """Rank 0's backward comes by the units and reaches no parameter of theirs."""
    model: Any = _Residual()
    fully_shard(model.layer, mesh=comm)
    fully_shard(model, mesh=comm)
    model.set_reduce_scatter_unused_params(True)
    x = torch.ones(1, requires_grad=True)
    model(x, comm.rank).sum().backward()
    assert model.layer.weight.grad.full_tensor().item() == 0.5
    assert x.grad is not None
    assert x.grad.item() == 1 + 2 * comm.rank


@pytest.mark.parametrize(
    "check",
    [
        _different_models,
        _different_units,
        _different_losses,
        _callable_on_one_rank,
        _changed_on_one_rank,
        _no_grad_root,
        _list_of_which_one_runs,
        _changed_after_unshard,
    ],
)
def test_ranks_that_differ(check: Callable[[Comm], None]) -> None:
    run_threads(check, 2)


@pytest.mark.parametrize("check", [_exits, _no_parameter])
def test_ranks_whose_losses_need_different_units(
    check: Callable[[Comm], None], shares_memory: bool
) -> None:
    run_threads(check, 2, shares_memory=shares_memory)
