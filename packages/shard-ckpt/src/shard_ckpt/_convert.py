"""From other libraries' checkpoints to ours, and back."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from shard_ckpt._dcp_read import read_dcp
from shard_ckpt._dcp_write import write_dcp
from shard_ckpt._deepspeed import read_zero
from shard_ckpt._deepspeed_files import looks_like_zero
from shard_ckpt._errors import CheckpointError
from shard_ckpt._hf_folder import SUFFIX
from shard_ckpt._index import INDEX_NAME
from shard_ckpt._lazy import LazyTensors, save_lazy
from shard_ckpt._marker import DCP_METADATA, MARKER_NAME
from shard_ckpt._own_read import read_hf, read_own
from shard_ckpt._places import Place, names_in, place_of
from shard_ckpt._remote import RemotePath
from shard_ckpt._torch_file import as_sections, inert_name, load_torch

_HOW_TO_SKIP = "skip=[...] in Python, --skip on the command line"


def convert(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    source_format: str = "auto",
    target_format: str = "shard",
    sections: Mapping[str, str] | None = None,
    skip: Collection[str] = (),
) -> None:
    """Write a checkpoint of one format as another, a tensor at a time.

    ==============  ==============================================================================
    ``shard``       a folder that ``save`` made
    ``dcp``         a folder of torch.distributed.checkpoint
    ``torch``       a file of torch.save, such as a full state dict of FSDP
    ``deepspeed``   a folder of DeepSpeed ZeRO, stage 1, 2 or 3, without model parallelism
    ``hf``          safetensors files, one or with an index
    ==============  ==============================================================================

    Nothing that a file names is imported or called: pickles are read with ``weights_only=True``,
    and objects of other classes are an error that says where they stand, unless skipped.

    Args:
        source: a folder or file; of a checkpoint or Hugging Face files also a URL.
        path: the folder to make, or its URL; it must not exist.
        source_format: one of the above, or ``auto`` to tell by the files' names.
        target_format: ``shard`` or ``dcp``; for Hugging Face files there is ``export_hf``.
        sections: new names for sections, the keys at the top of what the source holds.
        skip: sections to leave out.

    Raises:
        FileNotFoundError: there is no such source.
        CheckpointError: the source is damaged or not understood.
        FileExistsError: ``path`` exists.
        ValueError: a format or section that there is not.
        TypeError: the source holds a value that cannot be stored, or ``skip`` is a string.
        OSError: reading or writing failed; nothing is left at ``path``.

    **Collective**: local; for one process, on rank 0 say. Of several that make one target, all but
    the first raise FileExistsError.
    **Memory**: one tensor at a time, twice where a tensor is stored in chunks.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip: expected a sequence of sections, got the string {skip!r}")
    where, target = place_of(source), place_of(path)
    if source_format == "auto":
        source_format = detect(where)
    if source_format not in _READERS:
        raise ValueError(
            f"source_format: expected one of {sorted(_READERS)}, got {source_format!r}"
        )
    if target_format not in ("shard", "dcp"):
        raise ValueError(f"target_format: expected 'shard' or 'dcp', got {target_format!r}")
    if isinstance(where, RemotePath) and source_format not in ("shard", "hf"):
        raise ValueError(f"{where}: {source_format} is read from folders only; copy it to one")
    lazy = LazyTensors()
    state = _renamed(_READERS[source_format](where, lazy), sections or {}, skip)
    try:
        (write_dcp if target_format == "dcp" else save_lazy)(state, target, lazy=lazy)
    except FileExistsError as exc:
        text = (
            f"{exc.strerror or exc}; if it was made just now: convert is for one process, so call "
            f"it on rank 0 alone"
        )
        raise FileExistsError(errno.EEXIST, text, str(target)) from exc
    except TypeError as exc:
        raise TypeError(f"{exc}; or leave its section out: {_HOW_TO_SKIP}") from exc


def detect(path: Place) -> str:
    """Return the format of a file or folder, by the names of files. Local.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is none that ``convert`` knows.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return "hf" if path.name.endswith(SUFFIX) else "torch"
    names = set(names_in(path))
    if MARKER_NAME in names or INDEX_NAME in names:
        return "shard"
    if DCP_METADATA in names:
        return "dcp"
    if any(name.endswith(SUFFIX) for name in names):
        return "hf"
    if isinstance(path, Path) and looks_like_zero(path):
        return "deepspeed"
    raise CheckpointError(
        f"{path}: not a checkpoint of a known format; name it if it is one of "
        f"{', '.join(sorted(_READERS))}"
    )


def _check_made(node: Any, path: str) -> None:
    """Raise where a pickled object stands that was not made."""
    if isinstance(node, Mapping):
        for key, item in node.items():
            _check_made(item, f"{path}[{key!r}]")
    elif type(node) in (list, tuple):
        for at, item in enumerate(node):
            _check_made(item, f"{path}[{at}]")
    name = inert_name(node)
    if name is not None:
        raise TypeError(
            f"state{path}: expected a tensor, number, string, bytes, None, list, tuple or mapping, "
            f"got a pickled {name}, which is not made; leave its section out: {_HOW_TO_SKIP}"
        )


def _read_torch(path: Path, lazy: LazyTensors) -> dict[str, Any]:
    return as_sections(load_torch(path), label=str(path))  # mapped tensors need no stand-ins


def _renamed(
    state: Mapping[str, Any], sections: Mapping[str, str], skip: Collection[str]
) -> dict[str, Any]:
    for argument, names in (("sections", sections), ("skip", skip)):
        for name in names:
            if name not in state:
                raise ValueError(f"{argument}: expected some of {sorted(state)}, got {name!r}")
    kept = [name for name in state if name not in skip]
    for name in kept:
        _check_made(state[name], f"[{name!r}]")
    result = {sections.get(name, name): state[name] for name in kept}
    if len(result) != len(kept):
        raise ValueError(f"sections: two of {kept} would get one name")
    return result


_READERS: dict[str, Callable[[Any, LazyTensors], dict[str, Any]]] = {
    "shard": read_own,
    "dcp": read_dcp,
    "torch": _read_torch,
    "deepspeed": read_zero,
    "hf": read_hf,
}
