"""Faults that users of other systems met, as cases O1 to O4 of optimizer state, at 1 to 4 ranks.

Models are sharded by shard-fsdp, trained by shard-optim or torch, and go through shard-ckpt.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shard_fsdp
from shard_ckpt import inspect, load, save
from shard_comm import Comm, GroupComm
from shard_optim import AdamW
from shard_testing import full_grad, full_value, run_ranks, run_threads

# Untyped, since nn.Module cannot say what its attributes are.
fully_shard: Any = shard_fsdp.fully_shard

SHAPES = {"odd": (5,), "matrix": (2, 3), "scalar": ()}

each_world = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


class _Sum(nn.Module):
    """Its loss is the sum of the parameters that are asked for, so every gradient is 1."""

    def __init__(self, names: Iterable[str] = SHAPES) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(SHAPES.get(name, (4,)))))

    def forward(self, *names: str) -> torch.Tensor:
        wanted = names or tuple(dict(self.named_parameters()))
        return torch.stack([self.get_parameter(name).sum() for name in wanted]).sum()


def _values(model: nn.Module) -> list[float]:
    return torch.cat([full_value(p).flatten() for p in model.parameters()]).tolist()


def _moments(optimizer: torch.optim.Optimizer, param: Any) -> tuple[list[float], list[float], int]:
    """First and second moment of one parameter, and its step."""
    own = optimizer.state[param]
    first, second = (full_value(own[slot]).flatten() for slot in ("exp_avg", "exp_avg_sq"))
    return first.unique().tolist(), second.unique().tolist(), int(own["step"])


def _reload(
    state: dict[str, Any], template: dict[str, Any], comm: Comm, folder: str
) -> dict[str, Any]:
    """Through the disk."""
    path = Path(folder) / "there"
    save({"optim": state}, path, comm=comm)
    found: dict[str, Any] = load({"optim": template}, path, comm=comm)["optim"]
    return found


# --- O1: reading changes nothing ---


def _to_disk(optimizer: Any, comm: Comm, path: Path) -> None:
    save({"optim": optimizer.state_dict()}, path, comm=comm)


def _template_to_disk(optimizer: Any, comm: Comm, path: Path) -> None:
    save({"optim": optimizer.state_dict(allocate=True)}, path, comm=comm)


def _in_memory(optimizer: Any, comm: Comm, path: Path) -> None:
    optimizer.state_dict()


def _nothing(optimizer: Any, comm: Comm, path: Path) -> None:
    """The run that the others are held against."""


EXPORTS = [
    (AdamW, _nothing),
    (AdamW, _to_disk),
    (AdamW, _template_to_disk),
    (torch.optim.AdamW, _in_memory),
]


def _reading(comm: Comm, folder: str) -> None:
    for number, (kind, export) in enumerate(EXPORTS):
        model = fully_shard(_Sum(), mesh=comm)
        optimizer: Any = kind(model.parameters(), lr=0.1, weight_decay=0)
        export(optimizer, comm, Path(folder) / f"{number}-before")
        assert all(p.grad is None for p in model.parameters())
        model().backward()
        optimizer.step()
        assert _values(model) == pytest.approx([0.9] * 12, abs=1e-6)
        assert {int(own["step"]) for own in optimizer.state.values()} == {1}
        before = _values(model)
        export(optimizer, comm, Path(folder) / f"{number}-after")
        assert _values(model) == before


# --- O2: loading while gradients exist ---


def _loading(comm: Comm, folder: str) -> None:
    for kind, through_disk in ((AdamW, True), (AdamW, False), (torch.optim.Adam, False)):
        model = fully_shard(_Sum(), mesh=comm)
        trained, fresh = (kind(model.parameters(), lr=lr, weight_decay=0) for lr in (0.1, 0.5))
        model().backward()
        trained.step()
        grads = [param.grad for param in model.parameters()]
        state = trained.state_dict()
        if through_disk:
            assert isinstance(fresh, AdamW)
            state = _reload(state, fresh.state_dict(allocate=True), comm, folder)
        fresh.load_state_dict(copy.deepcopy(state))
        assert fresh.param_groups[0]["lr"] == 0.1
        for param, grad in zip(model.parameters(), grads, strict=True):
            assert param.grad is grad
            assert full_grad(param).eq(1).all()
            first, second, step = _moments(fresh, param)
            assert first == pytest.approx([0.1])
            assert second == pytest.approx([0.001])
            assert step == 1
        fresh.step()
        assert [_moments(fresh, p)[2] for p in model.parameters()] == [2, 2, 2]
        assert [_moments(trained, p)[2] for p in model.parameters()] == [1, 1, 1]


# --- O3: frozen after training ---

NAMES = ("trained", "never", "live")


def _save_frozen(comm: Comm, folder: str) -> None:
    """``trained`` has stepped once and is frozen, ``never`` always was, ``live`` has stepped twice.

    The moments of a gradient of 1 are 0.1 and 0.001 after one step, 0.19 and 0.001999 after two.
    """
    model = _Sum(NAMES)
    model.never.requires_grad_(False)
    fully_shard(model, mesh=comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for names in (("trained", "live"), ("live",)):
        model.trained.requires_grad_("trained" in names)
        optimizer.zero_grad()
        model(*names).backward()
        optimizer.step()
    assert model.never not in optimizer.state
    save({"optim": optimizer.state_dict(allocate=True)}, Path(folder) / "frozen", comm=comm)


def _stored_names(folder: str) -> set[str]:
    """Names of the parameters that a checkpoint has state of."""
    records = inspect(Path(folder) / "frozen").tensors
    return {record.name.rpartition("#")[0] for record in records}


def _resumed(comm: Comm, *, frozen: tuple[str, ...]) -> tuple[Any, AdamW]:
    model = _Sum(NAMES)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    fully_shard(model, mesh=comm)
    return model, AdamW(model.parameters(), lr=0.1)


def _load_frozen(comm: Comm, folder: str) -> None:
    model, optimizer = _resumed(comm, frozen=("trained", "never"))
    template = optimizer.state_dict(allocate=_stored_names(folder))
    state = load({"optim": template}, Path(folder) / "frozen", comm=comm)["optim"]
    optimizer.load_state_dict(state)
    assert model.never not in optimizer.state
    for name, moments in (("trained", (0.1, 0.001, 1)), ("live", (0.19, 0.001999, 2))):
        first, second, step = _moments(optimizer, model.get_parameter(name))
        assert (*first, *second, step) == pytest.approx(moments)
    model.trained.requires_grad_(True)
    model("trained").backward()
    optimizer.step()
    first, second, step = _moments(optimizer, model.trained)
    assert (*first, *second, step) == pytest.approx((0.19, 0.001999, 2))


def _load_thawed(comm: Comm, folder: str) -> None:
    """``never`` is to be trained now, and the file lacks its state."""
    model, optimizer = _resumed(comm, frozen=("trained",))
    template = {"optim": optimizer.state_dict(allocate=_stored_names(folder))}
    path = Path(folder) / "frozen"
    with pytest.raises(ValueError, match=r"the checkpoint lacks optim: never#.*strict=False"):
        load(template, path, comm=comm)
    assert _moments(optimizer, model.live) == ([0], [0], 0)
    optimizer.load_state_dict(load(template, path, comm=comm, strict=False)["optim"])
    assert _moments(optimizer, model.never) == ([0], [0], 0)
    assert _moments(optimizer, model.live)[2] == 2
    assert _moments(optimizer, model.trained)[2] == 1
    model("never").backward()
    optimizer.step()
    first, _, step = _moments(optimizer, model.never)
    assert first == pytest.approx([0.1])
    assert step == 1


# --- O4: one empty group among several ---


def _empty_group(comm: Comm, folder: str) -> None:
    model = fully_shard(_Sum(), mesh=comm)

    def build(**hyper: Any) -> AdamW:
        first, *rest = model.parameters()
        return AdamW([{"params": [first], **hyper}, {"params": []}, {"params": rest}], lr=0.5)

    trained = build(lr=0.1, betas=(0.5, 0.6))
    trained.param_groups[1].update(lr=0.2, betas=(0.7, 0.8), eps=1e-3)
    trained.param_groups[2].update(weight_decay=0.3)
    model().backward()
    trained.step()
    fresh = build()
    state = _reload(trained.state_dict(), fresh.state_dict(allocate=True), comm, folder)
    fresh.load_state_dict(state)
    keys = ("lr", "betas", "eps", "weight_decay")
    assert [tuple(group[key] for key in keys) for group in fresh.param_groups] == [
        (0.1, (0.5, 0.6), 1e-8, 0.01),
        (0.2, (0.7, 0.8), 1e-3, 0.01),
        (0.5, (0.9, 0.999), 1e-8, 0.3),
    ]
    assert [len(group["params"]) for group in fresh.param_groups] == [1, 0, 2]
    fresh.step()
    # its own betas: from 0.5, once more half of the way to 1
    assert _moments(fresh, model.odd)[0] == [0.75]
    assert _moments(fresh, model.matrix)[0] == pytest.approx([0.19])


CASES: dict[str, Callable[[Comm, str], None]] = {
    "O1": _reading,
    "O2": _loading,
    "O4": _empty_group,
}


@each_world
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, world_size: int, tmp_path: Path) -> None:
    run_threads(CASES[case], world_size, str(tmp_path))


WORLDS = [1, 2, 3, 4]


@pytest.mark.parametrize("saved_at", WORLDS)
def test_o3_frozen_after_training(saved_at: int, tmp_path: Path) -> None:
    run_threads(_save_frozen, saved_at, str(tmp_path))
    assert _stored_names(str(tmp_path)) == {"trained", "live"}
    for loaded_at in WORLDS:
        run_threads(_load_frozen, loaded_at, str(tmp_path))
        run_threads(_load_thawed, loaded_at, str(tmp_path))


def _all_cases(comm: Comm, folder: str) -> None:
    for kind, transport in (("memory", comm), ("gloo", GroupComm())):
        for name, case in CASES.items():
            case(transport, f"{folder}/{kind}-{name}")
        for check in (_save_frozen, _load_frozen, _load_thawed):
            check(transport, f"{folder}/{kind}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_cases_over_processes(world_size: int, tmp_path: Path) -> None:
    run_ranks(_all_cases, world_size, str(tmp_path))
