"""What a program may put in place of a unit's collectives."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from shard_comm import Comm, GroupComm, Recorded, SoloComm, Work
from shard_fsdp import FSDPModule, fully_shard
from shard_testing import logged, run_ranks, run_threads


class _Noted:
    """A custom collective that notes its calls and the memory that it gave."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.given: list[torch.Tensor] = []

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.given.append(torch.full(tuple(size), float("nan"), dtype=dtype, device=device))
        return self.given[-1]

    def _note(self, out: torch.Tensor, inp: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.calls.append((out.numel(), inp.numel(), dist.get_world_size(group)))


class _Gather(_Noted):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._note(output_tensor, input_tensor, group)
        parts = list(output_tensor.chunk(dist.get_world_size(group)))
        work: dist.Work | None = dist.all_gather(parts, input_tensor, group, async_op)
        return work


class _Reduce(_Noted):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._note(output_tensor, input_tensor, group)
        assert op == dist.ReduceOp.SUM
        dist.all_reduce(input_tensor, group=group)  # waits, so there is no work to return
        mine = input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        output_tensor.copy_(mine)
        return None


def _model(mesh: Any, **kwargs: Any) -> Any:
    model: Any = nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(24.0).view(6, 4))
    return fully_shard(model, mesh=mesh, reshard_after_forward=True, **kwargs)


def _step(comm: Comm, model: Any) -> torch.Tensor:
    x = torch.full((1, 4), comm.rank + 1.0)
    (model(x).sum()).backward()
    grad: torch.Tensor = model.weight.grad.full_tensor()
    return grad


def _custom(comm: Comm) -> None:
    model = _model(comm)
    gather, reduce = _Gather(), _Reduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    assert _step(comm, model).tolist() == [[1.5] * 4] * 6
    assert gather.calls == [(24, 12, 2)] * 2  # for forward and for backward
    assert reduce.calls == [(12, 24, 2)]
    assert [t.numel() for t in reduce.given] == [24, 12]
    out = model(torch.ones(1, 4))
    assert out.tolist() == [[6.0, 22.0, 38.0, 54.0, 70.0, 86.0]]
    with pytest.raises(ValueError, match="custom collectives are set"):
        model.set_allocate_memory_from_process_group_for_comm(True)


def _on_gloo(same_ranks: Comm) -> None:
    comm = GroupComm()
    model = _model(comm)
    with logged("shard_fsdp", level=logging.INFO) as records:
        for enable in (True, False):
            model.set_allocate_memory_from_process_group_for_comm(enable)
            assert model._shard_unit.settings.all_gather is None
    assert ["no allocator of its own" in r for r in records] == [True]
    assert _step(comm, model).tolist() == [[1.5] * 4] * 6


class _Pool:
    """Stands for a backend with an allocator, as NCCL's is."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return True

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.sizes.append(numel)
        return torch.empty(numel, dtype=dtype, device=device)


def _from_group(same_ranks: Comm) -> None:
    pool, comm = _Pool(), GroupComm()
    real = comm.group._get_backend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(comm.group), "_get_backend", lambda self, device: pool)
        model = _model(comm)
        model.set_allocate_memory_from_process_group_for_comm(True)
    assert id(real(torch.device("cpu"))) != id(pool)
    assert _step(comm, model).tolist() == [[1.5] * 4] * 6
    assert sorted(pool.sizes) == [12, 24, 24, 24]
    model.set_allocate_memory_from_process_group_for_comm(False)
    _step(comm, model)
    assert len(pool.sizes) == 4


def _everything(comm: Comm) -> None:
    for check in (_custom, _on_gloo, _from_group):
        check(comm)
        comm.barrier()


def test_custom_collectives_are_called() -> None:
    run_ranks(_everything, 2)


def _separate(comm: Comm) -> None:
    first, second = Recorded(comm), Recorded(comm)
    layers = [_model(first), _model(first), _model(second)]
    root: Any = fully_shard(nn.Sequential(nn.Identity(), *layers), mesh=first)
    root.set_separate_reduce_scatter_group()
    comms = [layer._shard_unit.settings.reduce_comm for layer in layers]
    assert comms[0] is comms[1] is not comms[2]
    assert comms[0] is not first
    root.set_separate_reduce_scatter_group()  # again: nothing new
    assert layers[0]._shard_unit.settings.reduce_comm is comms[0]
    assert _step(comm, layers[0]).tolist() == [[1.5] * 4] * 6
    assert comms[0].records["reduce_scatter"].calls == 1
    assert first.records["reduce_scatter"].calls == 0
    layers[0].set_separate_reduce_scatter_group(False, recurse=False)
    _step(comm, layers[0])
    assert first.records["reduce_scatter"].calls == 1
    assert layers[1]._shard_unit.settings.reduce_comm is comms[0]
    with pytest.raises(ValueError, match="need a comm with a process group of its own"):
        layers[0].set_custom_all_gather(_Gather())


def test_reductions_may_have_a_group_of_their_own() -> None:
    run_threads(_separate, 2)


class _Together(Recorded):
    """Notes where collectives that are to start together begin, and where they end."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.log: list[str] = []

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        self.log.append("begin")
        with super().coalesced():
            yield
        self.log.append("end")

    def _all_gather(self, out: torch.Tensor, inp: torch.Tensor, timeout_s: float | None) -> Work:
        self.log.append(f"gather {inp.dtype}")
        return super()._all_gather(out, inp, timeout_s)


def _gather_together(comm: Comm) -> None:
    """A unit with parameters of two dtypes has two groups, gathered in one launch."""
    together = _Together(comm)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    fully_shard(model, mesh=together)
    assert isinstance(model, FSDPModule)
    together.log.clear()
    model.unshard()
    gathers = together.log[1:-1]
    assert [together.log[0], together.log[-1]] == ["begin", "end"]
    assert sorted(gathers) == ["gather torch.bfloat16", "gather torch.float32"]


def test_groups_of_a_unit_are_gathered_in_one_launch() -> None:
    run_threads(_gather_together, 2)


def test_one_rank_calls_nobody() -> None:
    model = _model(SoloComm())
    gather, reduce = _Gather(), _Reduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    assert _step(SoloComm(), model).tolist() == [[1.0] * 4] * 6
    assert gather.given == reduce.given == []
    for bad in (None, print, object()):
        with pytest.raises(TypeError, match="callable with a method allocate"):
            model.set_custom_all_gather(bad)


def test_symmetric_memory_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"set_symm_mem_for_comm.*set_custom_all_gather"):
        _model(SoloComm()).set_symm_mem_for_comm()


def test_the_event_is_waited_for() -> None:
    waits: list[int] = []

    class Event:
        def wait(self) -> None:
            waits.append(1)

    _model(SoloComm()).set_post_optim_event(Event())
    assert waits == [1]


def test_the_old_name_of_the_divide_factor() -> None:
    model = _model(SoloComm())
    with pytest.warns(DeprecationWarning, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(4.0)
    assert _step(SoloComm(), model).tolist() == [[0.25] * 4] * 6


def test_every_public_name_of_torch_is_ours() -> None:
    theirs = {
        name: getattr(torch_fsdp.FSDPModule, name)
        for name in dir(torch_fsdp.FSDPModule)
        if not name.startswith("_")
    }
    assert {"unshard", "reshard", "set_requires_gradient_sync"} <= set(theirs)
    for name, method in theirs.items():
        wanted = inspect.signature(method).parameters
        ours = inspect.signature(getattr(FSDPModule, name)).parameters
        assert list(wanted) == list(ours), name
        for mine, other in zip(ours.values(), wanted.values(), strict=True):
            assert (mine.kind, mine.default) == (other.kind, other.default), (name, mine)
    wanted = inspect.signature(torch_fsdp.fully_shard).parameters
    ours = inspect.signature(fully_shard).parameters
    assert [n for n in ours if n in wanted] == list(wanted)
    assert all(ours[n].kind == wanted[n].kind for n in wanted)
