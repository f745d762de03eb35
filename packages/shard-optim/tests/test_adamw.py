"""AdamW on plain parameters against torch's own.

Whole vectors get the bits that torch's fused kernel gives them. The last few elements of a tensor
go through vector code here and through scalar code there, which differ by an ulp now and then:
``assert_close`` with a few ulps of the dtype, where a size is no multiple of 64 bytes.
"""

from __future__ import annotations

import copy
import gc
import math
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_optim import AdamW

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-7}

Make = Callable[..., torch.optim.Optimizer]


def torch_adamw(params: Any, **hyper: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True, **hyper)


def run(
    make: Make, values: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor | None]]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = make(params)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return [param.detach() for param in params], optimizer


def assert_same(
    values: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor | None]],
    *,
    bits: bool,
    **hyper: Any,
) -> None:
    """Ours and torch's end at the same parameters and the same state."""
    ours, mine = run(lambda params: AdamW(params, **hyper), values, grads)
    theirs, other = run(lambda params: torch_adamw(params, **hyper), values, grads)
    for a, b, p, q in zip(
        ours, theirs, mine.param_groups[0]["params"], other.param_groups[0]["params"], strict=True
    ):
        pairs = [(a, b)]
        if q in other.state:
            pairs += [(mine.state[p][s], other.state[q][s]) for s in ("exp_avg", "exp_avg_sq")]
            assert float(mine.state[p]["step"]) == float(other.state[q]["step"])
        else:
            assert p not in mine.state
        for left, right in pairs:
            if bits:
                assert torch.equal(left, right)
            else:
                close = TOLERANCE[left.dtype]
                torch.testing.assert_close(left, right, rtol=close, atol=close)


def random_steps(
    values: Sequence[torch.Tensor], steps: int, *, seed: int = 1
) -> list[list[torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v.dtype) for v in values]
        for _ in range(steps)
    ]


class Kernels(TorchDispatchMode):
    """Notes how many tensors each fused call was given, and how many calls there were in all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused: list[int] = []
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        if "_fused_adamw_" in str(func):
            self.fused.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_whole_vectors_have_torchs_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in [(64,), (3, 32), (2, 4, 16), (1024,)]]
    assert_same(values, random_steps(values, 6), bits=True, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_size_is_torchs_up_to_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(), (1,), (3, 5), (9, 4), (0, 3), (257,), (2, 3, 7)]
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    assert_same(values, random_steps(values, 6), bits=False, lr=0.01, betas=(0.8, 0.9), eps=1e-6)


def test_a_tensor_as_learning_rate() -> None:
    values = [torch.linspace(-1, 1, 32)]
    assert_same(values, random_steps(values, 3), bits=True, lr=torch.tensor(0.01))


def test_non_contiguous_parameters_and_gradients() -> None:
    """Elements pair up by index though parameter, gradient and moments lie differently."""
    torch.manual_seed(0)
    values = [
        torch.randn(16, 8).t(),
        torch.randn(2, 3, 4, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(4, 1),
        torch.randn(5, 7).t(),
    ]
    params = [nn.Parameter(v) for v in values]  # strides kept
    twins = [nn.Parameter(v.detach().contiguous()) for v in values]
    ours, theirs = AdamW(params, lr=0.1), AdamW(twins, lr=0.1)
    for step in range(4):
        for param, twin in zip(params, twins, strict=True):
            grad = torch.randn(param.shape)
            param.grad = grad if step % 2 else torch.empty_like(param).copy_(grad)
            twin.grad = grad.clone()
        if step == 3:
            flat = torch.randn(8, 32)
            params[0].grad, twins[0].grad = flat[:, ::2], flat[:, ::2].clone()
        ours.step()
        theirs.step()
    assert not params[0].is_contiguous()
    for param, twin in zip(params, twins, strict=True):
        assert torch.equal(param, twin)
        assert torch.equal(ours.state[param]["exp_avg_sq"], theirs.state[twin]["exp_avg_sq"])


def test_one_fused_call_per_group() -> None:
    values = [torch.zeros(size) for size in (16, 32, 16, 7)]
    params = [nn.Parameter(v) for v in values]
    optimizer = AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.5}], lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    for _ in range(2):
        with Kernels() as kernels:
            optimizer.step()
        assert kernels.fused == [2, 2]


def test_plain_parameters_of_one_buffer_are_one_run() -> None:
    torch.manual_seed(0)
    buffer, grads = torch.randn(96), torch.randn(96)
    params = [nn.Parameter(part.view(2, -1)) for part in buffer.split([32, 64])]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    for param, twin, grad in zip(params, twins, grads.split([32, 64]), strict=True):
        param.grad, twin.grad = grad.view(2, -1), grad.view(2, -1).clone()
    together, apart = AdamW(params, lr=0.1), torch_adamw(twins, lr=0.1)
    versions = [param._version for param in params]
    with Kernels() as kernels:
        together.step()
    apart.step()
    assert kernels.fused == [1]
    for param, twin, version in zip(params, twins, versions, strict=True):
        assert torch.equal(param, twin)
        assert together.state[param]["exp_avg"].shape == param.shape
        assert param._version > version


def test_groups_keep_their_hyper_parameters() -> None:
    torch.manual_seed(0)
    values = [torch.randn(16) for _ in range(3)]
    grads = random_steps(values, 3)

    def make(cls: Make) -> Make:
        def build(params: list[torch.Tensor]) -> torch.optim.Optimizer:
            groups = [
                {"params": params[:1], "lr": 0.5, "weight_decay": 0.2},
                {"params": params[1:2], "betas": (0.5, 0.6), "eps": 1e-3},
            ]
            optimizer = cls(groups, lr=0.1)
            optimizer.add_param_group({"params": params[2], "lr": 0.0})
            return optimizer

        return build

    ours, _ = run(make(AdamW), values, grads)
    theirs, _ = run(make(torch_adamw), values, grads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[2], values[2])  # lr 0
    assert not torch.equal(ours[1], values[1])


def test_parameters_without_gradient_in_some_steps() -> None:
    """Counters part and meet again, and each parameter keeps its own."""
    torch.manual_seed(0)
    values = [torch.randn(16) for _ in range(4)]
    grads = random_steps(values, 8)
    missing: list[tuple[int, ...]] = [(), (1,), (1, 2), (), (0,), (0, 1, 2), (2,), ()]
    for given, absent in zip(grads, missing, strict=True):
        for row in (*absent, 3):  # 3 never: no state at all
            given[row] = None
    assert_same(values, grads, bits=True, lr=0.05, weight_decay=0.1)


def test_gradients_in_new_memory_or_replaced_by_a_clone() -> None:
    torch.manual_seed(0)
    values = [torch.randn(16), torch.randn(48)]
    grads = random_steps(values, 4)
    theirs, _ = run(lambda params: torch_adamw(params, lr=0.1), values, grads)
    params = [nn.Parameter(v.clone()) for v in values]
    ours = AdamW(params, lr=0.1)
    flat = torch.empty(64)
    parts = flat.split([16, 48])
    for step, given in enumerate(grads):
        for row, (param, part) in enumerate(zip(params, parts, strict=True)):
            grad = given[row]
            assert grad is not None
            part.copy_(grad)
            param.grad = part if step in (0, 3) else part.clone()
            if step == 2 and row == 0:
                param.grad = part
        ours.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))


def test_neighbours_of_two_allocations_are_not_taken_for_one() -> None:
    """Gradients that only look adjacent: two storages over one piece of memory."""
    params = [nn.Parameter(part) for part in torch.zeros(32).split(16)]
    optimizer = AdamW(params, lr=0.1, weight_decay=0)
    for param, part in zip(params, torch.ones(32).split(16), strict=True):
        param.grad = part
    optimizer.step()
    memory = bytearray(32 * 4)
    first = torch.frombuffer(memory, dtype=torch.float32, count=16)
    second = torch.frombuffer(memory, dtype=torch.float32, count=16, offset=64)
    params[0].grad, params[1].grad = first.fill_(1), second.fill_(1)
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.fused == [2]
    torch.testing.assert_close(torch.cat([p.detach() for p in params]), torch.full((32,), -0.2))


def test_mixed_dtypes_in_one_group_take_one_call_each() -> None:
    params = [nn.Parameter(torch.zeros(32, dtype=d)) for d in (torch.float32, torch.bfloat16)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = AdamW(params, lr=0.5, weight_decay=0)
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.fused == [1, 1]
    assert [float(p.detach()[3]) for p in params] == pytest.approx([-0.5, -0.5], rel=1e-6)
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.bfloat16


def test_replaced_parameter_memory_is_seen() -> None:
    param = nn.Parameter(torch.zeros(16))
    param.grad = torch.ones(16)
    optimizer = AdamW([param], lr=0.1, weight_decay=0)
    optimizer.step()
    old = param.data
    param.data = torch.full((16,), 5.0)
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((16,), 4.9))
    torch.testing.assert_close(old, torch.full((16,), -0.1))


def test_a_parameter_that_changes_under_its_state_is_refused() -> None:
    """The kernel goes by addresses and would read past the end of the moments."""
    other, param = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(32))
    optimizer = AdamW([{"params": [other]}, {"params": [param]}], lr=0.1)
    other.grad, param.grad = torch.ones(16), torch.ones(32)
    optimizer.step()
    before = other.detach().clone()
    for data in (param.data[:16], torch.zeros(64), torch.zeros(32, dtype=torch.bfloat16)):
        param.grad = None
        param.data = data
        param.grad = torch.ones_like(param)
        with pytest.raises(ValueError, match=r"^1\.0: expected exp_avg of shape .*under its state"):
            optimizer.step()
        assert torch.equal(other, before)
    optimizer.state.pop(param)
    optimizer.step()
    assert not torch.equal(other, before)


def test_replaced_or_edited_state_is_seen() -> None:
    """Whoever resets an optimizer by its state, whole or in part, gets what he asked for."""
    param = nn.Parameter(torch.zeros(16))
    param.grad = torch.ones(16)
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    optimizer.step()
    optimizer.state = defaultdict(dict)
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 1
    assert float(optimizer.state[param]["exp_avg"][0]) == pytest.approx(0.1)
    optimizer.state[param]["exp_avg"] = torch.full((16,), 10.0)
    optimizer.step()
    assert float(optimizer.state[param]["exp_avg"][0]) == pytest.approx(9.1)
    optimizer.state[param]["step"].fill_(40)
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 41


def test_an_edited_counter_moves_no_other_parameters() -> None:
    params = [nn.Parameter(part) for part in torch.zeros(32).split(16)]
    optimizer = AdamW(params, lr=0.1)
    for param, part in zip(params, torch.ones(32).split(16), strict=True):
        param.grad = part
    optimizer.step()
    optimizer.state[params[1]]["step"].zero_()
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 1]
    # The bias corrections follow: 1 - 0.9 ** 1 instead of 1 - 0.9 ** 2.
    first, second = (float(p.detach()[0]) for p in params)
    moment, square = 0.19, 0.001 * 0.999 + 0.001
    start = -0.1 * (1 - 0.1 * 0.01)
    expected = start - 0.1 * (moment / 0.1) / math.sqrt(square / 0.001)
    assert second == pytest.approx(expected, rel=1e-4)
    assert first == pytest.approx(start - 0.1, rel=1e-4)


def test_state_of_other_strides_is_brought_into_line() -> None:
    param = nn.Parameter(torch.zeros(4, 8).t())
    moment = torch.arange(32.0).view(8, 4)
    param.grad = moment.clone()
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    optimizer.state[param]["exp_avg"] = moment.clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param]["exp_avg"], moment)  # 0.9 m + 0.1 m


def test_copies_of_an_optimizer_step_on_their_own() -> None:
    param = nn.Parameter(torch.zeros(16))
    param.grad = torch.ones(16)
    optimizer = AdamW([param], lr=0.1, weight_decay=0)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    (other,) = twin.param_groups[0]["params"]
    assert other is not param
    other.grad = torch.ones(16)
    twin.step()
    torch.testing.assert_close(other.detach(), torch.full((16,), -0.2))
    torch.testing.assert_close(param.detach(), torch.full((16,), -0.1))
    assert float(twin.state[other]["step"]) == 2
    assert float(optimizer.state[param]["step"]) == 1


def test_gradients_are_not_kept_alive() -> None:
    memory = array("f", [1.0] * 37)
    param = nn.Parameter(torch.zeros(37))
    param.grad = torch.frombuffer(memory, dtype=torch.float32)
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    alive = weakref.ref(memory)
    del memory
    assert alive() is not None
    param.grad = None
    gc.collect()
    assert alive() is None


def test_a_step_without_gradients_does_nothing() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = AdamW([param], lr=0.1)
    optimizer.step()
    assert param.tolist() == [1, 1, 1]
    assert not optimizer.state
