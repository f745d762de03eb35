"""Bytes held per rank at the worst moment of a step."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from shard_ckpt import load, save
from shard_comm import Comm, GroupComm, Recorded, Work
from shard_flat import ShardTensor, shard_tensor
from shard_fsdp import fully_shard
from shard_optim import AdamW, Offload
from shard_testing import run_ranks
from shard_wrap import by_class

WIDTH, UNITS = 96, 8
UNIT_BYTES = WIDTH * WIDTH * 4
DEADLINE_S = 10.0
SLACK_BYTES = UNIT_BYTES // 8  # activations of one row, alignment, flags


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def _tensors() -> list[torch.Tensor]:
    return [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]


def held_bytes() -> int:
    """Bytes of all tensor storages alive in this process."""
    sizes: dict[int, int] = {}
    for found in _tensors():
        storage = found.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    sizes.pop(0, None)
    return sum(sizes.values())


def settled_bytes() -> int:
    """Bytes held once other threads have let go of what they are done with.

    A thread of Gloo holds the tensors of a collective for a moment after everyone waited for it.
    Nothing in Python refers to them then. What is still held after a while counts.
    """
    gc.collect()
    tensors = _tensors()
    named = [t for t in tensors if any(r is not tensors for r in gc.get_referrers(t))]
    # A slot of a class is not looked into.
    named += [t.local for t in gc.get_objects() if isinstance(t, ShardTensor)]
    places = {t.untyped_storage().data_ptr() for t in named}
    ends: list[threading.Event] = []
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() not in places:
            ends.append(threading.Event())
            weakref.finalize(tensor, ends[-1].set)
    del tensors, tensor, named
    for end in ends:
        end.wait(DEADLINE_S)
    return held_bytes()


class _Watch(Recorded):
    """Looks at the bytes held whenever a collective begins, and when it has ended."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.watching = False
        self.peak_bytes = 0

    def look(self) -> None:
        if self.watching:
            self.peak_bytes = max(self.peak_bytes, held_bytes())

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        return self._watched(super()._all_gather(out, inp, timeout_s))

    def _reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: str, timeout_s: float | None
    ) -> Work:
        return self._watched(super()._reduce_scatter(out, inp, op, timeout_s))

    def _watched(self, work: Work) -> Work:
        self.look()

        def finish() -> None:
            work.wait()
            self.look()

        return Work(finish)


def _over_gloo(comm: Comm) -> Comm:
    return GroupComm() if comm.size > 1 else comm


def _peak(comm: Comm) -> int:
    gc.freeze()  # what torch made at import is no concern here and slow to look through
    model = nn.Sequential(*(_Layer() for _ in range(UNITS)))
    watch = _Watch(_over_gloo(comm))
    fully_shard(model, mesh=watch, policy=by_class(_Layer), reshard_after_forward=True)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    watch.watching = True
    model(x).sum().backward()
    optimizer.step()
    watch.look()
    return watch.peak_bytes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_peak_is_a_share_of_everything_plus_two_units(world_size: int) -> None:
    states = 4 * UNITS * UNIT_BYTES // world_size  # parameters, gradients, two moments
    # Weights and gradients of two units, and the buffer that Gloo receives one unit's gradients
    # in. On one rank the shard is the full buffer and gradients stay where they appear.
    two_units = 2 * (UNIT_BYTES + UNIT_BYTES) + UNIT_BYTES if world_size > 1 else 0
    for peak in run_ranks(_peak, world_size):
        assert states <= peak <= states + two_units + SLACK_BYTES


def _after(comm: Comm, steps: int) -> int:
    gc.freeze()
    model = nn.Sequential(*(_Layer() for _ in range(UNITS)))
    mesh = _over_gloo(comm)
    fully_shard(model, mesh=mesh, policy=by_class(_Layer), reshard_after_forward=True)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    held = settled_bytes()
    assert model is not None
    return held


def test_nothing_full_size_is_held_between_steps_and_nothing_grows() -> None:
    short, long = run_ranks(_after, 2, 3), run_ranks(_after, 2, 30)
    share = 3 * UNITS * UNIT_BYTES // 2  # parameters and two moments
    for a, b in zip(short, long, strict=True):
        assert a == b
        assert share <= a <= share + SLACK_BYTES


def _private_bytes() -> int:
    """Bytes that this process may write to and shares with no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmData")


def _checkpoint_within(comm: Comm, folder: str, numel: int, slack_bytes: int) -> list[float]:
    """Save and load offloaded moments while only so much more memory may be had."""
    offload = Offload("disk", folder, 1 << 20)
    weight = nn.Parameter(shard_tensor(torch.zeros(numel), comm=comm, name="w"))
    weight.grad = torch.ones_like(weight)
    optimizer, resumed = (AdamW([weight], offload=offload) for _ in range(2))
    optimizer.step()
    save({"small": {"w": torch.ones(9)}}, Path(folder) / "warm", comm=comm)  # starts threads
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + slack_bytes, before[1]))
    try:
        with pytest.raises(RuntimeError, match="allocate"):
            torch.ones(2 * numel // comm.size)
        save({"optim": optimizer.state_dict()}, Path(folder) / "there", comm=comm)
        template = resumed.state_dict(allocate=True)
        found = load({"optim": template}, Path(folder) / "there", comm=comm)
        resumed.load_state_dict(found["optim"])
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    own = resumed.state[weight]
    return [float(own[slot].sum() / numel) for slot in ("exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_of_offloaded_state_holds_none_of_it(tmp_path: Path, world_size: int) -> None:
    """Moments of 128 MiB on each rank, with 64 MiB to be had."""
    numel = world_size << 24
    for found in run_ranks(_checkpoint_within, world_size, str(tmp_path), numel, 64 << 20):
        assert found == pytest.approx([0.1, 0.001], rel=1e-4)
