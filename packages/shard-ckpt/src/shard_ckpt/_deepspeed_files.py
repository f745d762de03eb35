"""The files of a DeepSpeed ZeRO checkpoint, found and loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shard_ckpt._errors import CheckpointError
from shard_ckpt._torch_file import Inert, load_torch

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_\d+_model_states\.pt")
_ADVICE = "load it with DeepSpeed and store whole tensors with torch.save, which convert reads"
_NOT_UNDERSTOOD = {
    "experts": re.compile(r"layer_\d+_expert_\d+_.*|expp_rank_\d+_.*"),
    "pipeline stages": re.compile(r"layer_\d+-model_\d+-model_states\.pt"),
    "model-parallel ranks beyond the first": re.compile(r".*mp_rank_0*[1-9]\d*_\w+_states\.pt"),
}


@dataclass(frozen=True)
class ZeroFiles:
    """What the files hold, tensors mapped from them.

    Attributes:
        folder: where they lie.
        stage: of ZeRO: 1, 2 or 3.
        models: contents of the model files: stage 3 has one per rank, else there is one.
        optims: ``optimizer_state_dict`` of each rank.
    """

    folder: Path
    stage: int
    models: Sequence[Mapping[str, Any]]
    optims: Sequence[Mapping[str, Any]]

    @property
    def world_size(self) -> int:
        """How many ranks the optimizer's state is cut over."""
        return len(self.optims)


def looks_like_zero(path: Path) -> bool:
    """Whether a folder is, or by its file ``latest`` names, a ZeRO checkpoint. Local."""
    return path.is_dir() and any(
        _OPTIM.fullmatch(item.name) or _MODEL.fullmatch(item.name) or item.name == "latest"
        for item in path.iterdir()
    )


def find_zero(path: Path) -> ZeroFiles:
    """Find and load a ZeRO checkpoint. Local.

    Args:
        path: the folder of one tag, or the one above it with a file ``latest``.

    Raises:
        FileNotFoundError: there is no such folder, or ``latest`` names none.
        CheckpointError: files are missing, damaged or not understood.

    **Memory**: tensors are mapped from the files.
    """
    folder = _tag_folder(path)
    names = sorted(item.name for item in folder.iterdir())
    _check_understood(folder, names)
    optim_ranks = _ranks_of(folder, names, _OPTIM)
    model_ranks = _ranks_of(folder, names, _MODEL)
    for found, what in ((optim_ranks, "*_optim_states.pt"), (model_ranks, "*_model_states.pt")):
        if not found:
            raise CheckpointError(
                f"{folder}: holds no {what}; bring the files of all ranks together, or convert a "
                f"file of torch.save by itself"
            )
    optims = [_optimizer_of(path) for path in _in_order(folder, optim_ranks, "optim_states")]
    stage = _stage_of(optims[0])
    expected = _partition_count(optims[0])
    if expected is not None and expected != len(optims):
        raise CheckpointError(
            f"{folder}: expected *_optim_states.pt of {expected} ranks, found {len(optims)}"
        )
    if stage == 3 and len(model_ranks) != len(optims):
        raise CheckpointError(
            f"{folder}: expected *_model_states.pt of {len(optims)} ranks, found {len(model_ranks)}"
        )
    models = [_mapping(path) for path in _in_order(folder, model_ranks, "model_states")]
    return ZeroFiles(folder, stage, models, optims)


def _check_understood(folder: Path, names: Sequence[str]) -> None:
    if (folder / "zero").is_dir() and not any(_OPTIM.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{folder / 'zero'}: a universal checkpoint; convert the ZeRO one that it was made from"
        )
    for what, pattern in _NOT_UNDERSTOOD.items():
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise CheckpointError(
                f"{folder}: files of {what} are not understood ({len(found)}, such as "
                f"{found[0]}); {_ADVICE}"
            )


def _ranks_of(folder: Path, names: Sequence[str], pattern: re.Pattern[str]) -> dict[int, Path]:
    matches = [matched for name in names if (matched := pattern.fullmatch(name))]
    return {int(matched[1] or 0): folder / matched[0] for matched in matches}


def _tag_folder(path: Path) -> Path:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such folder")
    latest = path / "latest"
    if not latest.is_file():
        return path
    tag = latest.read_text(encoding="utf-8").strip()
    if not (path / tag).is_dir():
        raise FileNotFoundError(f"{path / tag}: no such folder, though {latest} names it")
    return path / tag


def _in_order(folder: Path, ranks: Mapping[int, Path], what: str) -> list[Path]:
    for rank in range(len(ranks)):
        if rank not in ranks:
            raise CheckpointError(f"{folder}: rank {rank}'s *_{what}.pt is missing")
    return [ranks[rank] for rank in range(len(ranks))]


def _mapping(path: Path) -> Mapping[str, Any]:
    loaded = load_torch(path)
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{path}: expected a mapping, holds {type(loaded).__name__}")
    return loaded


def _optimizer_of(path: Path) -> Mapping[str, Any]:
    state = _mapping(path).get("optimizer_state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path}: holds no optimizer_state_dict")
    return state


def _stage_of(optim: Mapping[str, Any]) -> int:
    """Return the stage; it is stored as an enumeration of DeepSpeed's."""
    stage = optim.get("zero_stage", 1)
    if isinstance(stage, Inert) and len(stage.args) == 1:
        stage = stage.args[0]
    if stage not in (1, 2, 3):
        raise CheckpointError(f"zero_stage: expected 1, 2 or 3, got {stage!r}")
    return int(stage)


def _partition_count(optim: Mapping[str, Any]) -> int | None:
    count = optim.get("partition_count")
    if isinstance(count, list):  # one per parameter group
        return max(count, default=None)
    return count if count is None else int(count)


def flat_tensors(value: Any, *, label: str) -> list[torch.Tensor]:
    """Return a list of one-dimensional tensors. Local.

    Raises:
        CheckpointError: it is something else.
    """
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(item, torch.Tensor) and item.ndim == 1 for item in items):
        raise CheckpointError(f"{label}: expected flat tensors")
    return items
