"""What a ShardTensor is: its kinds, shapes, memory, copies and text."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shard_flat import ParamSpec, Ragged, ShardSpec, ShardTensor, plan_layout, shard_tensor

Silent = Callable[[int, int], Any]
FULL = torch.arange(15.0).view(3, 5)


def weight(comm: Any, *, requires_grad: bool = True) -> Any:
    """``w``, 3x5, of which rank 0 of 2 holds elements 0 to 8 and rank 1 the other seven."""
    param = nn.Parameter(shard_tensor(FULL, comm=comm, name="w"), requires_grad)
    assert isinstance(param, ShardTensor)
    return param


def test_it_is_a_parameter_and_a_dtensor(silent: Silent) -> None:
    param = weight(silent(0, 2))
    assert isinstance(param, nn.Parameter)
    assert isinstance(param, DTensor)
    assert param.requires_grad
    assert param.is_leaf
    assert not weight(silent(0, 2), requires_grad=False).requires_grad


def test_shapes_are_global_and_the_piece_is_local(silent: Silent) -> None:
    first, second = (weight(silent(rank, 2)) for rank in (0, 1))
    for param in (first, second):
        assert (param.shape, param.ndim, param.numel(), len(param)) == ((3, 5), 2, 15, 3)
        assert (param.stride(), param.is_contiguous()) == ((5, 1), True)
        assert param.dtype == torch.float32
    assert first.local.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert second.local.tolist() == [8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]
    assert second.spec == ShardSpec("w", (3, 5), 8, 15, 0, 8)
    assert second.comm.rank == 1


def test_weight_decay_by_ndim_groups_alike_before_and_after(silent: Silent) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    plain = dict(model.named_parameters())
    scalar = nn.Parameter(torch.tensor(1.0))
    plain["scale"] = scalar
    for rank in range(4):
        sharded = {n: shard_tensor(p, comm=silent(rank, 4), name=n) for n, p in plain.items()}
        decayed = [name for name, p in sharded.items() if p.ndim >= 2]
        assert decayed == ["0.weight", "1.weight", "3.weight"]
        assert decayed == [name for name, p in plain.items() if p.ndim >= 2]


def test_placement_and_mesh_say_what_is_held(silent: Silent) -> None:
    comm = silent(1, 2)
    param = weight(comm)
    assert param.placements == (Ragged(8, 15),)
    assert isinstance(param.device_mesh, DeviceMesh)
    coordinate = param.device_mesh.get_coordinate()
    assert coordinate is not None
    assert (param.device_mesh.size(), list(coordinate)) == (2, [1])
    assert weight(comm).device_mesh is param.device_mesh
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=1)
    given = ShardTensor(torch.zeros(7), param.spec, comm=comm, mesh=mesh)
    assert given.device_mesh is mesh


def test_local_memory_is_shared_not_copied(silent: Silent) -> None:
    shard = torch.zeros(8)
    param = nn.Parameter(
        ShardTensor(shard[1:4], ShardSpec("b", (3,), 0, 3, 1, 8), comm=silent(0, 2))
    )
    with torch.no_grad():
        param.add_(2)
    assert shard.tolist() == [0.0, 2.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    shard.fill_(7)
    assert isinstance(param, ShardTensor)
    assert param.local.tolist() == [7.0, 7.0, 7.0]
    assert param.to_local().data_ptr() == shard.data_ptr() + 4


def test_shard_tensor_copies_and_keeps_requires_grad(silent: Silent) -> None:
    full = FULL.clone().requires_grad_()
    cut = shard_tensor(full, comm=silent(0, 2))
    assert (cut.requires_grad, cut.is_leaf, cut.spec.name) == (True, True, "tensor")
    with torch.no_grad():
        full.zero_()
    assert cut.local[1] == 1.0
    assert not shard_tensor(FULL, comm=silent(0, 2)).requires_grad
    transposed = shard_tensor(FULL.t(), comm=silent(0, 2))
    assert transposed.local.tolist() == [0.0, 5.0, 10.0, 1.0, 6.0, 11.0, 2.0, 7.0]


def test_ranks_without_elements(silent: Silent) -> None:
    """16 bytes hold three elements of a scalar, a vector and nothing: rank 1 gets none."""
    for full in (torch.tensor(3.0), torch.ones(3), torch.ones(0, 4)):
        last = shard_tensor(full, comm=silent(1, 2), name="x")
        assert (last.local.shape, last.shape) == ((0,), full.shape)
        assert last.local.numel() == last.spec.stop - last.spec.start == 0


def test_pieces_of_the_wrong_size_are_refused(silent: Silent) -> None:
    param = weight(silent(1, 2))
    with pytest.raises(ValueError, match=r"w: expected a piece of shape \(7,\), got \(8,\) \(rank"):
        ShardTensor(torch.zeros(8), param.spec, comm=param.comm)
    with pytest.raises(ValueError, match=r"w: expected a piece of shape \(7,\), got \(6,\)"):
        param.like(torch.zeros(6))
    with pytest.raises(ValueError, match=r"w: expected a piece of shape \(7,\), got \(\)"):
        param.like(torch.tensor(0.0))


def test_a_range_that_belongs_to_another_rank_is_refused(silent: Silent) -> None:
    theirs = weight(silent(1, 2)).spec
    with pytest.raises(ValueError, match=r"w: expected the range \[8, 15\), .* give \(0, 8\)"):
        ShardTensor(torch.zeros(7), theirs, comm=silent(0, 2))


def test_a_sharded_piece_is_refused(silent: Silent) -> None:
    row = shard_tensor(torch.zeros(7), comm=silent(0, 1), name="row")
    with pytest.raises(TypeError, match="w: expected a plain piece"):
        ShardTensor(row, weight(silent(1, 2)).spec, comm=silent(1, 2))


def test_like_takes_another_dtype(silent: Silent) -> None:
    param = weight(silent(0, 2))
    cast = param.like(torch.ones(8, dtype=torch.bfloat16))
    assert (cast.dtype, cast.shape, cast.placements) == (torch.bfloat16, (3, 5), (Ragged(0, 8),))
    assert not cast.requires_grad
    assert param.like(torch.ones(8)).dtype == torch.float32


def test_text(silent: Silent) -> None:
    param = weight(silent(1, 2))
    text = "ShardTensor('w', shape=(3, 5), range=[8, 15), rank=1 of 2, dtype=torch.float32)"
    assert repr(param) == str(param) == f"{param}" == text
    assert repr([param.detach()]) == f"[{text}]"
    with pytest.raises(TypeError, match="unsupported format string"):
        format(param, ".3f")
    module = nn.Module()
    module.register_parameter("w", param)
    assert text in str(module.state_dict())


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy, lambda p: torch.save(p, io.BytesIO())])
def test_it_does_not_pickle(write: Callable[[Any], Any], silent: Silent) -> None:
    message = r"w: a ShardTensor holds its communicator and does not pickle; .* full_tensor\(\)"
    with pytest.raises(TypeError, match=message):
        write(weight(silent(0, 2)))


def test_deepcopy_makes_a_tensor_of_its_own(silent: Silent) -> None:
    param = weight(silent(0, 2))
    param.grad = shard_tensor(FULL * 2, comm=param.comm, name="w")
    twin = copy.deepcopy(param)
    assert (twin.spec, twin.requires_grad, twin.is_leaf) == (param.spec, True, True)
    assert twin.comm is param.comm
    with torch.no_grad():
        twin.zero_()
    assert param.local[1] == 1.0
    assert isinstance(twin.grad, ShardTensor)
    assert twin.grad is not param.grad
    assert twin.grad.local.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    assert isinstance(twin, nn.Parameter)
    plain = copy.deepcopy(param.detach())
    assert not isinstance(plain, nn.Parameter)
    assert not plain.requires_grad


def test_deepcopy_keeps_ties(silent: Silent) -> None:
    module = nn.Module()
    param = weight(silent(0, 2))
    module.register_parameter("a", param)
    module.register_parameter("b", param)
    twin = copy.deepcopy(module)
    assert twin.a is twin.b
    assert twin.a is not param


def test_results_do_not_copy_deeply(silent: Silent) -> None:
    with pytest.raises(RuntimeError, match="w: only leaves copy deeply"):
        copy.deepcopy(weight(silent(0, 2)) * 2)


def test_data_reads_and_does_not_assign(silent: Silent) -> None:
    """Plain tensors take other memory there; a piece would silently stay what it is."""
    param = weight(silent(0, 2))
    param.data.mul_(0)
    assert param.local.tolist() == [0.0] * 8
    assert not param.data.requires_grad
    for value in (FULL, shard_tensor(FULL, comm=param.comm)):
        with pytest.raises(TypeError, match=r"w: assigning .data .* p.copy_\(values\)"):
            param.data = value
    assert param.local.tolist() == [0.0] * 8


def test_it_does_not_move_to_shared_memory(silent: Silent) -> None:
    with pytest.raises(TypeError, match="w: a ShardTensor does not move to shared memory"):
        weight(silent(0, 2)).share_memory_()


def test_module_casts_keep_the_parameter(silent: Silent) -> None:
    module = nn.Module()
    param = weight(silent(0, 2))
    module.register_parameter("w", param)
    module.to(torch.bfloat16)
    assert (param.dtype, param.local.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (module.w.dtype, param.spec.name) == (torch.bfloat16, "w")
    assert module.w is param
    module.to_empty(device="meta")
    assert isinstance(module.w, ShardTensor)
    assert (module.w.device.type, module.w.local.device.type) == ("meta", "meta")


def test_state_dicts_hold_pieces_and_load_full_tensors(silent: Silent) -> None:
    module = nn.Module()
    param = weight(silent(1, 2))
    module.register_parameter("w", param)
    state = module.state_dict()
    assert isinstance(state["w"], ShardTensor)
    assert state["w"].local.data_ptr() == param.local.data_ptr()
    module.load_state_dict({"w": FULL + 10})
    assert param.local.tolist() == [18.0, 19.0, 20.0, 21.0, 22.0, 23.0, 24.0]
    module.load_state_dict({"w": state["w"] * 2})
    assert param.local[0] == 36.0
    with pytest.raises(RuntimeError, match="size mismatch for w"):
        module.load_state_dict({"w": FULL.t()})
    assert module.w is param


def test_inference_mode_reads_and_writes(silent: Silent) -> None:
    param = weight(silent(0, 2))
    with torch.inference_mode():
        assert param.detach().local[3] == 3.0
        assert (param * 2).local[3] == 6.0
        assert (param * 2).detach().local[3] == 6.0
        param.detach().add_(1)
    assert param.local[3] == 4.0
    (param * 2).to_local().sum().backward()
    assert isinstance(param.grad, ShardTensor)
    assert param.grad.local.tolist() == [2.0] * 8


def test_replicating_gathers_and_nothing_else_redistributes(silent: Silent) -> None:
    param = weight(silent(0, 1))
    spread = param.redistribute(placements=[Replicate()])
    assert not isinstance(spread, ShardTensor)
    assert torch.equal(spread.to_local(), FULL)
    for placements in ([Ragged(0, 3)], None):
        with pytest.raises(ValueError, match=r"w: a ShardTensor redistributes to \(Replicate"):
            param.redistribute(placements=placements)
    with pytest.raises(ValueError, match=r"w: to_local\(\) takes no grad_placements"):
        param.to_local(grad_placements=[Replicate()])
    with pytest.raises(ValueError, match=r"w: full_tensor\(\) takes no grad_placements"):
        param.full_tensor(grad_placements=[Replicate()])


def test_many_parameters_of_one_layout(silent: Silent) -> None:
    """Pieces of one shard lie side by side in memory, in the order of the array."""
    specs = [ParamSpec("a", (2, 3), torch.float32), ParamSpec("b", (8,), torch.float32)]
    layout = plan_layout(specs, 2)
    shard = torch.zeros(layout.shard_numel)
    pieces = layout.pieces(0)
    tensors: list[Any] = [
        ShardTensor(
            shard[p.offset : p.offset + p.numel],
            ShardSpec(p.spec.name, p.spec.shape, p.start, p.stop, start, layout.shard_numel),
            comm=silent(0, 2),
        )
        for p, start in zip(pieces, layout.starts, strict=True)
    ]
    torch._foreach_add_(tensors, [1.0, 2.0])
    assert [t.local.tolist() for t in tensors] == [[], [2.0] * 8]


def test_a_piece_moves_to_other_memory(silent: Silent) -> None:
    """The object stays, and with it what an optimizer knows it by."""
    param = weight(silent(1, 2))
    shard = torch.full((9,), 5.0)
    param.relocate(shard[1:8])
    assert param.local.tolist() == [5.0] * 7
    with torch.no_grad():
        param.mul_(2)
    assert shard.tolist() == [5.0, *[10.0] * 7, 5.0]
    assert shard._version > 0
    assert (param.spec.name, param.requires_grad) == ("w", True)
    for other in (torch.zeros(6), torch.zeros(7, dtype=torch.float64), torch.zeros(1, 7)):
        with pytest.raises(ValueError, match=r"w: expected a piece like \(7,\) torch.float32"):
            param.relocate(other)
