"""Files that torch.save made, read without running anything in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shard_ckpt._errors import CheckpointError

_REASON = "WeightsUnpickler error: "
_ADVICE = "Weights only load failed"  # torch goes on to say how to load it unsafely


class Inert:
    """Stands for an object of a class that a file names and that is not made.

    Attributes:
        args: what the class would have been called with.
        state: what the object would have been given then; None for nothing.
    """

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> Inert:
        """Keep arguments, do nothing with them."""
        made = super().__new__(cls)
        made.args = args
        made.state = None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_torch(path: Path) -> Any:
    """Load a file with ``weights_only=True``, its tensors mapped from the file. Local.

    Objects of classes that torch does not let through come out as ``Inert``; nothing of theirs
    is imported or called.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: not a file that torch.save made, or damaged.

    **Memory**: none for tensors; files from before torch 1.6 cannot be mapped and are read whole.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    text = str(path)
    try:
        if not _is_zip(path):
            return torch.load(text, map_location="cpu", weights_only=True)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(text)
        inert: Any = [(type(name.rpartition(".")[2], (Inert,), {}), name) for name in names]
        with torch.serialization.safe_globals(inert):
            return torch.load(text, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as exc:  # damaged pickles raise anything
        raise CheckpointError(
            f"{path}: cannot be read as a torch.save file ({reason_of(exc)})"
        ) from exc


def reason_of(exc: Exception) -> str:
    """Return the one line of torch's message that says what is wrong. Local."""
    text = str(exc)
    _, found, reason = text.partition(_REASON)
    lines = (reason if found else text).splitlines()
    told = [line.strip() for line in lines if line.strip() and not line.startswith(_ADVICE)]
    return told[0] if told else repr(exc)


def as_sections(loaded: Any, *, label: str) -> dict[str, Any]:
    """Return what a file holds as sections of a state. Local.

    Tensors at the top go into a section ``model``; a lone optimizer state into ``optim``. An
    optimizer's integer parameters get their names where its groups have ``param_names``.

    Raises:
        CheckpointError: not a mapping, or one with tensors at the top and a ``model`` besides, or
            with two keys that are one as strings.
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{label}: expected a mapping, holds {type(loaded).__name__}")
    if _is_optimizer(loaded):
        return {"optim": _with_names(loaded)}
    tensors = {key: item for key, item in loaded.items() if isinstance(item, torch.Tensor)}
    rest = {
        str(key): _with_names(item) if _is_optimizer(item) else item
        for key, item in loaded.items()
        if key not in tensors
    }
    if len(tensors) + len(rest) < len(loaded):
        raise CheckpointError(f"{label}: two of the keys {list(loaded)} are one as strings")
    if not tensors:
        return rest
    if "model" in rest:
        raise CheckpointError(
            f"{label}: holds tensors beside a section 'model', such as {next(iter(tensors))!r}; "
            f"save them apart"
        )
    return {"model": tensors, **rest}


def _is_optimizer(node: Any) -> bool:
    return (
        isinstance(node, Mapping)
        and isinstance(node.get("state"), Mapping)
        and isinstance(node.get("param_groups"), list)
    )


def _with_names(optimizer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name parameters where every group does and no two get one name; else numbers stay."""
    groups = optimizer["param_groups"]
    if not all(map(_has_names, groups)):
        return optimizer
    names = {
        number: name
        for group in groups
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    if len(set(names.values())) < len(names):
        return optimizer
    named = [{**group, "params": [names[n] for n in group["params"]]} for group in groups]
    state = {names.get(owner, owner): slots for owner, slots in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": named}


def _has_names(group: Any) -> bool:
    if not isinstance(group, Mapping):
        return False
    numbers, names = group.get("params"), group.get("param_names")
    return isinstance(numbers, list) and isinstance(names, list) and len(numbers) == len(names)


def _is_zip(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
