"""Parameters that are DTensors of a tensor-parallel mesh, on dp x tp ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as helpers
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

import shard_ckpt
import shard_optim
from shard_comm import Comm, SoloComm
from shard_flat import Outer, Ragged, ShardTensor
from shard_fsdp import MixedPrecisionPolicy, fully_shard, materialize
from shard_testing import run_ranks, run_threads

# Untyped: torch's annotations do not cover what these return.
get_model_state_dict: Any = helpers.get_model_state_dict
get_optimizer_state_dict: Any = helpers.get_optimizer_state_dict
set_model_state_dict: Any = helpers.set_model_state_dict
set_optimizer_state_dict: Any = helpers.set_optimizer_state_dict

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

WIDTH, HEADS, TOKENS = 12, 4, 6


class _Block(nn.Module):
    """Attention and an MLP, as tensor-parallel plans cut them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # its gradient would be zero but for rounding
        self.v = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.q(h), self.k(h), self.v(h))
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        change: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return x + change


class _Model(nn.Module):
    """Two blocks and a plain head, with values that depend on nothing but the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


PLAN: dict[str, Any] = {
    "q": ColwiseParallel(),
    "k": ColwiseParallel(),
    "v": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def _parallel_model(mesh: DeviceMesh) -> Any:
    model = _Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], PLAN)
    return model


def _sharded(mesh: DeviceMesh, shard: Any = fully_shard) -> Any:
    model = _parallel_model(mesh)
    for block in model.blocks:
        shard(block, mesh=mesh["dp"])
    shard(model, mesh=mesh["dp"])
    return model


def _batches(dp: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(2, TOKENS, WIDTH, generator=generator) for _ in range(dp)]


def _train(model: Any, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }


def _trained_alone(dp: int, steps: int = 3) -> dict[str, torch.Tensor]:
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, [torch.cat(_batches(dp, step)) for step in range(steps)])
    return _full(model)


def _check_training(comm: Comm, mesh: DeviceMesh) -> None:
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    mine = [_batches(dp, step)[dp_rank] for step in range(3)]
    want = _trained_alone(dp)
    start = _full(_Model())
    optimizers: tuple[Any, ...] = (torch.optim.AdamW, shard_optim.AdamW)
    for make in optimizers:
        model = _sharded(mesh)
        assert all(torch.equal(p, start[n]) for n, p in _full(model).items())
        _train(model, make(model.parameters(), lr=1e-2), mine)
        got = _full(model)
        for name, value in got.items():
            # the tensor-parallel matmuls and the mean over ranks add up in another order, which
            # Adam's quotient enlarges in the first steps
            torch.testing.assert_close(value, want[name], rtol=1e-3, atol=1e-4)
            assert not torch.equal(value, start[name])
        digests = comm.all_gather_object([v.double().sum().item() for v in got.values()])
        assert all(digest == digests[0] for digest in digests)
    reference = _sharded(mesh, torch_fsdp.fully_shard)
    _train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), mine)
    for name, value in _full(reference).items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)  # as above


def _check_parameters(comm: Comm, mesh: DeviceMesh) -> None:
    model = _sharded(mesh)
    block = model.blocks[0]
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    for linear, placement in ((block.q, Shard(0)), (block.out, Shard(1))):
        weight = linear.weight
        assert isinstance(weight, ShardTensor)
        assert weight.shape == (WIDTH, WIDTH)
        ragged, outer = weight.placements
        assert isinstance(ragged, Ragged)
        assert outer == placement
        assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
        assert weight.device_mesh.shape == (dp, tp)
        assert weight.to_local().shape == (ragged.stop - ragged.start,)
    assert block.down.bias.placements[1] == Replicate()
    assert len(model.head.weight.placements) == 1
    seen: list[Any] = []
    block.q.register_forward_pre_hook(lambda m, a: seen.append(m.weight))
    model(_batches(dp, 0)[0]).sum().backward()
    (inside,) = seen
    assert type(inside.data) is DTensor
    assert (inside.device_mesh, inside.placements) == (mesh["tp"], (Shard(0),))
    assert inside.to_local().shape == (WIDTH // tp, WIDTH)
    for param in model.parameters():
        assert isinstance(param.grad, ShardTensor)
        assert param.grad.placements == param.placements


def _check_clipping(comm: Comm, mesh: DeviceMesh) -> None:
    """Each element counts once, whether it is cut over one mesh, both or none."""
    alone = _Model()
    batches = _batches(mesh["dp"].size(), 0)
    alone(torch.cat(batches)).square().mean().backward()
    norms: tuple[Any, ...] = (nn.utils.clip_grad_norm_, shard_optim.clip_grad_norm_)
    for order in (2.0, 1.0, float("inf")):
        want = nn.utils.get_total_norm(
            [p.grad for p in alone.parameters() if p.grad is not None], order
        )
        for clip in norms:
            model = _sharded(mesh)
            model(batches[mesh["dp"].get_local_rank()]).square().mean().backward()
            total = clip(model.parameters(), 0.01, norm_type=order)
            # sums over ranks are taken in another order than in one process
            torch.testing.assert_close(total, want, rtol=1e-5, atol=0.0)
            grads = [p.grad for p in model.parameters()]
            after = nn.utils.get_total_norm(grads, order)
            torch.testing.assert_close(after.item(), 0.01, rtol=1e-3, atol=0.0)


def _check_sequence_parallel(comm: Comm, mesh: DeviceMesh) -> None:
    """Norms whose inputs are cut along the sequence get partial gradients over tp."""
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 20)
            self.down = nn.Linear(20, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(functional.gelu(self.up(self.norm(x))))
            return out

    torch.manual_seed(0)
    alone = Mlp()
    model: Any = Mlp()
    model.load_state_dict(alone.state_dict())
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    local = _batches(dp, 0)[dp_rank]
    part = TOKENS // mesh["tp"].size()
    begin = mesh["tp"].get_local_rank() * part
    model(local[:, begin : begin + part]).square().mean().backward()
    alone(torch.cat(_batches(dp, 0))).square().mean().backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert got.grad.placements[1] in (Replicate(), Shard(0), Shard(1))
        # sums over two meshes
        torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-4, atol=1e-6)


def _check_life(comm: Comm, mesh: DeviceMesh) -> None:
    """Accumulation, dtypes, copies, assignments and models from the meta device."""
    batches = [_batches(mesh["dp"].size(), s)[mesh["dp"].get_local_rank()] for s in range(2)]
    at_once, in_parts = _sharded(mesh), _sharded(mesh)
    for batch in batches:
        at_once(batch).square().mean().backward()
    in_parts.set_requires_gradient_sync(False)
    in_parts(batches[0]).square().mean().backward()
    in_parts.set_requires_gradient_sync(True)
    in_parts(batches[1]).square().mean().backward()
    for a, b in zip(at_once.parameters(), in_parts.parameters(), strict=True):
        # one sums ranks first, the other microbatches
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-4, atol=1e-6)
    twin = copy.deepcopy(at_once)
    assert torch.equal(twin(batches[0]), at_once(batches[0]))
    assert twin.blocks[0].q.weight.spec.outer == at_once.blocks[0].q.weight.spec.outer

    start = _full(_Model())
    for whole in (start, dict(_parallel_model(mesh).state_dict())):
        model = _sharded(mesh)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        given = {name: nn.Parameter(value) for name, value in whole.items()}
        model.load_state_dict(given, assign=True)
        assert all(torch.equal(p, start[n]) for n, p in _full(model).items())
        model(batches[0])
        assert all(isinstance(p, ShardTensor) for p in model.parameters())

    for param in model.parameters():
        whole = param.full_tensor().detach() + 1
        cut = distribute_tensor(whole, param.device_mesh, param.placements)
        assert torch.equal(cut.full_tensor(), whole)
        with torch.no_grad():
            param.copy_(cut)
        assert torch.equal(param.full_tensor(), whole)
    parts = {
        name: nn.Parameter(distribute_tensor(start[name], param.device_mesh, param.placements))
        for name, param in model.named_parameters()
    }
    model.load_state_dict(parts, assign=True)
    assert all(torch.equal(p, start[n]) for n, p in _full(model).items())
    copied = model.blocks[0].down.weight.redistribute(placements=[Replicate(), Replicate()])
    assert torch.equal(copied.to_local(), start["blocks.0.down.weight"])

    turned: Any = nn.Linear(WIDTH, WIDTH)  # its weight lies by columns
    turned.weight = nn.Parameter(torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH).t())
    values = turned.weight.detach().clone()
    parallelize_module(turned, mesh["tp"], RowwiseParallel())
    fully_shard(turned, mesh=mesh["dp"])
    assert torch.equal(turned.weight.full_tensor(), values)
    part = torch.ones(1, WIDTH // mesh["tp"].size())
    turned(part).sum().backward()
    assert torch.equal(turned.weight.grad.full_tensor(), torch.ones(WIDTH, WIDTH))

    half = _parallel_model(mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(half, mesh=mesh["dp"], mp_policy=policy)
    out = half(batches[0])
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 for p in half.parameters())


class _Giver(nn.Module):
    """Returns its parameter as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self) -> torch.Tensor:
        return self.linear.weight


def _check_outputs(comm: Comm, mesh: DeviceMesh) -> None:
    """A DTensor that lies in the full buffer outlives it."""
    model: Any = _Giver()
    values = torch.arange(float(WIDTH * WIDTH)).view(WIDTH, WIDTH)
    with torch.no_grad():
        model.linear.weight.copy_(values)
    parallelize_module(model.linear, mesh["tp"], RowwiseParallel())
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    given = model()
    assert given.placements == (Shard(1),)
    model.reshard()
    assert torch.equal(given.full_tensor(), values)
    given.to_local().sum().backward()
    assert torch.equal(model.linear.weight.grad.full_tensor(), torch.ones(WIDTH, WIDTH))


def _check_scaler(comm: Comm, mesh: DeviceMesh) -> None:
    """An inf in one rank's piece makes every rank skip the step."""
    model = _sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(_batches(1, 0)[0]).square().mean()).backward()
    before = _full(model)
    last = model.blocks[0].down.weight.grad  # cut over both meshes
    held = [n > 0 for n in comm.all_gather_object(last.local.numel())]
    if comm.rank == max(rank for rank in range(comm.size) if held[rank]):
        last.local.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert all(torch.equal(p, before[n]) for n, p in _full(model).items())


def _check_hybrid(comm: Comm, mesh: DeviceMesh) -> None:
    """Replicas beside both: the same gradients as without them."""
    dp, tp = mesh["dp"].size(), mesh["tp"].size()
    deep = init_device_mesh("cpu", (dp, 1, tp), mesh_dim_names=("pods", "dp", "tp"))
    hybrid = _Model()
    for block in hybrid.blocks:
        parallelize_module(block, deep["tp"], PLAN)
    fully_shard(hybrid, mesh=deep["pods", "dp"])
    model = _sharded(mesh)
    batch = _batches(dp, 0)[mesh["dp"].get_local_rank()]
    for each in (hybrid, model):
        each(batch).square().mean().backward()
    for a, b in zip(hybrid.parameters(), model.parameters(), strict=True):
        assert isinstance(a.grad, ShardTensor)
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


def _check_meta(comm: Comm, mesh: DeviceMesh) -> None:
    def init(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        tensor.normal_(generator=generator)

    with torch.device("meta"):
        bare: Any = fully_shard(_Model(), mesh=SoloComm())
        cut = _parallel_model(mesh)
    fully_shard(cut, mesh=mesh["dp"])
    want = _full(materialize(bare, init))
    for name, value in _full(materialize(cut, init)).items():
        assert torch.equal(value, want[name]), name
    with torch.no_grad():
        torch.manual_seed(3)
        drawn = torch.empty(WIDTH, WIDTH).normal_()
        torch.manual_seed(3)
        assert torch.equal(cut.blocks[0].out.weight.normal_().full_tensor(), drawn)


def _check_helpers(comm: Comm, mesh: DeviceMesh) -> None:
    """torch's state-dict helpers: whole states, and back again."""
    model = _sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, [_batches(mesh["dp"].size(), 0)[mesh["dp"].get_local_rank()]])
    want = _full(model)
    full = get_model_state_dict(model, options=FULL)
    assert set(full) == set(want)
    assert all(torch.equal(full[name], value) for name, value in want.items())
    for options in (FULL, FROM_RANK_0):
        given = dict(want) if comm.rank == 0 or options is FULL else {}
        other = _sharded(mesh)
        set_model_state_dict(other, dict(given), options=options)  # it changes what it is given
        assert all(torch.equal(p, want[n]) for n, p in _full(other).items())
        with torch.device("meta"):
            empty = _parallel_model(mesh)
        fully_shard(empty, mesh=mesh["dp"])
        set_model_state_dict(empty, dict(given), options=options)
        assert all(torch.equal(p, want[n]) for n, p in _full(empty).items())
    moments = get_optimizer_state_dict(model, optimizer, options=FULL)
    shape = moments["state"]["blocks.0.down.weight"]["exp_avg"].shape
    assert shape == (WIDTH, 20)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.5)
    set_optimizer_state_dict(other, resumed, copy.deepcopy(moments), options=FULL)
    batch = _batches(mesh["dp"].size(), 1)[mesh["dp"].get_local_rank()]
    _train(model, optimizer, [batch])
    _train(other, resumed, [batch])
    want = _full(model)
    assert all(torch.equal(p, want[n]) for n, p in _full(other).items())
    assert all(isinstance(s["exp_avg"], ShardTensor) for s in resumed.state.values())


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer),
    }


def _whole(state: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of nested state, whole, by its path."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= _whole(value, f"{prefix}{key}/")
        elif isinstance(value, DTensor):
            found[f"{prefix}{key}"] = value.full_tensor().detach()
    return found


def _save(comm: Comm, folder: str) -> list[dict[str, torch.Tensor]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = _sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, [_batches(2, 0)[mesh["dp"].get_local_rank()]])
    state = _state(model, optimizer)
    shard_ckpt.save(state, f"{folder}/ours", comm=comm)
    shard_ckpt.save_async(state, f"{folder}/behind", comm=comm).wait()
    dcp_save(state, checkpoint_id=f"{folder}/torchs")
    return [_whole(state), *_load(comm, folder, [(2, 2)])]


def _load(comm: Comm, folder: str, meshes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for sizes in meshes:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for kind in ("ours", "torchs"):
            model = _sharded(mesh)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            state = _state(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            if kind == "ours":
                shard_ckpt.load(state, f"{folder}/ours", comm=comm)
            else:
                dcp_load(state, checkpoint_id=f"{folder}/torchs")
            found.append(_whole(state))
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from inside torch's helpers
def test_checkpoints_move_between_meshes(tmp_path: Path) -> None:
    """Of both kinds; each element is stored once, whatever the sizes of dp and tp."""
    folder = str(tmp_path)
    found = run_ranks(_save, 4, folder)
    want = found[0][0]
    assert float(want["optim/state/blocks.0.down.weight/exp_avg"].abs().sum()) > 0
    found += run_ranks(_load, 2, folder, [(2, 1), (1, 2)])
    found += run_ranks(_load, 1, folder, [(1, 1)])
    for state in (state for of_rank in found for state in of_rank):
        assert set(state) == set(want)
        assert all(torch.equal(state[name], value) for name, value in want.items())
    elements = sum(value.numel() for value in want.values())
    stored = 0
    for file in (tmp_path / "ours").glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            stored += sum(tensors.get_tensor(key).numel() for key in tensors.keys())  # noqa: SIM118
    steps = sum(1 for _ in _Model().parameters())
    assert stored == elements + steps
    assert shard_ckpt.diff(tmp_path / "ours", tmp_path / "behind") == ()
    plain = _Model()
    whole = {"model": dict(plain.state_dict())}
    shard_ckpt.load(whole, tmp_path / "ours", comm=SoloComm(), strict=False)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, want[f"model/{name}"])


def _gathered(comm: Comm) -> None:
    """A whole that two dimensions of a mesh cut, one after the other, along one of its own."""
    rows, columns = comm.split(comm.rank // 2), comm.split(comm.rank % 2)
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, 1, dtype=torch.int), _init_backend=False, _rank=0)
    whole = torch.arange(35.0).view(5, 7)
    for dims in ((0, 0), (1, 1), (0, 1), (1, 0)):
        placements = tuple(Shard(dim) for dim in dims)
        outer = Outer((5, 7), placements, (columns, rows), mesh)
        part = outer.part_of(whole)
        assert part.numel() < 18
        assert torch.equal(outer.gather(part), whole)


def test_parts_of_two_mesh_dimensions_are_gathered() -> None:
    run_threads(_gathered, 4)


def _everything(comm: Comm, meshes: list[tuple[int, int]]) -> None:
    for sizes in meshes:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
        for check in (
            _check_parameters,
            _check_training,
            _check_clipping,
            _check_sequence_parallel,
            _check_life,
            _check_outputs,
            _check_scaler,
            _check_hybrid,
            _check_meta,
            _check_helpers,
        ):
            check(comm, mesh)
            comm.barrier()


@pytest.mark.parametrize("meshes", [[(2, 2)], [(2, 1), (1, 2)]])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # from inside torch's helpers
def test_tensor_parallel_models_are_sharded(meshes: list[tuple[int, int]]) -> None:
    run_ranks(_everything, meshes[0][0] * meshes[0][1], meshes)
