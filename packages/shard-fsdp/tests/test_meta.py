"""Models built on the meta device, and parameters given values after sharding."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shard_comm import Comm, SoloComm
from shard_flat import ShardTensor
from shard_fsdp import fully_shard, materialize
from shard_testing import DecoderBlock, TinyDecoder, full_value, run_threads, token_batches
from shard_wrap import by_class


def _init(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    if tensor.ndim > 1:
        tensor.normal_(generator=generator)
    else:
        tensor.fill_(len(name))


def _on_meta() -> Any:
    with torch.device("meta"):
        return TinyDecoder()


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full_value(param) for name, param in model.named_parameters()}


def _materialized(comm: Comm) -> dict[str, torch.Tensor]:
    model = _on_meta()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    assert all(p.device.type == "meta" for p in model.parameters())
    objects = [id(p) for p in model.parameters()]
    materialize(model, _init)
    assert [id(p) for p in model.parameters()] == objects
    model.loss(token_batches(1, 1)[0][0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    return _full(model)


def _drawn_in(comm: Comm) -> list[tuple[int, int]]:
    model, places = _on_meta(), []

    def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        storage = tensor.untyped_storage()
        places.append((storage.data_ptr(), storage.nbytes()))
        tensor.zero_()

    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    materialize(model, fill)
    return places


def test_values_are_drawn_in_memory_of_the_largest_parameter() -> None:
    for places in run_threads(_drawn_in, 2):
        assert len(places) == 15
        assert set(places) == {(places[0][0], 72 * 24 * 4)}


def test_materialized_weights_do_not_depend_on_the_world_size() -> None:
    (alone,) = run_threads(_materialized, 1)
    assert alone["norm.weight"].tolist() == [len("norm.weight")] * 24
    assert not torch.equal(alone["blocks.0.qkv.weight"], alone["blocks.1.qkv.weight"])
    for world_size in (2, 3, 4):
        for full in run_threads(_materialized, world_size):
            assert all(torch.equal(full[name], value) for name, value in alone.items())


def test_another_seed_gives_other_weights() -> None:
    models = [fully_shard(_on_meta(), mesh=SoloComm()) for _ in range(2)]
    a, b = (_full(materialize(m, _init, seed=s)) for s, m in enumerate(models))
    assert not torch.equal(a["head.weight"], b["head.weight"])


def test_one_full_parameter_at_a_time() -> None:
    seen: list[int] = []

    def fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
        seen.append(sum(ref() is not None for ref in refs))
        refs.append(weakref.ref(tensor))
        tensor.zero_()

    refs: list[Any] = []
    materialize(fully_shard(_on_meta(), mesh=SoloComm(), policy=by_class(DecoderBlock)), fill)
    assert len(seen) == len(list(TinyDecoder().parameters()))
    assert max(seen) == 0


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("scale", torch.empty(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * self.scale
        return out


def test_buffers_are_filled_too() -> None:
    with torch.device("meta"):
        model: Any = _Buffered()
    materialize(fully_shard(model, mesh=SoloComm()), _init)
    assert model.scale.tolist() == [5.0, 5.0]


def test_unsharded_leftovers_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0], mesh=SoloComm())
    with pytest.raises(ValueError, match=r"1\.weight: on the meta device and not sharded"):
        materialize(model, _init)


def _to_empty(comm: Comm) -> None:
    model: Any = _on_meta()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    with pytest.raises(RuntimeError, match=r"embed\.weight: .*materialize"):
        model.loss(token_batches(1, 1)[0][0])
    model.to_empty(device="cpu")
    model.load_state_dict(TinyDecoder(seed=5).state_dict())
    want = TinyDecoder(seed=5)
    tokens = token_batches(1, 1)[0][0]
    assert torch.equal(model.loss(tokens), want.loss(tokens))


def _assigned(comm: Comm) -> None:
    tokens = token_batches(1, 1)[0][0]
    want = TinyDecoder(seed=5)
    model: Any = _on_meta()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    model.load_state_dict(want.state_dict(), assign=True)
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss = model.loss(tokens)
    assert torch.equal(loss, want.loss(tokens))
    loss.backward()
    optimizer.step()
    assert not torch.equal(model.loss(tokens), loss)  # the optimizer has the right parameters


def _assigned_piecewise(comm: Comm) -> None:
    tokens = token_batches(1, 1)[0][0]
    want = TinyDecoder(seed=5)
    model: Any = _on_meta()
    fully_shard(model, mesh=comm, policy=by_class(DecoderBlock))
    model.to_empty(device="cpu")
    for name, value in want.state_dict().items():
        model.load_state_dict({name: value}, assign=True, strict=False)
    assert torch.equal(model.loss(tokens), want.loss(tokens))


def _reset_parameters(comm: Comm) -> None:
    """torch's recipe: shard on meta, to_empty, then every module's own initialisation."""
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
        plain: Any = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
    fully_shard(model, mesh=comm)
    for each in (plain, model):
        each.to_empty(device="cpu")
        for part in each:
            # Ranks that are threads share torch's generator, so one draws while the others wait.
            for turn in range(comm.size):
                if turn == comm.rank:
                    torch.manual_seed(7)
                    part.reset_parameters()
                comm.barrier()
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(full_value(got), want)
    assert plain[0].weight.abs().sum() > 0


def _wrong_shape(comm: Comm) -> None:
    model: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=comm)
    model.weight = nn.Parameter(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"weight: expected a parameter of shape \(2, 2\)"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize(
    "check", [_to_empty, _reset_parameters, _assigned, _assigned_piecewise, _wrong_shape]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_values_after_sharding(check: Any, world_size: int) -> None:
    run_threads(check, world_size)
