"""Operations on pieces: the same values as on the whole tensor, or an error that says why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shard_flat import ShardSpec, ShardTensor, _ops, shard_tensor

Silent = Callable[[int, int], Any]
OnRanks = Callable[[int, Callable[[Any], Any]], list[Any]]
X = torch.linspace(-2.0, 3.0, 15).view(3, 5)
Y = torch.arange(15.0).view(3, 5) / 7 + 0.5

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "rsub": lambda x, y: 1 - x,
    "alpha": lambda x, y: torch.add(x, y, alpha=3),
    "div": lambda x, y: x / y,
    "floor_divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "pow": lambda x, y: y**x,
    "scalar_pow": lambda x, y: 2.0**x,
    "sqrt": lambda x, y: y.sqrt().reciprocal(),
    "maximum": torch.maximum,
    "max": torch.max,
    "lerp": lambda x, y: x.lerp(y, 0.25),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=-0.5),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where_scalar": lambda x, y: torch.where(x > y, x, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(x > 0, -1.0),
    "compare": lambda x, y: (x < y) & ~(x == 0),
    "isnan": lambda x, y: (x / x.sign()).isnan(),
    "isfinite": lambda x, y: (x / x.sign()).isfinite(),
    "gelu": lambda x, y: nn.functional.gelu(x),
    "relu": lambda x, y: torch.relu(x),
    "sign": lambda x, y: x.sign().neg(),
    "bf16": lambda x, y: x.bfloat16() * y.bfloat16(),
    "double": lambda x, y: x.double() + y,
    "integers": lambda x, y: x.int() * 2 + 1.5,
    "zeros_like": lambda x, y: torch.zeros_like(x, dtype=torch.int64),
    "ones_like": lambda x, y: torch.ones_like(x, memory_format=torch.preserve_format),
    "full_like": lambda x, y: torch.full_like(x, 7),
    "clone": lambda x, y: x.clone(memory_format=torch.contiguous_format),
    "same_view": lambda x, y: x.view(3, 5).reshape(3, 5).view_as(y),
    "frexp": lambda x, y: torch.frexp(x).exponent,
    "one_element": lambda x, y: x * torch.tensor([[2.0]]) + torch.tensor(1.0),
    "expanded_scalar": lambda x, y: x * torch.tensor(3.0).expand(3, 5),
    "out": lambda x, y: torch.mul(x, y, out=torch.empty_like(x)),
}
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(0.5),
    "addcdiv_": lambda x, y: x.addcdiv_(y, y + 1, value=-0.1),
    "lerp_": lambda x, y: x.lerp_(y, 0.25),
    "clamp_": lambda x, y: x.clamp_(max=0.0),
    "erfinv_": lambda x, y: x.mul_(0.3).erfinv_(),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(3.0),
    "fill_tensor": lambda x, y: x.fill_(torch.tensor(3.0)),
    "masked_fill_": lambda x, y: x.masked_fill_(x < y, 9.0),
    "setitem": lambda x, y: x.__setitem__(slice(None), 4.0) or x,
    "set_masked": lambda x, y: x.__setitem__(x < y, -1.5) or x,
    "iadd": lambda x, y: x.__iadd__(y),
    "out": lambda x, y: torch.add(x, y, out=x),
}
"""Each returns its first argument."""


def cut(full: torch.Tensor, comm: Any, name: str = "x") -> Any:
    """A ShardTensor; torch's stubs know its results as plain tensors, hence the type."""
    return shard_tensor(full, comm=comm, name=name)


def own(full: torch.Tensor, like: ShardTensor) -> torch.Tensor:
    return full.reshape(-1)[like.spec.start : like.spec.stop]


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_whole(name: str, rank: int, silent: Silent) -> None:
    comm = silent(rank, 3)
    expected = FUNCTIONS[name](X, Y)
    result = FUNCTIONS[name](cut(X, comm), cut(Y, comm, "y"))
    assert isinstance(result, ShardTensor)
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.local, own(expected, result))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_values_are_those_of_the_whole(name: str, rank: int, silent: Silent) -> None:
    comm = silent(rank, 3)
    expected = IN_PLACE[name](X.clone(), Y)
    target = cut(X, comm)
    memory = target.local
    assert IN_PLACE[name](target, cut(Y, comm, "y")) is target
    assert target.local is memory
    assert torch.equal(memory, own(expected, target))


@pytest.mark.parametrize("name", ["_foreach_add_", "_foreach_zero_", "_foreach_sqrt_"])
def test_in_place_changes_count_on_the_memory_behind(name: str, silent: Silent) -> None:
    """Whoever holds the shard sees that it changed, on ranks without elements too."""
    shard = torch.ones(8)
    for piece in (shard[0:5], shard[5:5]):
        spec = ShardSpec("w", (piece.numel(),), 0, piece.numel(), 0, 8)
        target = ShardTensor(piece, spec, comm=silent(0, 1))
        before = shard._version
        arguments = (1.0,) if name == "_foreach_add_" else ()
        getattr(torch, name)([target], *arguments)
        assert shard._version > before
        before = shard._version
        target.add_(1)
        assert shard._version > before
        before = shard._version
        target.copy_(torch.zeros_like(piece))
        assert shard._version > before
        before = shard._version
        _ = target + 1, torch._foreach_add([target], 1.0), target.detach()
        assert shard._version == before


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool]
OTHERS = [
    2,
    2.5,
    torch.tensor(2),
    torch.tensor(2.5, dtype=torch.float64),
    torch.tensor([2.5], dtype=torch.float64),
    torch.tensor([[2.5]], dtype=torch.float64),
    torch.tensor(1.0, dtype=torch.float64).expand(3, 5),
]


@given(st.sampled_from(DTYPES), st.sampled_from(OTHERS), st.sampled_from([(), (1,), (3, 5)]))
def test_types_promote_as_for_the_whole(
    dtype: torch.dtype, other: Any, shape: tuple[int, ...]
) -> None:
    if isinstance(other, torch.Tensor) and other.ndim > len(shape):
        other = other.reshape(-1)[0]
    full = torch.ones(shape).to(dtype)
    for rank in range(2):
        sharded = cut(full, type("Comm", (), {"rank": rank, "size": 2})())
        assert (sharded * other).dtype == (full * other).dtype
        assert (other + sharded).dtype == (other + full).dtype


def test_list_operations_keep_plain_entries_plain(silent: Silent) -> None:
    comm = silent(1, 3)
    sharded, plain = cut(X, comm), torch.ones(4)
    results = torch._foreach_add([sharded, plain], [1.0, 2.0])
    assert isinstance(results[0], ShardTensor)
    assert torch.equal(results[0].local, own(X + 1, sharded))
    assert type(results[1]) is torch.Tensor
    assert results[1].tolist() == [3.0] * 4
    torch._foreach_mul_([sharded, plain], torch.tensor(2.0))
    assert torch.equal(sharded.local, own(X * 2, sharded))
    assert plain.tolist() == [2.0] * 4
    torch._foreach_addcmul_([sharded], [sharded.clone()], [sharded.clone()], 0.5)
    assert torch.equal(sharded.local, own(torch.addcmul(X * 2, X * 2, X * 2, value=0.5), sharded))


class Kernel:
    """An operator that counts how often it runs."""

    def __init__(self, func: Any) -> None:
        self._func = func
        self._schema = func._schema
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._func(*args, **kwargs)


def test_a_list_is_one_kernel_call(silent: Silent) -> None:
    params = [cut(X, silent(0, 3), f"p{i}") for i in range(50)]
    kernel = Kernel(torch.ops.aten._foreach_add_.List)
    _ops._listwise(kernel, (params, params), {"alpha": 0.5})
    assert kernel.calls == 1
    assert all(torch.equal(p.local, own(X * 1.5, p)) for p in params)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(),
    "mm": lambda x: torch.mm(x, x),
    "matmul": lambda x: x @ torch.ones(5),
    "reflected_matmul": lambda x: torch.ones(3) @ x,
    "linear": lambda x: nn.functional.linear(torch.ones(5), x),
    "transpose": lambda x: x.t(),
    "index": lambda x: x[0],
    "set_mask_row": lambda x: x.__setitem__(x > 0, torch.ones(5)),
    "set_by_index": lambda x: x.__setitem__(torch.tensor([0]), 1.0),
    "masked_select": lambda x: x[x > 0],
    "set_row": lambda x: x.__setitem__(0, 1.0),
    "iterate": list,
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(5, 3),
    "view_dtype": lambda x: x.view(torch.int32),
    "cat": lambda x: torch.cat([x, x]),
    "split": lambda x: x.chunk(2),
    "sum_dim": lambda x: x.sum(0),
    "mean_dim": lambda x: x.mean(-1),
    "norm_dim": lambda x: torch.linalg.vector_norm(x, dim=0),
    "norm_keepdim": lambda x: torch.linalg.vector_norm(x, keepdim=True),
    "max_dim": lambda x: x.max(0),
    "amax_dim": lambda x: x.amax(0),
    "amin_dims": lambda x: x.amin((0, 1)),
    "amax_keepdim": lambda x: x.amax(keepdim=True),
    "argmax": lambda x: x.argmax(),
    "any_dim": lambda x: torch.isnan(x).any(1),
    "std": lambda x: x.std(),
    "prod": lambda x: x.prod(),
    "nonzero": lambda x: x.nonzero(),
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x),
    "exponential_": lambda x: x.exponential_(),
    "orthogonal": lambda x: nn.init.orthogonal_(x),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: x.bernoulli(),
    "dropout": lambda x: nn.functional.dropout(x),
    "rrelu": lambda x: torch.rrelu(x, training=True),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (5,)),
    "glu": lambda x: nn.functional.glu(torch.cat([x, x])),
    "foreach_max": lambda x: torch._foreach_max([x]),
    "foreach_powsum": lambda x: torch.ops.aten._foreach_powsum.Scalar([x], 2),
    "foreach_mm": lambda x: torch.ops.aten._foreach_mm([x], [x]),
    "fused_dropout": lambda x: torch.ops.aten._fused_dropout(x, 0.5),
    "new_zeros": lambda x: x.new_zeros(3, 5),
    "pin_memory": lambda x: x.pin_memory(),
    "resize_": lambda x: x.resize_(2),
    "set_": lambda x: x.set_(torch.zeros(3)),
    "to_vector": lambda x: nn.utils.parameters_to_vector([x]),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", REFUSED)
def test_operations_without_a_sharded_meaning_are_refused(
    name: str, size: int, silent: Silent
) -> None:
    """With one rank as well, so that a program fails where it is written and not where it runs."""
    x = cut(X, silent(0, size))
    before = x.local.clone()
    with pytest.raises(
        RuntimeError, match=r"x: .*has no meaning on one rank's piece.*full_tensor\(\)"
    ):
        REFUSED[name](x)
    assert torch.equal(x.local, before)


@pytest.mark.parametrize("name", ["index", "set_row", "masked_select", "set_by_index"])
def test_what_to_do_in_place_of_indexing(name: str, silent: Silent) -> None:
    with pytest.raises(
        RuntimeError, match=r"read .*full_tensor\(\).*write .*copy_\(\).*materialize"
    ):
        REFUSED[name](cut(X, silent(0, 2)))


def test_data_parallel_around_shards_is_told_to_go(silent: Silent) -> None:
    """What torch's DistributedDataParallel does first, here without its process group."""
    with pytest.raises(RuntimeError, match=r"x: .*DistributedDataParallel wraps .* leave it out"):
        torch._C._nn.flatten_dense_tensors([cut(X, silent(0, 2))])


@pytest.mark.parametrize("convert", [float, bool, int, lambda x: x.item(), lambda x: x == 1 or 0])
def test_one_element_does_not_become_a_number(convert: Any, silent: Silent) -> None:
    """Only one rank has it, and a branch on it would part the ranks."""
    with pytest.raises(RuntimeError, match=r"s: .*full_tensor\(\)"):
        convert(cut(torch.tensor(1.0), silent(0, 2), "s"))


@pytest.mark.parametrize("convert", [lambda x: x.tolist(), lambda x: x.numpy(), bool])
def test_many_elements_do_not_become_numbers(convert: Any, silent: Silent) -> None:
    with pytest.raises(RuntimeError):
        convert(cut(X, silent(0, 2)))


PLAIN: dict[str, Callable[[Any], Any]] = {
    "full": lambda x: x + X,
    "reflected": lambda x: X - x,
    "row": lambda x: x * torch.ones(5),
    "column": lambda x: x * torch.ones(3, 1),
    "piece": lambda x: x + torch.ones(8),
    "expanded_row": lambda x: x + torch.ones(5).expand(3, 5),
    "mask": lambda x: x.masked_fill(X > 0, 0.0),
    "where": lambda x: torch.where(X > 0, x, x),
    "in_place": lambda x: x.add_(X),
    "one_too_deep": lambda x: x + torch.ones(1, 1, 1),
    "list": lambda x: torch._foreach_add_([x], [X]),
    "fused": lambda x: torch._fused_sgd_(
        [x], [X], [], lr=1.0, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False,
        maximize=False, is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_plain_operands_are_refused(name: str, silent: Silent) -> None:
    x = cut(X, silent(0, 2))
    before = x.local.clone()
    message = r"x: .*mixes a ShardTensor with a Tensor of shape .*\(rank 0 of 2\); .*full_tensor"
    with pytest.raises(RuntimeError, match=message):
        PLAIN[name](x)
    assert torch.equal(x.local, before)


def test_torchs_own_dtensors_are_refused(silent: Silent) -> None:
    x = cut(X, silent(0, 2))
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    spread = DTensor.from_local(X, mesh, [Replicate()], run_check=False)
    with pytest.raises(RuntimeError, match=r"x: .*mixes a ShardTensor with a DTensor"):
        x + spread
    with pytest.raises(RuntimeError, match=r"x: .* from a DTensor placed as"):
        x.copy_(spread)


INTO_PLAIN: dict[str, Callable[[Any, Any], Any]] = {
    "in_place": lambda x, s: torch.zeros(3, 5).add_(x),
    "scalar": lambda x, s: torch.zeros(()).add_(s),
    "out": lambda x, s: torch.add(s, 1, out=torch.zeros(())),
    "out_full": lambda x, s: torch.neg(x, out=torch.empty(3, 5)),
    "list": lambda x, s: torch._foreach_add_([torch.zeros(3, 5)], [x]),
    "copy": lambda x, s: torch.zeros(3, 5).copy_(x),
    "list_copy": lambda x, s: torch._foreach_copy_([torch.zeros(3, 5)], [x]),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", INTO_PLAIN)
def test_a_piece_does_not_go_into_a_plain_tensor(name: str, rank: int, silent: Silent) -> None:
    """On every rank, whatever fits by chance on one of them."""
    comm = silent(rank, 2)
    with pytest.raises(RuntimeError, match=r"[xs]: .*plain tensor.*full_tensor\(\)"):
        INTO_PLAIN[name](cut(X, comm), cut(torch.tensor(1.0), comm, "s"))


@pytest.mark.parametrize("rank", range(3))
def test_tensors_cut_differently_are_refused_on_every_rank(rank: int, silent: Silent) -> None:
    """Rank 0 holds the first four of both; it must raise too, or it would go on alone."""

    def cut_by(name: str, origin: int, shard_numel: int) -> Any:
        spec = ShardSpec(name, (12,), 0, 0, origin, shard_numel)
        start, stop = spec.range_of(rank)
        spec = ShardSpec(name, (12,), start, stop, origin, shard_numel)
        return ShardTensor(torch.ones(stop - start), spec, comm=silent(rank, 3))

    a, b = cut_by("a", 0, 4), cut_by("b", 4, 8)
    assert [x.spec.range_of(r) for x in (a, b) for r in range(3)] == [
        *[(0, 4), (4, 8), (8, 12)],
        *[(0, 4), (4, 12), (12, 12)],
    ]
    message = rf"add.Tensor: a has .*, b has .*\(rank {rank} of 3\); shard both by one layout"
    with pytest.raises(ValueError, match=message):
        a + b
    assert (a + cut_by("c", 0, 4)).local.tolist() == [2.0] * 4


def test_tensors_of_two_layouts_with_the_same_cuts_go_together(silent: Silent) -> None:
    """``near`` begins its array, ``far`` begins where another parameter ends; cuts agree."""
    comm = silent(1, 2)
    near: Any = ShardTensor(torch.ones(7), ShardSpec("near", (15,), 8, 15, 0, 8), comm=comm)
    far = ShardTensor(torch.ones(7), ShardSpec("far", (15,), 8, 15, 12, 20), comm=comm)
    assert (near + far).local.tolist() == [2.0] * 7


def test_pieces_for_lists_of_unlike_length_are_refused(silent: Silent) -> None:
    x = cut(X, silent(0, 2))
    with pytest.raises((ValueError, RuntimeError), match="1 and 2"):
        torch._foreach_add_([x], [x, x])
    with pytest.raises(RuntimeError, match=r"x: .* takes a list of ShardTensors or a plain scalar"):
        torch._foreach_mul_([x, x], cut(torch.tensor(2.0), silent(0, 2), "x"))


def test_nan_and_inf_stay_where_they_are(silent: Silent) -> None:
    full = torch.tensor([1.0, math.nan, 3.0, math.inf, 5.0])
    cuts = [cut(full, silent(rank, 2)) for rank in (0, 1)]
    assert [c.isnan().local.tolist() for c in cuts] == [[False, True, False, False], [False]]
    assert [c.isinf().local.tolist() for c in cuts] == [[False, False, False, True], [False]]


class _Rank:
    """A comm that is only asked who it is."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor, /) -> None:
        raise NotImplementedError

    def all_reduce(self, tensor: torch.Tensor, /, *, op: str = "sum") -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    "init",
    [
        nn.init.normal_,
        nn.init.uniform_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_normal_,
    ],
)
def test_initialisers_draw_what_one_process_would(
    init: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(3)
    whole = init(torch.empty(5, 3)).flatten()
    for rank in range(4):
        piece = shard_tensor(torch.zeros(5, 3), comm=_Rank(rank, 4))
        torch.manual_seed(3)
        init(piece)
        assert torch.equal(piece.local, whole[piece.spec.start : piece.spec.stop])


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-0.2, 0.1), (1.5, 4.0)])
def test_truncated_draws_are_those_of_one_process(
    low: float, high: float, size: int, on_ranks: OnRanks
) -> None:
    """All ranks draw again while any of them has a number out of bounds, those with none too."""

    def draw(tensor: torch.Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        return nn.init.trunc_normal_(tensor, std=1.0, a=low, b=high, generator=generator)

    whole = draw(torch.empty(3, 5))
    assert low <= whole.min() < whole.max() <= high
    for drawn in on_ranks(size, lambda comm: draw(cut(torch.zeros(3, 5), comm)).full_tensor()):
        assert torch.equal(drawn, whole)
