"""State that lives elsewhere: the same bits, a bounded window, and disks that are full."""

from __future__ import annotations

import copy
import os
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_optim import (
    SGD,
    SOAP,
    Adafactor,
    Adam,
    AdamW,
    AdamW8bit,
    Lion,
    Muon,
    Offload,
    Shampoo,
    ShardedOptimizer,
)
from shard_optim._homes import DiskHome
from shard_optim._plan import Lane, Run, cut_windows
from shard_optim._stage import PARTS, MappedStage, Move, Stage
from shard_optim._state_file import StateLost
from shard_testing import draw_steps, run_ranks, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]

SMALL_BYTES = 1 << 14
SHAPES: list[int | tuple[int, ...]] = [(70, 60), 5, (4, 3), 3001, ()]

KINDS: dict[str, Callable[..., Any]] = {
    "momentum": lambda p, **how: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, **how),
    "nesterov": lambda p, **how: SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
    "sgd": lambda p, **how: SGD(p, lr=0.1, **how),
    "adam": lambda p, **how: Adam(p, lr=0.1, weight_decay=0.1, **how),
    "adamw": lambda p, **how: AdamW(p, lr=0.1, **how),
    "kahan": lambda p, **how: AdamW(p, lr=0.1, rounding="kahan", **how),
    "stochastic": lambda p, **how: AdamW(p, lr=0.1, rounding="stochastic", **how),
    "lion": lambda p, **how: Lion(p, lr=0.1, **how),
    "adamw8bit": lambda p, **how: AdamW8bit(p, lr=0.1, **how),
    "adafactor": lambda p, **how: Adafactor(p, lr=0.1, **how),
    "muon": lambda p, **how: Muon(p, lr=0.1, **how),
    "soap": lambda p, **how: SOAP(p, lr=0.1, precondition_frequency=2, **how),
    "shampoo": lambda p, **how: Shampoo(p, lr=0.1, max_preconditioner_dim=40, **how),
}

TOGETHER = ("adamw8bit", "adafactor", "muon", "soap", "shampoo")
"""Those whose ranks talk to each other in a step."""


@pytest.fixture
def disk(tmp_path: Path) -> Offload:
    return Offload("disk", tmp_path, SMALL_BYTES)


def pieces(optimizer: Any) -> list[torch.Tensor]:
    """All state tensors but counters, as they lie."""
    return [
        value.local if isinstance(value, ShardTensor) else value
        for own in optimizer.state.values()
        for key, value in own.items()
        if key != "step"
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(
    make_params: MakeParams, give_grads: GiveGrads, disk: Offload, kind: str, dtype: torch.dtype
) -> None:
    """Parameters and state, with a gradient that comes late and one that fails to come."""
    values, steps = draw_steps(SHAPES, dtype, 4)
    grads: list[list[Any]] = [list(each) for each in steps]
    grads[0][1] = grads[0][3] = grads[2][0] = None
    make = KINDS[kind]

    def rank(comm: Comm, how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        params = make_params(comm, values)
        optimizer = make(params, offload=how)
        for step in grads:
            give_grads(params, step)
            optimizer.step()
        return [p.full_tensor().detach() for p in params], [m.clone() for m in pieces(optimizer)]

    for world_size in (1, 2, 4):
        found, wanted = (run_threads(rank, world_size, how) for how in (disk, None))
        for ours, theirs in zip(found, wanted, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))

    def build(params: Sequence[nn.Parameter], how: Any) -> Any:
        return make([(f"p{i}", param) for i, param in enumerate(params)], offload=how)

    plain, optimizer = take_steps(partial(build, how=disk), values, grads)
    same, _ = take_steps(partial(build, how=None), values, grads)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert bool(pieces(optimizer)) == (kind != "sgd")


class CopyStage(Stage):
    """Memory of its own, as a device has it; what was taken back is NaN or -1 there."""

    def __init__(self, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self._near = torch.empty(PARTS * self.part_bytes, dtype=torch.uint8)

    def _near_of(self, host: torch.Tensor, at: int) -> torch.Tensor:
        return self._near[at : at + host.nbytes].view(host.dtype)

    def _move(self, head: torch.Tensor, at: int, nbytes: int) -> Move:
        host = super()._move(head, at, nbytes).host
        return Move(host, host, self._near[at : at + nbytes])

    def _bring(self, moves: Sequence[Move]) -> None:
        for move in moves:
            move.near.copy_(move.host)

    def _take(self, moves: Sequence[Move]) -> None:
        for move in moves:
            move.host.copy_(move.near)
            move.near.fill_(255)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_where_state_is_copied(
    make_params: MakeParams,
    give_grads: GiveGrads,
    disk: Offload,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, worked on, and back: nothing is worked on where it lives."""
    monkeypatch.setattr(DiskHome, "_make_stage", lambda home, device, window: CopyStage(window))
    values, steps = draw_steps([(70, 60), (90, 80), 5, (4, 3), 3001, ()], torch.float32, 3)

    def rank(comm: Comm, how: Any) -> list[torch.Tensor]:
        params = make_params(comm, values)
        optimizer = KINDS[kind](params, offload=how)
        for step in steps:
            give_grads(params, step)
            optimizer.step()
        return [*(p.full_tensor().detach() for p in params), *map(torch.clone, pieces(optimizer))]

    for world_size in (1, 2):
        found, wanted = (run_threads(rank, world_size, how) for how in (disk, None))
        for ours, theirs in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["muon", "soap", "shampoo"])
def test_same_bits_of_matrices_whose_state_begins_anywhere(disk: Offload, kind: str) -> None:
    """On disk it lies side by side; products of what begins within a line have other bits."""
    values, steps = draw_steps([(1, 6), (5, 1), (9, 1), (1, 15)], torch.float32, 5)
    found, _ = take_steps(partial(KINDS[kind], offload=disk), values, steps)
    wanted, _ = take_steps(KINDS[kind], values, steps)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["muon", "soap", "shampoo"])
def test_same_bits_of_replicated_matrices(
    disk: Offload, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's own, copied there and back."""
    monkeypatch.setattr(DiskHome, "_make_stage", lambda home, device, window: CopyStage(window))
    values, steps = draw_steps([(70, 60), (9, 80), 5, (40, 30), (30, 40)], torch.float32, 3)

    def rank(comm: Comm, how: Any) -> list[torch.Tensor]:
        make = partial(KINDS[kind], comm=comm, offload=how)
        params, optimizer = take_steps(make, values, steps)
        return [*(p.detach() for p in params), *map(torch.clone, pieces(optimizer))]

    for world_size in (2, 4):
        found, wanted = (run_threads(rank, world_size, how) for how in (disk, None))
        for ours, theirs in zip(found, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_windows_are_cut_at_whole_vectors() -> None:
    runs = [Run([0], [0], 1200), Run([1], [0], 400)]
    spans = [[run.span for run in each] for each in cut_windows(runs, [300, 100], 140)]
    assert spans == [
        [slice(0, 128)],
        [slice(128, 256)],
        [slice(256, 300), slice(0, 64)],
        [slice(64, 100)],
    ]


def test_state_passes_through_many_windows_in_few_moves(disk: Offload) -> None:
    """A hundred parameters apart: their moments are read and written as one stretch each."""
    values, steps = draw_steps([50] * 100, torch.float32, 1)
    _, optimizer = take_steps(lambda p: AdamW(p, offload=disk), values, steps)
    (plan,) = optimizer._plans.values()
    windows = [lane.window for lane in plan.lanes]
    room = (SMALL_BYTES // 3 // 64 * 64 - 2 * 64) // 8
    assert len(windows) == -(-5000 // room) == 8
    assert all(len(window.moves) == 2 for window in windows)
    assert [window.part for window in windows] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert sum(move.host.nbytes for w in windows for move in w.moves) == 2 * 100 * 50 * 4


def test_on_the_cpu_host_memory_is_the_parameters_own() -> None:
    values, steps = draw_steps(SHAPES, torch.float32, 2)
    plain, _ = take_steps(AdamW, values, steps)
    same, optimizer = take_steps(lambda p: AdamW(p, offload="cpu"), values, steps)
    assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert [lane.window for plan in optimizer._plans.values() for lane in plan.lanes] == [None]


def test_nothing_is_left_in_the_folder(disk: Offload) -> None:
    values, steps = draw_steps([1000], torch.float32, 1)
    _, optimizer = take_steps(lambda p: AdamW(p, offload=disk), values, steps)
    assert os.listdir(disk.path) == []
    mapped = Path("/proc/self/maps").read_text()
    assert mapped.count(str(disk.path)) == 1  # both moments, one file
    for own in optimizer.state.values():
        own.clear()
    optimizer._plans.clear()
    assert str(disk.path) not in Path("/proc/self/maps").read_text()


def test_a_state_dict_shares_memory_with_the_files(disk: Offload) -> None:
    param = nn.Parameter(torch.zeros(5000))
    param.grad = torch.zeros(5000)
    optimizer = AdamW([("w", param)], lr=0.1, weight_decay=0, offload=disk)
    state = optimizer.state_dict(allocate=True)["state"]["w"]
    state["exp_avg"].fill_(1.0)
    state["exp_avg_sq"].fill_(4.0)
    state["step"].fill_(1000)
    optimizer.step()
    assert state["exp_avg"].eq(torch.tensor(0.9)).all()
    expected = -0.1 * 0.9 / (4.0 * 0.999 / (1 - 0.999**1001)) ** 0.5
    torch.testing.assert_close(param.detach(), torch.full((5000,), expected))


@pytest.mark.parametrize("kind", ["adamw", *TOGETHER])
def test_copies_and_strangers_state_move_to_files_of_their_own(disk: Offload, kind: str) -> None:
    """What a deep copy or a program put into memory is in a file after the next step."""
    values, steps = draw_steps([(70, 60), 500], torch.float32, 3)
    _, optimizer = take_steps(lambda p: KINDS[kind](p, offload=disk), values, steps[:2])
    plain, _ = take_steps(KINDS[kind], values, steps)
    twins = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    for each in (optimizer, *twins):
        params = each.param_groups[0]["params"]
        for param, grad in zip(params, steps[2], strict=True):
            param.grad = grad.clone()
            key = list(each.state[param])[-1]
            each.state[param][key] = each.state[param][key].clone()
        each.step()
        assert all(torch.equal(a, b) for a, b in zip(params, plain, strict=True))
        for param in params:
            for slot in each._slots_of(each.param_groups[0], param):
                value = each.state[param][slot.name]
                assert each._home.holds(value, param.device) == slot.moves
    addresses = {piece.data_ptr() for each in (optimizer, *twins) for piece in pieces(each)}
    assert len(addresses) == 3 * len(pieces(optimizer))


@pytest.mark.parametrize("kind", ["adamw", *TOGETHER])
def test_groups_added_later(disk: Offload, kind: str) -> None:
    values, steps = draw_steps([(50, 60), (20, 300)], torch.float32, 3)

    def train(how: Any) -> list[torch.Tensor]:
        params = [nn.Parameter(v.clone()) for v in values]
        optimizer = KINDS[kind](params[:1], offload=how)
        for number, grads in enumerate(steps):
            if number == 1:
                optimizer.add_param_group({"params": params[1:], "lr": 0.3})
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        return [p.detach() for p in params]

    assert all(torch.equal(a, b) for a, b in zip(train(disk), train(None), strict=True))


@pytest.mark.parametrize("kinds", [(AdamW, AdamW8bit), (AdamW8bit, AdamW)])
def test_moments_and_codes_that_are_both_on_disk(
    make_params: MakeParams, give_grads: GiveGrads, disk: Offload, kinds: Sequence[Any]
) -> None:
    values, steps = draw_steps([(70, 60)], torch.float32, 2)

    def rank(comm: Comm, how: Any) -> torch.Tensor:
        params = make_params(comm, values)
        first, second = (kind(params, lr=0.1, offload=how) for kind in kinds)
        give_grads(params, steps[0])
        first.step()
        second.load_state_dict(first.state_dict())
        give_grads(params, steps[1])
        second.step()
        return params[0].full_tensor().detach()

    for world_size in (1, 2):
        found, wanted = (run_threads(rank, world_size, how)[0] for how in (disk, None))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("world_size", [1, 3])
def test_replicated_parameters(disk: Offload, world_size: int) -> None:
    values, steps = draw_steps(SHAPES, torch.float32, 3)
    expected, _ = take_steps(AdamW, values, steps)

    def rank(comm: Comm) -> list[torch.Tensor]:
        make = lambda p: ShardedOptimizer(p, AdamW, comm=comm, offload=disk)  # noqa: E731
        params, optimizer = take_steps(make, values, steps)
        held = sum(piece.nbytes for piece in pieces(optimizer))
        assert held <= 2 * 4 * (sum(v.numel() for v in values) // world_size + 16)
        return [p.detach() for p in params]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Let no file grow beyond 10,000 bytes, until the returned function is called."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))

    def lift() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    yield lift
    lift()


def test_a_full_disk_is_named_and_nothing_changes(
    disk: Offload, small_files: Callable[[], None]
) -> None:
    params = [nn.Parameter(torch.ones(5000)), nn.Parameter(torch.ones(10))]
    optimizer = AdamW(params, lr=0.1, weight_decay=0, offload=disk)
    for param in params:
        param.grad = torch.ones_like(param)
    message = rf"a file of 40080 bytes of state in '{disk.path}', got .*; nothing was changed"
    with pytest.raises(OSError, match=message):
        optimizer.step()
    assert all(param.eq(1).all() for param in params)
    assert optimizer.state_dict()["state"] == {}
    with pytest.raises(OSError, match=message):
        optimizer.state_dict(allocate=True)
    small_files()
    optimizer.step()
    assert all(torch.allclose(param, torch.tensor(0.9)) for param in params)
    assert [float(own["step"]) for own in optimizer.state.values()] == [1, 1]


def test_a_disk_that_fails_is_named_instead_of_ending_the_process(disk: Offload) -> None:
    """Pages behind the end of a file, which cannot be touched."""
    param = nn.Parameter(torch.ones(20_000))
    param.grad = torch.ones(20_000)
    optimizer = AdamW([param], offload=disk)
    optimizer.step()
    for entry in Path("/proc/self/map_files").iterdir():
        if str(disk.path) in os.readlink(entry):
            os.truncate(entry, 4096)
    with pytest.raises(RuntimeError, match=rf"bytes of state in '{disk.path}' cannot be read or"):
        optimizer.step()


def test_a_failed_read_ends_the_step(disk: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread goes on behind the error, and the next step is not stuck."""
    params = [nn.Parameter(torch.ones(20_000))]
    params[0].grad = torch.ones(20_000)
    optimizer = AdamW(params, offload=disk)
    optimizer.step()
    calls = []

    def broken(self: MappedStage, moves: Any) -> None:
        calls.append(len(moves))
        if len(calls) == 5:
            raise RuntimeError("offload: gone")
        bring(self, moves)

    bring = MappedStage._bring
    monkeypatch.setattr(MappedStage, "_bring", broken)
    with pytest.raises(RuntimeError, match="offload: gone"):
        optimizer.step()
    assert len(calls) == 5
    optimizer.step()
    assert len(calls) == 5 + -(-20_000 // 640)


def test_an_update_that_fails_waits_for_its_transfers(
    disk: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [nn.Parameter(torch.ones(20_000))]
    params[0].grad = torch.ones(20_000)
    optimizer = AdamW(params, offload=disk)
    release = Event()
    ended: list[int] = []
    bring = MappedStage._bring

    def slow(self: MappedStage, moves: Any) -> None:
        if ended:  # the second one, which goes on after the update has failed
            release.wait(60)
            for _ in range(300):
                bring(self, moves)
        bring(self, moves)
        ended.append(len(moves))

    def failing(lane: Lane, grads: Any, job: Any) -> None:
        release.set()
        raise ZeroDivisionError

    monkeypatch.setattr(MappedStage, "_bring", slow)
    monkeypatch.setattr(optimizer, "_update", failing)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert ended == [2, 2]


@pytest.mark.parametrize("kind", TOGETHER)
def test_a_full_disk_of_one_rank_stops_all(
    make_params: MakeParams,
    give_grads: GiveGrads,
    disk: Offload,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, steps = draw_steps([(70, 60), 5000], torch.float32, 1)

    def rank(comm: Comm) -> None:
        params = make_params(comm, values)
        optimizer = KINDS[kind](params, offload=disk)
        give_grads(params, steps[0])
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(optimizer._home, "zeros", _full)
            expected = OSError if comm.rank == 1 else ValueError
            message = "^.*no room$" if comm.rank == 1 else "^another rank refused this step"
            with pytest.raises(expected, match=message):
                optimizer.step()
        for param, value in zip(params, values, strict=True):
            assert torch.equal(param.full_tensor(), value)
        optimizer.step()
        assert all(float(own["step"]) == 1 for own in optimizer.state.values())
        assert not torch.equal(params[0].full_tensor(), values[0])

    run_threads(rank, 2)


def _full(*_: Any) -> list[torch.Tensor]:
    raise OSError(28, "no room")


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("call", [0, 1])
def test_state_that_one_rank_has_lost_ends_the_step_of_all(
    make_params: MakeParams,
    give_grads: GiveGrads,
    disk: Offload,
    kind: str,
    call: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """None of them waits for the other, and the next step is not stuck.

    What becomes of a matrix without its state is NaN; matrices are the first to be read.
    """
    values, steps = draw_steps([(70, 60), (60, 70), 5000], torch.float32, 2)

    def rank(comm: Comm) -> None:
        params = make_params(comm, values)
        optimizer = KINDS[kind](params, offload=disk)
        give_grads(params, steps[0])
        optimizer.step()
        give_grads(params, steps[1])
        bring, calls = optimizer._home._files.bring, iter(range(1000))

        def failing(tensor: torch.Tensor) -> None:
            if next(calls) == call:
                raise StateLost("offload: gone")
            bring(tensor)

        if comm.rank == 1:
            monkeypatch.setattr(optimizer._home._files, "bring", failing)
        message = "gone" if comm.rank == 1 else r"another rank has lost state; .* \(rank 0 of 2\)"
        with pytest.raises(RuntimeError, match=f"^offload: {message}"):
            optimizer.step()
        if call == 0 and kind in ("muon", "soap", "shampoo"):
            assert any(bool(param.full_tensor().isnan().any()) for param in params[:2])
        optimizer.step()
        assert all(float(own["step"]) == 3 for own in optimizer.state.values())

    run_threads(rank, 2)


def test_codes_come_in_whole_blocks(disk: Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the window has room for 2656 of both codes, which is ten blocks and a bit."""
    values, steps = draw_steps([6000], torch.float32, 2)
    seen: list[list[int]] = []
    window = MappedStage.window

    def noted(self: MappedStage, number: int, columns: Any) -> Any:
        seen.append([column.numel() for (column,) in columns])
        return window(self, number, columns)

    _, optimizer = take_steps(lambda p: AdamW8bit(p, offload=disk), values, steps[:1])
    monkeypatch.setattr(MappedStage, "window", noted)
    optimizer.step()
    assert seen == [[2560, 2560], [2560, 2560], [880, 880]]


def test_the_next_matrix_is_read_while_one_is_worked_on(
    disk: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of each is one stretch of the file."""
    values, steps = draw_steps([(8, 6)] * 5, torch.float32, 2)
    _, optimizer = take_steps(lambda p: SOAP(p, offload=disk), values, steps[:1])
    brought = [Event() for _ in values]
    lengths: list[list[int]] = []
    taken: list[list[int]] = []
    bring, take, solve = MappedStage._bring, MappedStage._take, SOAP._solve
    solved: list[bool] = []

    def noted(self: MappedStage, moves: Any) -> None:
        bring(self, moves)
        lengths.append([move.host.nbytes for move in moves])
        brought[len(lengths) - 1].set()

    def back(self: MappedStage, moves: Any) -> None:
        take(self, moves)
        taken.append([move.host.nbytes for move in moves])

    def waiting(self: SOAP, *args: Any) -> torch.Tensor:
        coming = brought[min(len(solved) + 1, len(brought) - 1)]
        solved.append(coming.wait(60))
        return solve(self, *args)

    monkeypatch.setattr(MappedStage, "_bring", noted)
    monkeypatch.setattr(MappedStage, "_take", back)
    monkeypatch.setattr(SOAP, "_solve", waiting)
    optimizer.step()
    assert solved == [True] * 5
    assert lengths == taken == [[4 * 2 * (8 * 6 + 8 * 8 + 6 * 6)]] * 5


def test_a_step_holds_the_state_of_three_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 MiB of state of 24 matrices, of which pages of 2 MiB are brought, counted by the system.

    Each matrix has 1.5 MiB, which may lie on parts of two pages more.
    """
    mapped: list[int] = []
    solve = SOAP._solve

    def counting(self: SOAP, *args: Any) -> torch.Tensor:
        mapped.append(_mapped_bytes(tmp_path))
        return solve(self, *args)

    monkeypatch.setattr(SOAP, "_solve", counting)
    values, steps = draw_steps([(512, 256)] * 24, torch.float32, 2)
    offload = Offload("disk", tmp_path, SMALL_BYTES)
    _, optimizer = take_steps(
        lambda p: SOAP(p, max_preconditioner_dim=256, offload=offload), values, steps
    )
    each = 4 * 2 * (512 * 256 + 256 * 256)
    assert sum(piece.nbytes for piece in pieces(optimizer)) == 24 * each
    assert len(mapped) == 48
    assert each <= max(mapped) <= 3 * (each + (4 << 20)) < 24 * each
    assert _mapped_bytes(tmp_path) == 0


def _mapped_bytes(folder: Path) -> int:
    """Bytes of files of a folder that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = str(folder) in line
        elif ours and head[0] == "Rss:":
            total += int(head[1]) << 10
    return total


def _resident_bytes(which: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which):
            return int(line.split()[1]) << 10
    raise AssertionError(which)


def _peak_of_a_step(comm: Comm, folder: str, numel: int, window_bytes: int) -> list[int]:
    """How much memory grows in steps at most; and bytes mapped after a step, a look, a step."""
    param = nn.Parameter(torch.ones(numel))
    param.grad = torch.ones(numel)
    optimizer = AdamW([param], offload=Offload("disk", folder, window_bytes))
    small = nn.Parameter(torch.ones(10))
    small.grad = torch.ones(10)
    AdamW([small], offload=Offload("disk", folder)).step()  # threads, and code that is paged in
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    for _ in range(3):
        optimizer.step()
    grown = _resident_bytes("VmHWM") - before
    stepped = _mapped_bytes(Path(folder))
    assert float(optimizer.state[param]["exp_avg"].sum()) > 0
    looked = _mapped_bytes(Path(folder))
    optimizer.step()
    return [grown, stepped, looked, _mapped_bytes(Path(folder))]


@pytest.mark.parametrize(("window_mib", "edges_mib"), [(6, 24), (48, 0)])
def test_a_step_holds_no_more_than_its_window(
    tmp_path: Path, window_mib: int, edges_mib: int
) -> None:
    """128 MiB of state: counted by the system, in a process of its own."""
    numel = 1 << 24
    ((grown, *mapped),) = run_ranks(_peak_of_a_step, 1, str(tmp_path), numel, window_mib << 20)
    assert 3 << 20 <= grown <= (window_mib + edges_mib + 3) << 20
    assert mapped[0] == mapped[2] == 0
    assert 4 * numel <= mapped[1] <= 4 * numel + (4 << 20)


def test_bad_input(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"^offload: expected one of \('cpu', 'disk'\) or None"):
        AdamW([param], offload="gpu")
    with pytest.raises(ValueError, match=r"^offload: expected a folder, got '.*/nowhere'"):
        Offload("disk", tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"^offload: expected window_bytes >= 16384, got 100"):
        Offload("disk", tmp_path, window_bytes=100)
    wrong: Any = "1M"
    with pytest.raises(TypeError, match=r"^offload: expected window_bytes to be an int.* got '1M'"):
        Offload("disk", tmp_path, window_bytes=wrong)
    with pytest.raises(ValueError, match=r"^offload: a folder is for 'disk'"):
        Offload("cpu", tmp_path)
    with pytest.raises(TypeError, match="offload"):
        ShardedOptimizer([param], torch.optim.AdamW, comm=SoloComm(), offload="disk")
