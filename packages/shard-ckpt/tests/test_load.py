from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_ckpt import PerRank, load, save
from shard_comm import Comm, Recorded, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads


def stored(tmp_path: Path, state: Mapping[str, Any]) -> Path:
    save(state, tmp_path / "a", comm=SoloComm())
    return tmp_path / "a"


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    path = stored(tmp_path, {"model": {"w": weight}})
    template = {"model": {"w": torch.zeros(3, 4)}}
    target = template["model"]["w"]
    out = load(template, path, comm=SoloComm())
    assert out["model"]["w"] is target
    assert torch.equal(target, weight)


def test_a_module_and_its_optimizer_resume(tmp_path: Path) -> None:
    def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optim = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
        for _ in range(steps):
            optim.zero_grad()
            model(torch.ones(4)).square().sum().backward()
            optim.step()
        return model, optim

    model, optim = trained(0, 2)
    path = stored(tmp_path, {"model": model.state_dict(), "optim": optim.state_dict(), "step": 2})
    other, other_optim = trained(1, 1)
    template = {"model": other.state_dict(), "optim": other_optim.state_dict(), "step": 0}
    out = load(template, path, comm=SoloComm())
    other_optim.load_state_dict(out["optim"])
    assert out["step"] == 2
    assert other_optim.param_groups[0]["lr"] == 0.1
    for net, opt in ((model, optim), (other, other_optim)):
        opt.zero_grad()
        net(torch.ones(4)).square().sum().backward()
        opt.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_rank_reads_only_its_range(tmp_path: Path) -> None:
    full = torch.arange(10.0)
    path = stored(tmp_path, {"model": {"w": full}})

    def rank(comm: Comm) -> list[float]:
        tensor = shard_tensor(torch.zeros(10), comm=comm)
        load({"model": {"w": tensor}}, path, comm=comm)
        local: list[float] = tensor.local.tolist()
        return local

    parts = run_threads(rank, 3)
    assert [value for part in parts for value in part] == full.tolist()
    assert len(parts[0]) < 10


def test_targets_in_any_memory_order(tmp_path: Path) -> None:
    weight = torch.randn(4, 6, 2, 2)
    path = stored(tmp_path, {"m": {"w": weight, "c": torch.tensor([1 + 2j, 3 - 1j])}})
    channels = torch.zeros(4, 6, 2, 2).to(memory_format=torch.channels_last)
    memory = torch.zeros(2, dtype=torch.complex64)
    template = {"w": channels, "c": memory.conj()}
    load({"m": template}, path, comm=SoloComm())
    assert torch.equal(channels, weight)
    assert memory.tolist() == [1 - 2j, 3 + 1j]


@pytest.mark.parametrize("kind", ["direct", "cast", "strided"])
def test_autograd_sees_the_write(tmp_path: Path, kind: str) -> None:
    path = stored(tmp_path, {"m": {"w": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}})
    dtype = torch.float64 if kind == "cast" else torch.float32
    data = torch.zeros(2, 2, dtype=dtype)
    weight = nn.Parameter(data.t() if kind == "strided" else data)
    loss = (weight * weight).sum()
    load({"m": {"w": weight}}, path, comm=SoloComm(), cast=True)
    assert weight.tolist() == [[5, 6], [7, 8]]
    assert weight.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    full = torch.arange(6.0).view(2, 3)
    path = stored(tmp_path, {"m": {"direct": full, "cast": full, "strided": full}})
    with torch.inference_mode():
        direct, cast = torch.zeros(2, 3), torch.zeros(2, 3).half()
        strided = torch.zeros(3, 2).t()
    template = {"direct": direct, "cast": cast, "strided": strided}
    load({"m": template}, path, comm=SoloComm(), cast=True)
    assert all(torch.equal(tensor.float(), full) for tensor in template.values())


def test_names_must_match_unless_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(tmp_path, {"m": {"a": torch.ones(2), "b": torch.ones(2)}})
    template = {"m": {"a": torch.zeros(2), "c": torch.zeros(2)}}
    with pytest.raises(ValueError, match="lacks m: c; the template lacks m: b; pass strict=False"):
        load(template, path, comm=SoloComm())
    assert template["m"]["a"].tolist() == [0, 0]
    with caplog.at_level(logging.WARNING, logger="shard_ckpt"):
        out = load(template, path, comm=SoloComm(), strict=False)
    assert out["m"]["a"].tolist() == [1, 1]
    assert out["m"]["c"].tolist() == [0, 0]
    assert "loaded in part: the checkpoint lacks m: c; the template lacks m: b" in caplog.text


def test_long_lists_of_names_are_cut(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {str(at): torch.ones(1) for at in range(8)}})
    with pytest.raises(ValueError, match="lacks m: 0, m: 1, m: 2, m: 3, m: 4 and 3 more"):
        load({}, path, comm=SoloComm())


def test_shapes_must_match(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {"a": torch.ones(2, 3), "b": torch.ones(())}})
    template = {"m": {"a": torch.zeros(3, 2), "b": torch.zeros(1)}}
    for strict in (True, False):
        with pytest.raises(
            ValueError, match=r"m: a: expected shape \(3, 2\), got \(2, 3\) .*1 more"
        ):
            load(template, path, comm=SoloComm(), strict=strict)
    assert template["m"]["a"].abs().max() == 0


class TestCase2:
    """No silent cast: fp32 on disk, bf16 asked for."""

    def test_another_dtype_is_an_error(self, tmp_path: Path) -> None:
        path = stored(tmp_path, {"m": {"a": torch.ones(2), "w": torch.ones(3)}})
        template = {"m": {"a": torch.zeros(2), "w": torch.zeros(3, dtype=torch.bfloat16)}}
        with pytest.raises(ValueError, match="pass cast=True") as caught:
            load(template, path, comm=SoloComm())
        assert str(caught.value) == (
            "m: w: expected dtype torch.bfloat16, got torch.float32 from the checkpoint; "
            "pass cast=True to convert"
        )
        assert template["m"]["a"].tolist() == [0, 0]
        assert template["m"]["w"].tolist() == [0, 0, 0]

    @pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
    def test_cast_permits_it(self, tmp_path: Path, wanted: torch.dtype) -> None:
        weight = torch.randn(300)
        path = stored(tmp_path, {"m": {"w": weight}})

        def rank(comm: Comm) -> bool:
            template = shard_tensor(torch.zeros(300).to(wanted), comm=comm)
            load({"m": {"w": template}}, path, comm=comm, cast=True)
            expected = weight[template.spec.start : template.spec.stop].to(wanted)
            return torch.equal(template.local.float(), expected.float())

        assert run_threads(rank, 3) == [True] * 3

    def test_a_large_cast_passes_through_in_windows(self, tmp_path: Path) -> None:
        weights = {"a": torch.randn(3), "b": torch.randn(10_000_001), "c": torch.randn(5)}
        path = stored(tmp_path, {"m": {"tiny": torch.ones(3, dtype=torch.bfloat16), **weights}})
        template = {key: torch.zeros_like(value).half() for key, value in weights.items()}
        template["tiny"] = torch.zeros(3)
        load({"m": template}, path, comm=SoloComm(), cast=True)
        assert template.pop("tiny").tolist() == [1, 1, 1]
        assert all(torch.equal(template[key], weights[key].half()) for key in weights)

    @pytest.mark.parametrize(
        ("on_disk", "wanted"),
        [
            (torch.int64, torch.int32),
            (torch.int64, torch.float32),
            (torch.float32, torch.int64),
            (torch.bool, torch.uint8),
            (torch.float32, torch.complex64),
        ],
    )
    def test_integers_are_never_cast(
        self, tmp_path: Path, on_disk: torch.dtype, wanted: torch.dtype
    ) -> None:
        path = stored(tmp_path, {"m": {"w": torch.ones(3, dtype=on_disk)}})
        template = torch.zeros(3, dtype=wanted)
        for cast in (False, True):
            with pytest.raises(
                ValueError, match=f"m: w: expected dtype {wanted}, got {on_disk}.*never"
            ):
                load({"m": {"w": template}}, path, comm=SoloComm(), cast=cast)
        assert template.abs().max() == 0

    def test_step_counters_are_never_cast(self, tmp_path: Path) -> None:
        def optim(dtype: torch.dtype) -> dict[str, Any]:
            slots = {"step": torch.tensor(257.0, dtype=dtype), "exp_avg": torch.ones(2)}
            return {"optim": {"state": {"w": slots}, "param_groups": []}}

        path = stored(tmp_path, optim(torch.float32))
        template = optim(torch.bfloat16)
        with pytest.raises(ValueError, match=r"optim: w#step: .*never cast"):
            load(template, path, comm=SoloComm(), cast=True)

    def test_conversions_that_do_not_exist_are_refused_at_once(self, tmp_path: Path) -> None:
        path = stored(tmp_path, {"m": {"a": torch.ones(2), "w": torch.ones(2)}})
        packed = torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        template = {"a": torch.zeros(2), "w": packed}
        with pytest.raises(ValueError, match=r"m: w: .*torch has no such conversion"):
            load({"m": template}, path, comm=SoloComm(), cast=True)
        assert template["a"].tolist() == [0, 0]


def test_values_are_the_files_and_tensors_the_templates(tmp_path: Path) -> None:
    path = stored(
        tmp_path,
        {
            "m": {"w": torch.ones(1), "note": "x"},
            "list": [torch.ones(1), {"a": 5}],
            "optim": {"state": {}, "param_groups": [{"lr": 0.5}, {"lr": 0.25}]},
            "step": 7,
        },
    )
    template = {
        "list": [torch.zeros(1), {"a": 0}],
        "m": {"w": torch.zeros(1)},
        "optim": {"state": {}, "param_groups": [{"lr": 1.0}]},
    }
    out = load(template, path, comm=SoloComm())
    assert out == {
        "m": {"w": torch.ones(1), "note": "x"},
        "list": [torch.ones(1), {"a": 5}],
        "optim": {"state": {}, "param_groups": [{"lr": 0.5}, {"lr": 0.25}]},
        "step": 7,
    }
    assert list(out) == ["list", "m", "optim", "step"]


def test_a_value_that_is_not_there(tmp_path: Path) -> None:
    path = stored(tmp_path, {"step": 7, "nested": {"a": 1}})
    template = {"step": 0, "nested": {"b": 2}, "rng": PerRank(5)}
    with pytest.raises(
        ValueError, match=r"state\['nested'\]\['b'\]: .* no such value \(2 in all\)"
    ):
        load(template, path, comm=SoloComm())
    out = load(template, path, comm=SoloComm(), strict=False)
    assert out == {"step": 7, "nested": {"b": 2, "a": 1}, "rng": 5}


def test_values_beside_tensors_in_a_sequence(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {"l": (torch.ones(1), 5, {"a": 6}), "s": [torch.ones(1)]}})
    template = {"m": {"l": [torch.zeros(1), 0], "s": [torch.zeros(1), 7]}}
    with pytest.raises(ValueError, match=r"state\['m'\]\['s'\]\[1\]: .* no such value \(1 in all"):
        load(template, path, comm=SoloComm())
    out = load(template, path, comm=SoloComm(), strict=False)
    assert out == {"m": {"l": [torch.ones(1), 5, {"a": 6}], "s": [torch.ones(1), 7]}}


def test_a_tensor_where_the_file_has_a_value_and_the_reverse(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {"a": 1, "b": torch.ones(1), "c": [torch.ones(1)]}})
    template = {"m": {"a": torch.zeros(1), "b": 2, "c": "x"}}
    with pytest.raises(ValueError, match=r"lacks m: a; the template lacks m: b, m: c\.0"):
        load(template, path, comm=SoloComm())
    out = load(template, path, comm=SoloComm(), strict=False)
    assert out == template


def test_one_rank_that_does_not_fit_stops_all_untouched(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {"w": torch.ones(4)}})

    def rank(comm: Comm) -> tuple[str, float]:
        template = torch.zeros(4 + comm.rank // 2)
        try:
            load({"m": {"w": template}}, path, comm=comm)
        except ValueError as exc:
            return str(exc), float(template.sum())
        return "", -1.0

    results = run_threads(rank, 3)
    assert results == [(results[0][0], 0.0)] * 3
    assert "m: w: expected shape (5,), got (4,)" in results[0][0]


def test_no_tensor_travels(tmp_path: Path) -> None:
    path = stored(tmp_path, {"m": {"w": torch.ones(100_000)}})

    def rank(comm: Comm) -> list[tuple[str, int]]:
        recorded = Recorded(comm)
        load({"m": {"w": torch.zeros(100_000)}}, path, comm=recorded)
        return [(op, record.calls) for op, record in recorded.records.items()]

    assert run_threads(rank, 2) == [[("all_gather_object", 3)]] * 2


def test_no_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load({}, tmp_path / "nowhere", comm=SoloComm())
