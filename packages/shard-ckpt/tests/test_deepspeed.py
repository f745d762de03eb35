"""Reading DeepSpeed's folders, built here with the layout and the keys that they have."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shard_ckpt import CheckpointError, convert, inspect, load, verify
from shard_comm import SoloComm

# Two groups, sizes that no number of ranks divides, one parameter smaller than any.
GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (7, 5), "layers.0.weight": (3, 3)},
    {"layers.0.bias": (5,), "scale": (1,)},
]
FROZEN = torch.arange(11.0).bfloat16()
BUFFER = torch.arange(4)
TAG = "global_step12"


def value(name: str, slot: str) -> torch.Tensor:
    """Return a parameter's float32 values, or those of a slot of the optimizer."""
    shapes = {name: shape for group in GROUPS for name, shape in group.items()}
    at = list(shapes).index(name) * 100 + ["fp32", "exp_avg", "exp_avg_sq"].index(slot) * 1000
    return torch.arange(math.prod(shapes[name]), dtype=torch.float32).view(shapes[name]) + at


@pytest.fixture
def stage_enum(monkeypatch: pytest.MonkeyPatch) -> type[IntEnum]:
    """Return a class that pickles under the name of DeepSpeed's, while the fixture lasts."""
    name = "deepspeed.runtime.zero.config"
    made = IntEnum("made", {"optimizer_states": 1, "gradients": 2, "weights": 3})
    made.__name__ = made.__qualname__ = "ZeroStageEnum"
    made.__module__ = name
    module = ModuleType(name)
    module.ZeroStageEnum = made  # type: ignore[attr-defined]
    for parent in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    return made


def loss_scaler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an object of a class that is not there when the file is read."""
    name = "deepspeed.runtime.fp16.loss_scaler"
    made = type("LossScaler", (), {"__module__": name})
    module = ModuleType(name)
    module.LossScaler = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.fp16", ModuleType(name))
    scaler = made()
    scaler.cur_scale = 1.0
    return scaler


def model_file(**more: Any) -> dict[str, Any]:
    shapes = [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in GROUPS]
    return {
        "module": OrderedDict(positions=BUFFER),
        "buffer_names": ["positions"],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": {"adapter": FROZEN.shape},
        "frozen_param_fragments": {"adapter": FROZEN},
        "shared_params": {"head.weight": "embed.weight"},
        "lr_scheduler": {"last_batch_iteration": 12},
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": 0,
        "global_steps": 12,
        "global_samples": 96,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_config": {"train_batch_size": 8},
        "ds_version": "0.16.4",
        "epoch": 3,
        **more,
    }


def hypers(numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [
        {"lr": 0.1 * (n + 1), "betas": (0.9, 0.95), "params": list(ids)}
        for n, ids in enumerate(numbers)
    ]


def write_flat_stage(
    folder: Path, world: int, stage: Any, *, scaler: Any, elastic: bool = False, bf16: bool = False
) -> None:
    """Write what stages 1 and 2 write: each group flat, padded at its end, cut over ranks.

    Elastic files have no padding and no groups, and the step stands by itself.
    """
    folder.mkdir(parents=True)
    torch.save(model_file(), folder / "mp_rank_00_model_states.pt")
    flats: dict[str, list[torch.Tensor]] = {}
    paddings = []
    for slot in ("fp32", "exp_avg", "exp_avg_sq"):
        flats[slot] = []
        for group in GROUPS:
            flat = torch.cat([value(name, slot).flatten() for name in group])
            padding = -flat.numel() % (2 * world)
            flats[slot].append(torch.cat([flat, flat.new_full((padding,), -1)]))
            if slot == "fp32":
                paddings.append(padding)
    for rank in range(world):

        def own(slot: str, group: int, lean: bool, rank: int = rank) -> torch.Tensor:
            part = flats[slot][group].chunk(world)[rank]
            cut = paddings[group] if lean and rank == world - 1 else 0
            return part[: part.numel() - cut].clone()

        step = {} if elastic else {"step": 12}
        slots = [
            {
                **step,
                "exp_avg": own("exp_avg", g, elastic),
                "exp_avg_sq": own("exp_avg_sq", g, elastic),
            }
            for g in range(len(GROUPS))
        ]
        base: Any = {"state": dict(enumerate(slots)), "param_groups": hypers([[0], [1]])}
        state = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "clip_grad": 1.0,
            "base_optimizer_state": slots if elastic else base,
            "single_partition_of_fp32_groups": [own("fp32", g, True) for g in range(len(GROUPS))],
            "zero_stage": stage,
            "group_paddings": [p if rank == world - 1 else 0 for p in paddings],
            "partition_count": [world] * len(GROUPS),
            "ds_version": "0.16.4",
        }
        if elastic:
            state["base_optimizer_state_step"] = 12
        name = f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}}, folder / name)


def write_stage_3(folder: Path, world: int, stage: Any, *, scaler: Any) -> None:
    """Write what stage 3 writes: each parameter padded and cut over ranks by itself."""
    folder.mkdir(parents=True)
    frozen = torch.cat([FROZEN, FROZEN.new_zeros(-FROZEN.numel() % world)]).chunk(world)
    for rank in range(world):

        def own(slot: str, group: int, rank: int = rank) -> torch.Tensor:
            parts = []
            for name in GROUPS[group]:
                flat = value(name, slot).flatten()
                padded = torch.cat([flat, flat.new_full((-flat.numel() % world,), -1)])
                parts.append(padded.chunk(world)[rank])
            return torch.cat(parts)

        model = model_file(frozen_param_fragments={"adapter": frozen[rank].clone()})
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        slots = {
            g: {
                "step": torch.tensor(12.0),
                "exp_avg": own("exp_avg", g),
                "exp_avg_sq": own("exp_avg_sq", g),
            }
            for g in range(len(GROUPS))
        }
        state = {
            "zero_stage": stage,
            "loss_scaler": scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": world,
            "optimizer_state_dict": {"state": slots, "param_groups": hypers([[0], [1]])},
            "fp32_flat_groups": [own("fp32", g) for g in range(len(GROUPS))],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_config": {}}, folder / name)


def check_converted(path: Path, *, groups: bool = True) -> None:
    assert verify(path) == ()
    names = [name for group in GROUPS for name in group]
    slots = ("exp_avg", "exp_avg_sq")
    template: dict[str, Any] = {
        "model": {
            **{name: torch.zeros_like(value(name, "fp32")) for name in names},
            "head.weight": torch.zeros(7, 5),
            "adapter": torch.zeros_like(FROZEN),
            "positions": torch.zeros_like(BUFFER),
        },
        "optim": {
            "state": {
                name: {
                    "step": torch.zeros(()),
                    **{slot: torch.zeros_like(value(name, slot)) for slot in slots},
                }
                for name in names
            },
            "param_groups": [{}, {}],
        },
        "deepspeed": {},
    }
    got = load(template, path, comm=SoloComm())
    for name in names:
        assert torch.equal(got["model"][name], value(name, "fp32")), name
        state = got["optim"]["state"][name]
        assert state["step"].item() == 12
        assert all(torch.equal(state[slot], value(name, slot)) for slot in slots), name
    assert torch.equal(got["model"]["head.weight"], value("embed.weight", "fp32"))
    assert torch.equal(got["model"]["adapter"], FROZEN)
    assert torch.equal(got["model"]["positions"], BUFFER)
    stored = got["optim"]["param_groups"]
    assert [group["params"] for group in stored] == [list(group) for group in GROUPS]
    if groups:
        assert [group["lr"] for group in stored] == [0.1, 0.2]
    assert got["deepspeed"]["global_steps"] == 12
    assert got["deepspeed"]["epoch"] == 3
    assert got["deepspeed"]["lr_scheduler"] == {"last_batch_iteration": 12}
    ties = {r.name: r.tie for r in inspect(path).tensors if r.tie}
    assert ties == {"head.weight": ("model", "embed.weight")}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage_enum: type[IntEnum],
    stage: int,
    world_size: int,
) -> None:
    write = write_stage_3 if stage == 3 else write_flat_stage
    with monkeypatch.context() as patch:
        write(tmp_path / "ds" / TAG, world_size, stage_enum(stage), scaler=loss_scaler(patch))
    (tmp_path / "ds" / "latest").write_text(TAG)
    convert(tmp_path / "ds", tmp_path / "c")
    check_converted(tmp_path / "c")


def test_elastic_and_bf16_files(tmp_path: Path) -> None:
    write_flat_stage(tmp_path / TAG, 2, 2, scaler=None, elastic=True, bf16=True)
    convert(tmp_path / TAG, tmp_path / "c")
    check_converted(tmp_path / "c", groups=False)


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    write_flat_stage(tmp_path / "a", 3, 2, scaler=None)
    (tmp_path / "a" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"expected \*_optim_states\.pt of 3 ranks, found 2"):
        convert(tmp_path / "a", tmp_path / "c")
    (tmp_path / "a" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"a: rank 0's \*_optim_states\.pt is missing"):
        convert(tmp_path / "a", tmp_path / "c")
    write_stage_3(tmp_path / "b", 3, 3, scaler=None)
    (tmp_path / "b" / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"expected \*_model_states\.pt of 3 ranks, found 2"):
        convert(tmp_path / "b", tmp_path / "c")


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_that_do_not_fit_are_refused(tmp_path: Path, stage: int) -> None:
    (write_stage_3 if stage == 3 else write_flat_stage)(tmp_path / "a", 2, stage, scaler=None)
    path = tmp_path / "a" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    loaded = torch.load(path)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    held = loaded["optimizer_state_dict"][key]
    held[1] = held[1][:-1]
    torch.save(loaded, path)
    problem = "partition 1 has 26 elements" if stage == 3 else r"scale needs elements \[5, 6\)"
    with pytest.raises(CheckpointError, match=f"a: {problem}"):
        convert(tmp_path / "a", tmp_path / "c")
    held[1] = torch.cat([held[1], torch.zeros(9)])
    torch.save(loaded, path)
    with pytest.raises(CheckpointError, match=r"a: partition 1 has \d+ elements, its parameters"):
        convert(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            ["mp_rank_01_model_states.pt", "zero_pp_rank_0_mp_rank_10_optim_states.pt"],
            "model-parallel ranks beyond the first",
        ),
        (["layer_0_expert_1_mp_rank_00_model_states.pt"], "experts"),
        (["expp_rank_0_mp_rank_00_optim_states.pt"], "experts"),
        (["layer_00-model_00-model_states.pt"], "pipeline stages"),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, names: list[str], found: str) -> None:
    write_flat_stage(tmp_path / "a", 1, 2, scaler=None)
    for name in names:
        (tmp_path / "a" / name).touch()
    count = rf"\({len(names)}, such as {names[0]}\)"
    expected = f"a: files of {found} are not understood {count}; load it with DeepSpeed"
    with pytest.raises(CheckpointError, match=expected):
        convert(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("what", ["optim", "model"])
def test_a_folder_without_one_kind_of_files_is_told(tmp_path: Path, what: str) -> None:
    write_flat_stage(tmp_path / "a", 2, 2, scaler=None)
    for path in (tmp_path / "a").glob(f"*_{what}_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=rf"a: holds no \*_{what}_states\.pt; bring"):
        convert(tmp_path / "a", tmp_path / "c")


def test_universal_checkpoints_are_told(tmp_path: Path) -> None:
    (tmp_path / "zero" / "layers.0.weight").mkdir(parents=True)
    (tmp_path / "zero" / "layers.0.weight" / "fp32.pt").touch()
    (tmp_path / "mp_rank_00_model_states.pt").touch()
    with pytest.raises(CheckpointError, match="zero: a universal checkpoint; convert the ZeRO"):
        convert(tmp_path, tmp_path / "c")


def test_latest_that_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(FileNotFoundError, match="global_step7: no such folder, though"):
        convert(tmp_path, tmp_path / "c")


def test_a_group_without_state_has_none(tmp_path: Path) -> None:
    write_flat_stage(tmp_path / "a", 2, 2, scaler=None)
    for path in (tmp_path / "a").glob("*_optim_states.pt"):
        loaded = torch.load(path)
        del loaded["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        torch.save(loaded, path)
    convert(tmp_path / "a", tmp_path / "c")
    names = [r.name for r in inspect(tmp_path / "c").tensors if r.section == "optim"]
    assert names == [
        f"{name}#{slot}"
        for name in ("layers.0.bias", "scale")
        for slot in ("exp_avg", "exp_avg_sq", "step")
    ]


@pytest.mark.parametrize("key", ["module", "frozen_param_fragments"])
def test_model_files_without_their_fields_are_damage(tmp_path: Path, key: str) -> None:
    write_flat_stage(tmp_path / "z", 2, 1, scaler=None)
    file = tmp_path / "z" / "mp_rank_00_model_states.pt"
    table = torch.load(file, weights_only=True)
    del table[key]
    torch.save(table, file)
    with pytest.raises(CheckpointError, match=rf"z: not laid out as DeepSpeed does .*'{key}'"):
        convert(tmp_path / "z", tmp_path / "c")
