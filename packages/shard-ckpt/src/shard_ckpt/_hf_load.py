"""Loading Hugging Face files into a model, each rank its own ranges."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shard_ckpt._agree import agree, attempt
from shard_ckpt._check import Source
from shard_ckpt._errors import CheckpointError
from shard_ckpt._fill import fill
from shard_ckpt._hf_folder import HF_SECTION, open_hf
from shard_ckpt._log import logger
from shard_ckpt._match import Target, match
from shard_ckpt._naming import Naming
from shard_ckpt._plan import digest_of
from shard_ckpt._state import flatten
from shard_ckpt._ties import check_twins, part_twins
from shard_comm import Comm, comm_for


@dataclass(frozen=True)
class _Opened:
    source: Source
    targets: Sequence[Target]

    def digest(self) -> str:
        index = self.source.index
        rows = [[r.name, r.dtype, r.shape, r.ranges] for _, r in sorted(index.tensors.items())]
        return digest_of([*rows, *([file.name, file.nbytes] for file in index.files)])


def load_hf(
    model: torch.nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    comm: Comm | None = None,
    names: Naming | None = None,
    strict: bool = True,
    cast: bool = False,
    timeout_s: float | None = None,
) -> None:
    """Fill a model from safetensors files as the Hugging Face libraries lay them out.

    Each rank reads only the bytes of the elements it holds, straight into them where they are on
    the CPU, contiguous and of the stored dtype. Headers, names, shapes and dtypes are checked on
    all ranks before anything is written; such files have no checksums, so contents cannot be.

    Parameters that are one tensor under several names need one of the names in the files; if
    there are more, they must hold the same bytes.

    Args:
        model: a module, of which ``state_dict()`` is filled, or a mapping of tensors. Plain tensors
            are filled whole, ``ShardTensor`` and ``DTensor`` with this rank's part.
        path: a folder with one ``.safetensors`` file, or several and a
            ``.safetensors.index.json``; or such a file; or the URL of one.
        comm: the ranks that hold the model; by default those of the process group.
        names: how the model's names become those in the files.
        strict: model and files must have the same names. Else what both have is loaded and the
            rest is logged.
        cast: convert between floating-point dtypes (and between complex ones).
        timeout_s: how long a rank waits for the slowest one, at each of two exchanges.

    Raises:
        FileNotFoundError: there are no such files.
        CheckpointError: the files are damaged or not those that their index names.
        ValueError: names, shapes or dtypes of model and files do not fit.
        TypeError: the model holds a tensor of a kind that cannot be filled.
        OSError: reading failed. Any error of one rank is raised on all. Tensors are untouched,
            unless reading failed after all checks had passed.

    **Collective**: all ranks of ``comm``; two exchanges of small objects, no tensors.
    **Memory**: up to 32 MiB per device for tensors that are not read into directly, and a copy of
    one tensor at a time where tensors are not contiguous.
    """
    comm = comm_for(comm)
    opened = attempt(lambda: _open(model, path, names or Naming(), strict=strict, cast=cast))
    heard = agree(comm, opened, share=lambda o: o.digest(), timeout_s=timeout_s)
    for rank, digest in enumerate(heard):
        if digest != heard[0]:
            raise CheckpointError(
                f"{path}: rank 0 and rank {rank} of {comm.size} see different files; load from a "
                f"folder that all ranks share"
            )
    mine = opened.value()
    filled = attempt(lambda: fill(mine.source, mine.targets))
    if filled.error is not None:
        logger.error("%s: reading failed after all checks; tensors are filled in part", path)
    agree(comm, filled, share=lambda _: None, timeout_s=timeout_s)


def _open(
    model: torch.nn.Module | Mapping[str, Any],
    path: str | os.PathLike[str],
    names: Naming,
    *,
    strict: bool,
    cast: bool,
) -> _Opened:
    held = model.state_dict() if isinstance(model, torch.nn.Module) else model
    tensors = {name: tensor for name, tensor in held.items() if not name.endswith("_extra_state")}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    names.table(tensors, what="the model")
    source = open_hf(path)
    leaves = flatten({HF_SECTION: tensors}).leaves
    found = match(leaves, source.index, strict=strict, cast=cast, rename=names)
    targets, twins = part_twins(found)
    check_twins(source, twins)
    return _Opened(source, targets)
