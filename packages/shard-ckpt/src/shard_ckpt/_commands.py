"""What each command does, apart from reading arguments and showing results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shard_ckpt._checkpointer import Checkpointer, remove_checkpoint, why_not_committed
from shard_ckpt._convert import convert
from shard_ckpt._diff import diff
from shard_ckpt._draft import is_draft, sweep
from shard_ckpt._errors import CheckpointError
from shard_ckpt._hf_export import export_hf
from shard_ckpt._inspect import inspect, verify
from shard_ckpt._marker import MARKER_NAME, read_marker
from shard_ckpt._places import names_in, place_of
from shard_ckpt._reindex import reindex
from shard_ckpt._remote import RemotePath
from shard_ckpt._screen import format_bytes, format_table
from shard_ckpt._values import RankValues, encode
from shard_comm import SoloComm

FOUND = 1
"""The exit status of a command that found problems or differences."""


@dataclass(frozen=True)
class Reply:
    """What a command came to.

    Attributes:
        table: for programs; what JSON can say.
        lines: for people.
        status: exit status.
    """

    table: Any
    lines: Sequence[str]
    status: int = 0


def list_folder(path: str) -> Reply:
    """List the checkpoints in a folder, and what else looks like one."""
    place = place_of(path)
    if (place / MARKER_NAME).exists():
        raise ValueError(f"{path}: a checkpoint itself; list the folder that holds it")
    found: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for name in names_in(place):
        folder = place / name
        reason = why_not_committed(folder)
        if reason is None and not is_draft(name) and (folder / MARKER_NAME).exists():
            try:
                marker = read_marker(folder)
            except CheckpointError as exc:  # of a folder that is not called like a step
                reason = str(exc)
            else:
                row = {"name": name, "bytes": marker.nbytes, "files": marker.files}
                found.append({**row, "world_size": marker.world_size, "save_id": marker.save_id})
        if reason is not None:
            skipped.append({"name": name, "reason": reason})
    rows = [("name", "size", "files", "ranks")] if found else []
    rows += [
        (str(r["name"]), format_bytes(r["bytes"]), str(r["files"]), str(r["world_size"]))
        for r in found
    ]
    lines = format_table(rows) + [f"skipped {s['name']}: {s['reason']}" for s in skipped]
    return Reply({"checkpoints": found, "skipped": skipped}, lines)


def show(path: str) -> Reply:
    """Show what a checkpoint holds."""
    info = inspect(path)
    tensors = [
        {
            "section": record.section,
            "name": record.name,
            "dtype": record.dtype,
            "shape": record.shape,
            "bytes": record.numel * record.itemsize,
            "ranges": [part.row() for part in record.ranges],
            "tie": record.tie,
        }
        for record in info.tensors
    ]
    values = encode(_with_lists(info.values), path="state")
    table = {
        "path": path,
        "save_id": info.save_id,
        "world_size": info.world_size,
        "bytes": info.nbytes,
        "tensors": tensors,
        "files": [{"name": file.name, "bytes": file.nbytes} for file in info.files],
        "values": values,
    }
    rows = [("section", "tensor", "dtype", "shape", "size", "pieces")]
    rows += [
        (
            record.section,
            record.name,
            record.dtype,
            "x".join(map(str, record.shape)) or "-",
            format_bytes(record.numel * record.itemsize),
            f"= {record.tie[1]}" if record.tie else str(len(record.ranges)),
        )
        for record in info.tensors
    ]
    head = (
        f"save {info.save_id}, ranks: {info.world_size}, files: {len(info.files)}, "
        f"size: {format_bytes(info.nbytes)}"
    )
    return Reply(table, [head, *format_table(rows), *_value_lines(info.values, "")])


def check(path: str) -> Reply:
    """Read a whole checkpoint and list what is wrong with it."""
    problems = verify(path)
    lines = problems or (f"{path}: whole and unaltered",)
    return Reply({"problems": problems}, lines, FOUND if problems else 0)


def compare(a: str, b: str) -> Reply:
    """List in what two checkpoints differ."""
    found = diff(a, b)
    lines = [f"{item.where}: {item.text}" for item in found]
    return Reply({"differences": [asdict(item) for item in found]}, lines, FOUND if found else 0)


def export(ckpt: str, out: str, **options: Any) -> Reply:
    """Write Hugging Face files; options as for ``export_hf``."""
    made = export_hf(ckpt, out, comm=SoloComm(), **options)
    return Reply({"files": made}, [str(place_of(out) / name) for name in made])


def transform(source: str, path: str, **options: Any) -> Reply:
    """Write a checkpoint of one format as another; options as for ``convert``."""
    convert(source, path, **options)
    return Reply({"path": str(path)}, [str(path)])


def rebuild(path: str, *, commit: bool) -> Reply:
    """Make a lost index again."""
    written = reindex(path, commit=commit)
    text = "index written" if written else "marker and index are intact, nothing to do"
    return Reply({"written": written}, [f"{path}: {text}"])


def prune(path: str, *, keep: int, dry_run: bool) -> Reply:
    """Remove committed steps but the newest, and what dead saves left where locks tell them."""
    if keep < 1:
        raise ValueError(f"--keep: expected at least 1, got {keep}")
    steps = Checkpointer(path, comm=SoloComm())
    place = place_of(path)
    if not place.is_dir():
        raise FileNotFoundError(f"{path}: no such folder")
    doomed = [place_of(steps.location(step)) for step in steps.steps()[:-keep]]
    if not dry_run:
        if not isinstance(place, RemotePath):
            sweep(place)
        for folder in doomed:
            remove_checkpoint(folder)
    verb = "would remove" if dry_run else "removed"
    names = [folder.name for folder in doomed]
    return Reply({"removed": names, "dry_run": dry_run}, [f"{verb} {name}" for name in names])


def _with_lists(node: Any) -> Any:
    """Return values with plain lists of what ranks stored."""
    if isinstance(node, dict):
        return {key: _with_lists(item) for key, item in node.items()}
    if isinstance(node, RankValues):
        return list(node)
    if type(node) in (list, tuple):
        return type(node)(map(_with_lists, node))
    return node


def _value_lines(node: Any, path: str) -> list[str]:
    if isinstance(node, dict) and node:
        return [
            line
            for key, item in node.items()
            for line in _value_lines(item, f"{path}.{key}" if path else str(key))
        ]
    text = repr(node)
    return [f"{path} = {text if len(text) <= 100 else f'{text[:97]}...'}"] if path else []
