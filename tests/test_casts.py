"""Casts of parameters that a step takes over from the next gather, and whom it may not disturb."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shard_ckpt
from shard_comm import Checked, Comm, Recorded, SoloComm
from shard_fsdp import MixedPrecisionPolicy, fully_shard
from shard_optim import EMA, SGD, AdamW, Lion, Muon
from shard_testing import (
    Casts,
    DecoderBlock,
    TinyDecoder,
    full_value,
    run_ranks,
    run_threads,
    token_batches,
)
from shard_wrap import by_class

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
WIDTH = 32  # a shard of whole vectors, which fused kernels change without counting it


def layer(comm: Comm, **how: Any) -> Any:
    """A unit of one matrix, inside of a root without parameters, resharded after forward."""
    inner = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        inner.weight.copy_(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
    fully_shard(inner, mesh=comm, mp_policy=BF16, **how)
    return fully_shard(nn.Sequential(inner), mesh=comm)


def seen(model: Any) -> torch.Tensor:
    """The parameter that a forward sees, without a graph. Collective."""
    with torch.no_grad():
        found: torch.Tensor = model(torch.eye(WIDTH)).t()
    return found


def train(model: Any, optimizer: Any, comm: Comm) -> None:
    """A step, taken once all ranks have freed what they gathered. Collective."""
    model(torch.ones(WIDTH)).sum().backward()
    comm.barrier()
    optimizer.step()
    optimizer.zero_grad()


def is_cast(model: Any) -> bool:
    """Whether the next forward casts the shard, all or nothing; it must see what that gives."""
    with Casts(torch.bfloat16) as casts:
        found = seen(model)
    assert torch.equal(found, full_value(model[0].weight).bfloat16())
    numel = model[0]._shard_unit.groups[0].layout.shard_numel
    assert casts.numel in (0, numel)
    return bool(casts.numel)


def _in_place(model: Any, comm: Comm) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)


def _through_data(model: Any, comm: Comm) -> None:
    model[0].weight.data.add_(1)


def _in_inference_mode(model: Any, comm: Comm) -> None:
    with torch.inference_mode():
        model[0].weight.add_(1)


def _through_numpy(model: Any, comm: Comm) -> None:
    model[0].weight.detach().to_local().numpy().fill(3)


def _through_local_data(model: Any, comm: Comm) -> None:
    model[0].weight.local.data.fill_(3)


def _over_a_group(model: Any, comm: Comm) -> None:
    comm.broadcast(model[0].weight.local, src=0)


def _loaded(model: Any, comm: Comm) -> None:
    model.load_state_dict({"0.weight": torch.full((WIDTH, WIDTH), 0.5)})


def _assigned(model: Any, comm: Comm) -> None:
    model[0].weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.25))


def _averaged(model: Any, comm: Comm) -> None:
    ema = EMA(model.named_parameters(), 0.5)
    _in_place(model, comm)
    ema.update()
    with ema.swapped_in():
        assert is_cast(model)


def _by_torch(model: Any, comm: Comm) -> None:
    train(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), comm)


def _by_muon(model: Any, comm: Comm) -> None:
    train(model, Muon(model.parameters(), lr=0.1), comm)


def _reshard(model: Any, comm: Comm) -> None:
    model[0].reshard()


CHANGES: list[Callable[[Any, Comm], None]] = [
    _in_place,
    _through_data,
    _in_inference_mode,
    _through_numpy,
    _through_local_data,
    _over_a_group,
    _loaded,
    _assigned,
    _averaged,
    _by_torch,
    _by_muon,
    _reshard,
]


def _change(comm: Comm, change: Callable[[Any, Comm], None]) -> None:
    model = layer(comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, comm)
    assert not is_cast(model)
    train(model, optimizer, comm)
    for _ in range(2):  # the second time, no step comes before it
        change(model, comm)
        assert is_cast(model)
        assert not is_cast(model)


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_after_a_step_is_cast_again(
    change: Callable[[Any, Comm], None],
) -> None:
    run_threads(_change, 2, change, shares_memory=True)


def _change_through_a_kept_piece(comm: Comm) -> None:
    model = layer(comm)
    piece = model[0].weight.detach().to_local().numpy()  # before anything was gathered
    optimizer = AdamW(model.parameters(), lr=0.1)
    for value in (1, 2, 3):
        train(model, optimizer, comm)
        piece.fill(value)
        assert is_cast(model)


def test_whoever_keeps_a_piece_may_write_it_after_each_step() -> None:
    run_threads(_change_through_a_kept_piece, 2, shares_memory=True)


def _load(comm: Comm, folder: Path) -> None:
    model = layer(comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    shard_ckpt.save({"model": model.state_dict()}, folder, comm=comm)
    before = full_value(model[0].weight)
    train(model, optimizer, comm)
    shard_ckpt.load({"model": model.state_dict()}, folder, comm=comm)
    assert torch.equal(full_value(model[0].weight), before)
    assert is_cast(model)
    train(model, optimizer, comm)
    assert not is_cast(model)  # a checkpoint takes no piece away


def test_a_checkpoint_that_is_loaded_is_cast(tmp_path: Path) -> None:
    run_threads(_load, 2, tmp_path / "saved", shares_memory=True)


def _cast_module(comm: Comm) -> None:
    model = layer(comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, comm)
    model.double().float()
    _in_place(model, comm)
    assert is_cast(model)
    train(model, AdamW(model.parameters(), lr=0.1), comm)
    assert not is_cast(model)


def test_a_module_that_was_cast_has_another_shard() -> None:
    run_threads(_cast_module, 2, shares_memory=True)


def _two_steps(comm: Comm) -> None:
    """Steps without a gather between them, of two optimizers that share the parameters."""
    model = layer(comm)
    optimizers = [AdamW(model.parameters(), lr=0.1), Lion(model.parameters(), lr=0.1)]
    optimizers.append(SGD(model.parameters(), lr=0.1))
    train(model, optimizers[0], comm)
    model(torch.ones(WIDTH)).sum().backward()
    comm.barrier()
    for optimizer in optimizers:
        optimizer.step()
    assert not is_cast(model)


def test_steps_in_a_row_are_followed() -> None:
    run_threads(_two_steps, 2, shares_memory=True)


def _wrapped(comm: Comm) -> None:
    model = layer(Recorded(Checked(comm)))
    train(model, AdamW(model.parameters(), lr=0.1), comm)
    assert not is_cast(model)


def _unlike(comm: Comm) -> None:
    """Only rank 0's step leaves the cast to the gather, and only it waits for the others there."""
    model = layer(Checked(comm))
    if comm.rank == 0:
        model[0].weight.to_local()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        train(model, optimizer, comm)
        assert is_cast(model) == (comm.rank == 0)


def test_ranks_may_differ_in_who_casts() -> None:
    run_threads(_unlike, 3, shares_memory=True)


def test_wrapped_comms_offer_it_too() -> None:
    run_threads(_wrapped, 2, shares_memory=True)


def _elsewhere(comm: Comm) -> None:
    model = layer(comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        train(model, optimizer, comm)
        assert is_cast(model)


@pytest.mark.parametrize("size", [1, 2])
def test_where_gathers_copy_they_cast(size: int) -> None:
    run_threads(_elsewhere, size)
    _elsewhere(SoloComm())


# --- readers ---


class _Slow(nn.Linear):
    """Stays in its forward, if told to, until the other rank has taken its step."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.hold: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hold is not None:
            assert self.hold.wait(30)
        return super().forward(x)


def _step_beside_a_forward(comm: Comm, stepped: threading.Event) -> None:
    """Rank 0 leaves its forward and takes a step while rank 1 still reads the parameters."""
    inner: Any = fully_shard(_Slow(), mesh=comm, mp_policy=BF16)
    model: Any = fully_shard(nn.Sequential(inner), mesh=comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(WIDTH)).sum().backward()
    comm.barrier()
    optimizer.step()  # gradients stay
    before = full_value(inner.weight).bfloat16()
    if comm.rank == 1:
        inner.hold = stepped
    found = model(torch.eye(WIDTH))
    if comm.rank == 0:
        with Casts(torch.bfloat16) as casts:
            optimizer.step()
        assert casts.numel == 0
        stepped.set()
    assert torch.equal(found.detach().t(), before)
    inner.hold = None
    comm.barrier()
    if comm.rank == 1:
        optimizer.step()
    assert not torch.equal(seen(model), before)
    assert torch.equal(seen(model), full_value(inner.weight).bfloat16())


def test_a_step_leaves_a_forward_of_another_rank_alone() -> None:
    run_threads(_step_beside_a_forward, 2, threading.Event(), shares_memory=True)


def _step_beside_a_gathered_unit(comm: Comm) -> None:
    """Rank 1 keeps what all gathered; only once it has freed it the others write again."""
    model = layer(comm)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(WIDTH)).sum().backward()
    comm.barrier()
    optimizer.step()
    full = model[0]._shard_unit.groups[0].full.data
    for reader in range(comm.size):
        model[0].unshard()
        before = full.clone()
        if comm.rank != reader:
            model[0].reshard()
        comm.barrier()
        with Casts(torch.bfloat16) as casts:
            optimizer.step()
        comm.barrier()
        assert casts.numel == 0
        if comm.rank == reader:
            assert torch.equal(full, before)
            model[0].reshard()
        comm.barrier()
        assert is_cast(model)


def test_a_step_leaves_what_another_rank_has_gathered_alone() -> None:
    run_threads(_step_beside_a_gathered_unit, 3, shares_memory=True)


def _keeping(comm: Comm, forward: bool, backward: bool) -> list[torch.Tensor]:
    """Two microbatches, the first of them unreduced, then a step; what each forward saw."""
    model = layer(comm, reshard_after_forward=forward)
    model[0].set_reshard_after_backward(backward)
    optimizer = AdamW(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        for last in (False, True):
            model.set_requires_gradient_sync(last)
            found.append(seen(model))
            assert torch.equal(found[-1], full_value(model[0].weight).bfloat16())
            model(torch.ones(WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
def test_what_is_kept_for_microbatches_is_gathered_again_after_the_step(
    forward: bool, backward: bool
) -> None:
    shared = run_threads(_keeping, 2, forward, backward, shares_memory=True)[0]
    copied = run_threads(_keeping, 2, forward, backward)[0]
    assert all(torch.equal(a, b) for a, b in zip(shared, copied, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(shared[::2], shared[1::2], strict=True))
    assert not torch.equal(shared[0], shared[2])


class _Failing(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise OSError("no more data")
        return super().forward(x)


def _step_after_an_error(comm: Comm) -> None:
    inner: Any = fully_shard(_Failing(), mesh=comm, mp_policy=BF16)
    model: Any = fully_shard(nn.Sequential(inner), mesh=comm, reshard_after_forward=True)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(WIDTH)).sum().backward()
    comm.barrier()
    for rank in range(comm.size):  # one after the other fails, inside of what all gathered
        inner.fails = comm.rank == rank
        try:
            model(torch.ones(WIDTH))
        except OSError:
            assert inner.fails
        inner.fails = False
        optimizer.step()  # while some are gone and some may still read
        comm.barrier()
        assert torch.equal(seen(model), full_value(inner.weight).bfloat16())


def test_a_step_after_a_forward_that_raised() -> None:
    run_threads(_step_after_an_error, 2, shares_memory=True)


# --- bits ---


def _train_decoder(comm: Comm, kind: str, hand_out: bool) -> tuple[list[float], int]:
    """Losses of a small decoder in mixed precision, and how much its forwards cast at last."""
    torch.manual_seed(0)
    model: Any = TinyDecoder()
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock), mp_policy=BF16)
    if hand_out:
        for param in model.parameters():
            param.to_local()  # so that nothing is ever lent
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer: Any = {"adamw": AdamW, "sgd": SGD, "lion": Lion}[kind](groups, lr=0.05)
    losses = []
    for batch in token_batches(6, comm.size):
        with Casts(torch.bfloat16) as casts:
            loss = model.loss(batch[comm.rank])
        losses.append(float(loss.detach()))
        loss.backward()
        comm.barrier()
        optimizer.step()
        optimizer.zero_grad()
    return losses, casts.numel


def _both(comm: Comm) -> None:
    for kind in ("adamw", "sgd", "lion"):
        losses, cast = _train_decoder(comm, kind, False)
        expected, cast_else = _train_decoder(comm, kind, True)
        assert losses == expected
        assert len(set(losses)) == 6
        assert cast == 0 < cast_else


@pytest.mark.parametrize("size", [2, 3])
def test_bits_are_those_of_a_cast_in_the_gather(size: int) -> None:
    run_threads(_both, size, shares_memory=True)


def test_between_processes() -> None:
    run_ranks(_between_processes, 2)


def _between_processes(comm: Comm) -> None:
    _both(comm)
    _step_beside_a_gathered_unit(comm)
    _change(comm, _through_numpy)
    _change(comm, _over_a_group)
