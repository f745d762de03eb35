"""SGD, Adam and Lion: torch's results, the same bits on any number of ranks, state by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shard_comm import Comm, Recorded, SoloComm
from shard_flat import ShardTensor
from shard_optim import SGD, Adam, Lion
from shard_testing import draw_steps, run_threads, take_steps

MakeParams = Callable[[Comm, Sequence[torch.Tensor]], list[ShardTensor]]
GiveGrads = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor | None]], None]
TrainDecoder = Callable[..., list[float]]
Make = Callable[..., Any]


class WrittenOutLion(torch.optim.Optimizer):
    """Lion as its paper writes it, one parameter at a time."""

    def __init__(self, params: Iterable[Any], **hyper: Any) -> None:
        defaults = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, **hyper}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                direction = (beta1 * moment + (1 - beta1) * param.grad).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * direction)
                moment.mul_(beta2).add_((1 - beta2) * param.grad)


def torch_sgd(params: Any, **hyper: Any) -> Any:
    return torch.optim.SGD(params, fused=True, **hyper)


def torch_adam(params: Any, **hyper: Any) -> Any:
    return torch.optim.Adam(params, fused=True, **hyper)


KINDS: dict[str, tuple[Make, Make, dict[str, Any]]] = {
    "sgd": (SGD, torch_sgd, {"lr": 0.1}),
    "momentum": (SGD, torch_sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "dampened": (SGD, torch_sgd, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3}),
    "nesterov": (SGD, torch_sgd, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "maximize": (SGD, torch_sgd, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    "adam": (Adam, torch_adam, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    "lion": (Lion, WrittenOutLion, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.1}),
}
kinds = pytest.mark.parametrize("kind", KINDS)
SIZES = [37, 0, 5, 2001, 1, 64, 1211, 7]


def data(dtype: torch.dtype, steps: int) -> tuple[list[torch.Tensor], list[list[Any]]]:
    fulls, grads = draw_steps(SIZES, dtype, steps)
    grads[1][3] = None  # counters part
    return fulls, grads


def train(make: Make, fulls: Sequence[torch.Tensor], steps: Any, **hyper: Any) -> list[Any]:
    params, _ = take_steps(lambda params: make(params, **hyper), fulls, steps)
    return [param.detach() for param in params]


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_results_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    ours, theirs, hyper = KINDS[kind]
    fulls, steps = data(dtype, 5)
    close = 1e-6 if dtype == torch.float32 else 1e-14
    for a, b in zip(
        train(ours, fulls, steps, **hyper), train(theirs, fulls, steps, **hyper), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=close, atol=close)


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_in_16_bits(kind: str, dtype: torch.dtype) -> None:
    """Two steps from the same numbers are those of float32, rounded; a sign of Lion's may turn."""
    ours, theirs, hyper = KINDS[kind]
    fulls, steps = draw_steps(SIZES, torch.float32, 2, drawn=dtype)
    narrow = [[g.to(dtype) for g in grads] for grads in steps]
    wide = train(theirs, fulls, steps, **hyper)
    for a, b in zip(train(ours, [f.to(dtype) for f in fulls], narrow, **hyper), wide, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=2**-7, atol=2**-6)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_same_bits_on_any_number_of_ranks(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, dtype: torch.dtype, world_size: int
) -> None:
    make, _, hyper = KINDS[kind]
    fulls, steps = data(dtype, 4)
    plain = train(make, fulls, steps, **hyper)

    def rank(comm: Comm) -> list[torch.Tensor]:
        recorded = Recorded(comm)
        params = make_params(recorded, fulls)
        optimizer = make(params, **hyper)
        for grads in steps:
            give_grads(params, grads)
            optimizer.step()
        assert not recorded.records  # nothing is sent
        return [param.full_tensor().detach() for param in params]

    for sharded in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(sharded, plain, strict=True))


class Kernels(TorchDispatchMode):
    """Notes the sizes of the first list that each fused call was given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fused: list[list[int]] = []
        self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        if "_fused_" in str(func):
            self.fused.append([tensor.numel() for tensor in args[0]])
        return func(*args, **(kwargs or {}))


@kinds
def test_a_group_is_one_flat_call(
    make_params: MakeParams, give_grads: GiveGrads, kind: str
) -> None:
    make, _, hyper = KINDS[kind]
    fulls = [torch.ones(5) for _ in range(300)]
    params = make_params(SoloComm(), fulls)
    optimizer = make(params, **hyper)
    give_grads(params, fulls)
    optimizer.step()
    give_grads(params, fulls)
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.fused == ([] if kind == "lion" else [[1488, 16]])
    assert kernels.calls < 30


@kinds
@pytest.mark.parametrize("world_size", [1, 3])
def test_state_goes_by_name_and_resumes(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    make, _, hyper = KINDS[kind]
    fulls, steps = data(torch.float32, 4)
    expected = train(make, fulls, steps, **hyper)

    def rank(comm: Comm) -> list[torch.Tensor]:
        params = make_params(comm, fulls)
        optimizer = make(params, **hyper)
        for grads in steps[:2]:
            give_grads(params, grads)
            optimizer.step()
        saved = optimizer.state_dict()
        assert sorted(saved["state"]) == sorted(f"p{i}" for i in range(len(SIZES)))
        for own in saved["state"].values():
            assert all(isinstance(v, ShardTensor) for k, v in own.items() if k != "step")
        twins = make_params(comm, [p.full_tensor().detach() for p in params])
        resumed = make(twins)  # hyper-parameters come with the state
        resumed.state_dict(allocate=True)
        resumed.load_state_dict(saved)
        for grads in steps[2:]:
            give_grads(twins, grads)
            resumed.step()
        return [twin.full_tensor().detach() for twin in twins]

    for found in run_threads(rank, world_size):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@kinds
def test_from_the_references_state_dict(kind: str) -> None:
    """A run may change to ours between steps; a buffer that is there is not a first one."""
    make, reference, hyper = KINDS[kind]
    fulls, steps = data(torch.float32, 4)
    steps[1][3] = steps[0][3]
    expected = train(reference, fulls, steps, **hyper)
    params = [nn.Parameter(full.clone()) for full in fulls]
    first = reference(params, **hyper)
    second = make(params)
    for number, grads in enumerate(steps):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        if number == 2:
            second.load_state_dict(first.state_dict())
        (first if number < 2 else second).step()
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-6)


def test_momentum_that_starts_late_takes_its_first_gradient_whole() -> None:
    param = nn.Parameter(torch.zeros(16))
    param.grad = torch.ones(16)
    optimizer = SGD([param], lr=1.0, dampening=0.5)
    optimizer.step()
    assert sorted(optimizer.state[param]) == ["step"]
    optimizer.param_groups[0]["momentum"] = 0.5
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0] * 16
    optimizer.step()
    assert optimizer.state[param]["momentum_buffer"].tolist() == [1.0] * 16  # half and half
    assert param.tolist() == [-3.0] * 16


def test_new_and_old_buffers_in_one_run() -> None:
    """Neighbours of which one had a gradient before: the other's first one is taken whole."""
    buffer, grads = torch.zeros(32), torch.ones(32)
    params = [nn.Parameter(part) for part in buffer.split(16)]
    optimizer = SGD(params, lr=1.0, momentum=0.5, dampening=0.75)
    params[0].grad = grads[:16]
    optimizer.step()
    params[1].grad = grads[16:]
    optimizer.step()
    assert params[0].tolist() == [-1.75] * 16
    assert params[1].tolist() == [-1.0] * 16


def test_lion_by_hand() -> None:
    """One step of 0.1 down, then the average wins over the gradient."""
    param = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = Lion([param], lr=0.1, betas=(0.5, 0.5), weight_decay=1.0)
    param.grad = torch.tensor([4.0, -4.0])
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([0.8, 1.0]))  # 0.9 -/+ 0.1
    assert optimizer.state[param]["exp_avg"].tolist() == [2.0, -2.0]
    param.grad = torch.tensor([-1.0, 3.0])
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.tensor([0.62, 0.8]))


@kinds
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_groups_and_closures(kind: str, as_tensor: bool) -> None:
    make, reference, hyper = KINDS[kind]
    rate = hyper["lr"]
    ends = []
    for build in (make, reference):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(32)) for _ in range(2)]
        optimizer = build([("a", params[0])], **{**hyper, "lr": rate})
        if as_tensor and build is make:
            optimizer.param_groups[0]["lr"] = torch.tensor(rate)
        optimizer.add_param_group({"params": [("b", params[1])], "lr": 2 * rate})
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        for _ in range(3):

            def closure(params: Any = params, optimizer: Any = optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.stack([(p * p).sum() for p in params]).sum()
                loss.backward()
                return loss

            if build is WrittenOutLion:
                closure()
                optimizer.step()
            else:
                assert optimizer.step(closure) > 0
            schedule.step()
        ends.append([p.detach() for p in params])
        assert float(schedule.get_last_lr()[1]) == pytest.approx(rate / 4)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@kinds
@pytest.mark.parametrize("world_size", [1, 2])
def test_scaler_skips_on_all_ranks(
    make_params: MakeParams, give_grads: GiveGrads, kind: str, world_size: int
) -> None:
    make, _, hyper = KINDS[kind]

    def rank(comm: Comm) -> tuple[bool, bool, float]:
        (param,) = make_params(comm, [torch.ones(40)])
        optimizer = make([param], **hyper)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(torch.zeros(()))
        moved = []
        for last in (float("inf"), 8.0):
            grad = torch.full((40,), 8.0)
            grad[-1] = last
            give_grads([param], [grad])
            scaler.step(optimizer)
            scaler.update()
            moved.append(bool(param.full_tensor().ne(1).any()))
        return moved[0], moved[1], scaler.get_scale()

    assert run_threads(rank, world_size) == [(False, True, 4.0)] * world_size


@kinds
def test_a_small_language_model(train_decoder: TrainDecoder, kind: str) -> None:
    """Losses of every step are those of one process, and close to those of the reference."""
    make, reference, hyper = KINDS[kind]
    hyper = {**hyper, "maximize": False} if "maximize" in hyper else hyper
    plain = train_decoder(None, lambda params: make(params, **hyper))
    assert plain[-1] < 0.7 * plain[0]
    for sharded in run_threads(train_decoder, 3, lambda params: make(params, **hyper)):
        assert sharded == plain
    theirs = train_decoder(None, lambda params: reference(params, **hyper))
    assert plain == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize(
    ("make", "hyper", "message"),
    [
        (SGD, {"lr": -1.0}, "expected lr >= 0, got -1.0"),
        (SGD, {"momentum": -0.1}, "expected momentum >= 0, got -0.1"),
        (SGD, {"weight_decay": float("nan")}, "expected weight_decay >= 0, got nan"),
        (SGD, {"nesterov": True}, "expected momentum > 0 and dampening 0 with nesterov, got 0"),
        (
            SGD,
            {"nesterov": True, "momentum": 0.5, "dampening": 0.1},
            "expected momentum > 0 and dampening 0 with nesterov, got 0.5 and 0.1",
        ),
        (Adam, {"eps": -1.0}, "expected eps >= 0, got -1.0"),
        (Lion, {"betas": (0.9, 1.0)}, r"expected two betas in \[0, 1\), got \(0.9, 1.0\)"),
        (Lion, {"lr": -1.0}, "expected lr >= 0, got -1.0"),
    ],
)
def test_hyper_parameters_out_of_range(make: Make, hyper: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make([nn.Parameter(torch.ones(2))], **hyper)
    with pytest.raises(ValueError, match=rf"^group 0 \(w, ...\): {message}"):
        make([{"params": [("w", nn.Parameter(torch.ones(2)))], **hyper}])


def test_state_of_another_kind_of_optimizer() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    sgd = SGD([param], momentum=0.9)
    sgd.step()
    with pytest.raises(ValueError, match=r"^0\.0: the state has no 'exp_avg', only"):
        Lion([param]).load_state_dict(sgd.state_dict())
    theirs = torch.optim.AdamW([param], weight_decay=0.1)
    with pytest.raises(ValueError, match="saved with decoupled_weight_decay=True, which this Adam"):
        Adam([param]).load_state_dict(theirs.state_dict())
