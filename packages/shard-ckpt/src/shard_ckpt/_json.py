"""JSON with one spelling per value, and a reader that takes nothing on trust."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from shard_ckpt._collector import collector_paused
from shard_ckpt._errors import CheckpointError


def canonical_json(value: Any) -> bytes:
    """Encode as ASCII with sorted keys and no blanks: equal values give equal bytes. Local.

    Raises:
        ValueError: ``value`` holds a float that JSON has no spelling for.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode("ascii")


@collector_paused()
def strict_loads(raw: bytes, *, label: str) -> dict[str, Any]:
    """Decode one JSON object. Local.

    Args:
        raw: UTF-8 text.
        label: what errors call the text, a file name say.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, a key occurs twice, or it holds a
            number that JSON does not have.
    """
    try:
        value = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as exc:
        raise CheckpointError(f"{label}: not valid JSON ({exc})") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{label}: expected a JSON object, got {type(value).__name__}")
    return value


def is_count(value: object) -> bool:
    """Whether ``value`` is an int, not a bool, and not negative. Local."""
    return type(value) is int and value >= 0


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r} occurs twice")
            seen.add(key)
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
