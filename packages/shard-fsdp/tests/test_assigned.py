"""Parameters that were deleted, tied, replaced or pickled after sharding, or were never there."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_comm import Comm, SoloComm
from shard_fsdp import fully_shard as _fully_shard
from shard_fsdp import register_fsdp_forward_method
from shard_testing import run_threads


def fully_shard(module: Any, **kwargs: Any) -> Any:
    """Untyped, since nn.Module cannot say what its attributes are."""
    return _fully_shard(module, **kwargs)


class _Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.emb(index))
        return out

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden, self.head.weight)


INDEX = torch.tensor([1, 4])


def _deleted(comm: Comm) -> None:
    model = fully_shard(_Tied(tied=False), mesh=comm)
    kept = model.head.weight
    del model.head.weight
    with pytest.raises(
        ValueError, match=r"^head.weight: Linear has no parameter 'weight' any more"
    ):
        model(INDEX)
    model.head.weight = kept  # and it is usable again
    model(INDEX).sum().backward()
    assert kept.grad is not None
    tied = fully_shard(_Tied(tied=True), mesh=comm)
    del tied.head.weight  # the second place of emb.weight
    with pytest.raises(ValueError, match=r"^emb.weight: Linear has no parameter 'weight' any more"):
        tied(INDEX)


def _tied_late(comm: Comm) -> None:
    for shard_apart in (False, True):
        model = _Tied(tied=False)
        if shard_apart:
            fully_shard(model.emb, mesh=comm)
            fully_shard(model.head, mesh=comm)
        fully_shard(model, mesh=comm)
        model.head.weight = model.emb.weight
        match = r"^head.weight: the same parameter as emb.weight .*tie parameters before"
        with pytest.raises(ValueError, match=match):
            model(INDEX)
    between = _Tied(tied=False)
    fully_shard(between.emb, mesh=comm)
    between.head.weight = between.emb.weight
    with pytest.raises(
        ValueError, match=r"^head.weight: .*sharded already.* tie parameters before"
    ):
        fully_shard(between, mesh=comm)


def _untied_late(comm: Comm) -> None:
    model = fully_shard(_Tied(tied=True), mesh=comm)
    want = model.emb.weight.full_tensor().detach()
    model.head.weight = nn.Parameter(torch.zeros(5, 3))
    with pytest.raises(ValueError, match=r"^emb.weight: tied, and one of its 2 places"):
        model(INDEX)
    model.load_state_dict(
        {name: nn.Parameter(want * 2) for name in ("emb.weight", "head.weight")}, assign=True
    )
    assert model.emb.weight is model.head.weight
    assert torch.equal(model.emb.weight.full_tensor(), want * 2)


def _own_pieces(comm: Comm) -> None:
    """What is cut alike and belongs to nobody else may be assigned, an earlier one too."""
    model = fully_shard(_Tied(tied=False), mesh=comm)
    first = model.emb.weight
    model.emb.weight = nn.Parameter(first.detach() * 2)
    second = model.emb.weight
    model(INDEX)
    assert model.emb.weight is second
    model.emb.weight = first
    model(INDEX)
    assert model.emb.weight is first


def _used_outside(comm: Comm) -> None:
    model = fully_shard(_Tied(tied=False), mesh=comm)
    hidden = torch.ones(2, 3)
    want = hidden @ model.head.weight.full_tensor().T
    model.unshard()
    with pytest.raises(RuntimeError, match=r"head.weight: .*register_fsdp_forward_method"):
        model.scores(hidden)
    register_fsdp_forward_method(model, "scores")
    assert torch.equal(model.scores(hidden), want)


class _Generator(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        yield functional.linear(x, self.weight)


def _read_after_the_forward(comm: Comm) -> None:
    """The body of a generator runs when it is iterated, and that is outside."""
    model = fully_shard(_Generator(4, 4), mesh=comm)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^weight: .* in a forward of the module"):
            next(model(torch.ones(1, 4)))


def _assigned_while_gathered(comm: Comm) -> None:
    """Too late for the gather that was made: an error, and the next one takes it."""
    model = fully_shard(nn.Linear(1, 4, bias=False), mesh=comm)
    match = "^weight: its group of parameters changed after it was gathered"

    model.unshard()
    model.weight = nn.Parameter(torch.full((4, 1), 7.0))
    with pytest.raises(RuntimeError, match=match):
        model(torch.ones(1))
    assert model(torch.ones(1)).tolist() == [7.0] * 4

    loss = model(torch.ones(1)).sum()
    model.weight = nn.Parameter(torch.full((4, 1), 8.0))
    with pytest.raises(RuntimeError, match=match):
        loss.backward()
    assert model(torch.ones(1)).tolist() == [8.0] * 4


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "check",
    [
        _deleted,
        _tied_late,
        _untied_late,
        _own_pieces,
        _used_outside,
        _read_after_the_forward,
        _assigned_while_gathered,
    ],
)
def test_changes_after_sharding_are_named(check: Any, world_size: int, shares_memory: bool) -> None:
    run_threads(check, world_size, shares_memory=shares_memory)


def test_lazy_parameters_are_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    with pytest.raises(
        ValueError, match=r"^0.weight: the parameter has no shape yet .*run the model"
    ):
        fully_shard(model, mesh=SoloComm())
    model(torch.ones(1, 4))
    assert fully_shard(model, mesh=SoloComm())(torch.ones(1, 4)).shape == (1, 2)


def test_a_sharded_module_does_not_pickle() -> None:
    model = fully_shard(_Tied(tied=False), mesh=SoloComm())
    for dump in (pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"^FSDP_Tied: .*does not pickle.*state_dict\(\) with"):
            dump(model)


class _Counted(nn.Linear):
    """Says what a copy of it is made from."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "copies": self.__dict__.get("copies", 0) + 1}


class _Stubborn(nn.Linear):
    """Copies as it likes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> str:
        return "mine"


def test_copies_are_made_as_classes_say() -> None:
    counted = fully_shard(_Counted(2, 2), mesh=SoloComm())
    twin = copy.deepcopy(counted)
    assert twin.copies == 1
    assert twin.weight is not counted.weight
    assert torch.equal(twin(torch.ones(1, 2)), counted(torch.ones(1, 2)))
    assert copy.deepcopy(fully_shard(_Stubborn(2, 2), mesh=SoloComm())) == "mine"
    shallow = copy.copy(counted)
    assert type(shallow) is type(counted)
    assert shallow.weight is counted.weight
