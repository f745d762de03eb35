"""Values that are not tensors: one small JSON file of structure, one per rank where asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shard_ckpt._blocks import write_file
from shard_ckpt._collector import collector_paused
from shard_ckpt._errors import CheckpointError
from shard_ckpt._files import Origin
from shard_ckpt._grains import FileRecord, sums_of
from shard_ckpt._index import FORMAT_VERSION, Index, check_version
from shard_ckpt._json import canonical_json, strict_loads
from shard_ckpt._places import Place
from shard_ckpt._state import FlatState
from shard_ckpt._values import PerRankRef, RankValues, TensorRef, decode, encode


@dataclass(frozen=True)
class Missing:
    """Stands for a value that is not there."""


MISSING = Missing()


def extras_name(rank: int) -> str:
    """Return the name of a rank's file of values. Local."""
    return f"extra-r{rank:05d}.json"


def is_extras(name: str) -> bool:
    """Whether a file of this name holds a rank's values. Local."""
    return name.startswith("extra-r") and name.endswith(".json")


@collector_paused()
def encode_extras(flat: FlatState, rank: int) -> dict[str, Any] | None:
    """Encode what a rank stores besides tensors; None where that is nothing. Local.

    Rank 0 stores the whole structure with its values, every rank its per-rank values.

    Raises:
        TypeError: a value cannot be stored.
    """
    table: dict[str, Any] = {}
    if rank == 0:
        table["values"] = encode(flat.values, path="state")
    if flat.per_rank:
        table["per_rank"] = [encode(value, path=f"state{path}") for path, value in flat.per_rank]
    return table or None


def write_extras(folder: Place, table: Mapping[str, Any], *, origin: Origin) -> FileRecord:
    """Write a rank's values. Local."""
    stamped = {
        **table,
        "version": FORMAT_VERSION,
        "save_id": origin.save_id,
        "rank": origin.rank,
        "world_size": origin.world_size,
    }
    return write_file(folder / extras_name(origin.rank), canonical_json(stamped))


@collector_paused()
def read_values(folder: Place, index: Index, *, rank: int, world_size: int) -> dict[str, Any]:
    """Read the stored structure for one rank of a group of any size. Local.

    Returns:
        The state that was saved, with a ``TensorRef`` for each tensor. A per-rank value is this
        rank's where the number of ranks is the same, else ``RankValues`` of all.

    Raises:
        CheckpointError: a file is missing or altered.
    """
    first = _read(folder, index, 0)
    values = decode(first.get("values"), label=extras_name(0))
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / extras_name(0)}: holds no state")
    count = len(first.get("per_rank", ()))
    if count == 0:
        return values
    same = world_size == index.world_size
    ranks = [rank] if same else list(range(index.world_size))
    stored = [_per_rank(folder, index, r, count) for r in ranks]
    resolved: dict[str, Any] = _resolve(values, stored, same)
    return resolved


def without_tensors(stored: Any) -> Any:
    """Return stored structure without its tensors; MISSING where nothing else is in it. Local."""
    if isinstance(stored, TensorRef):
        return MISSING
    if isinstance(stored, dict):
        kept = {key: without_tensors(item) for key, item in stored.items()}
        kept = {key: item for key, item in kept.items() if item is not MISSING}
        return kept if kept or not stored else MISSING
    if type(stored) in (list, tuple):
        items = [without_tensors(item) for item in stored]
        return MISSING if any(item is MISSING for item in items) else type(stored)(items)
    return stored


def _per_rank(folder: Place, index: Index, rank: int, count: int) -> list[Any]:
    name = extras_name(rank)
    stored = decode(_read(folder, index, rank).get("per_rank"), label=name)
    if not isinstance(stored, list) or len(stored) != count:
        raise CheckpointError(f"{folder / name}: expected {count} per-rank values")
    return stored


def _resolve(node: Any, stored: Sequence[Sequence[Any]], same: bool) -> Any:
    if isinstance(node, PerRankRef):
        values = [values[node.number] for values in stored]
        return values[0] if same else RankValues(values)
    if isinstance(node, dict):
        return {key: _resolve(item, stored, same) for key, item in node.items()}
    if type(node) in (list, tuple):
        return type(node)(_resolve(item, stored, same) for item in node)
    return node


def _read(folder: Place, index: Index, rank: int) -> dict[str, Any]:
    name = extras_name(rank)
    path = folder / name
    record = next((file for file in index.files if file.name == name), None)
    if record is None:
        raise CheckpointError(f"{path}: the index does not list it")
    try:
        raw = path.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path}: missing, though the index lists it") from exc
    crcs = sums_of(raw)
    if len(raw) != record.nbytes or crcs != record.crcs:
        raise CheckpointError(
            f"{path}: altered: expected {record.nbytes} bytes with CRC-32 {record.crcs.hex()}, got "
            f"{len(raw)} with {crcs.hex()}"
        )
    table = strict_loads(raw, label=str(path))
    check_version(table, str(path))
    if table.get("save_id") != index.save_id:
        raise CheckpointError(f"{path}: from save {table.get('save_id')}, not {index.save_id}")
    return table
