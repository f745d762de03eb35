"""A configuration as a TOML file and back."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from shard_train._config import Config
from shard_train._errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def to_toml(config: Config) -> str:
    """Write a configuration out.

    Args:
        config: Any configuration.

    Returns:
        TOML of which ``from_toml`` makes an equal configuration.

    **Collective**: local.
    """
    lines: list[str] = []
    for name, table in config.tables.items():
        lines += [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines)


def _value(value: bool | int | float | str) -> str:
    if isinstance(value, str):
        # A JSON string is a TOML string but for the one control character JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return str(value).lower() if isinstance(value, bool) else repr(value)


def read_config(path: str | Path) -> Config:
    """Read a configuration file.

    Args:
        path: A TOML file with any of the tables ``model``, ``data``, ``optim`` and ``run``.

    Returns:
        The configuration; keys that the file leaves out have their defaults.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has a table, key or value that
            does not belong there.

    **Collective**: local.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot read the configuration: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: expected a TOML file, got bytes that are no UTF-8") from error
    try:
        return from_toml(text)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def from_toml(text: str) -> Config:
    """Read a configuration.

    Args:
        text: TOML.

    Returns:
        The configuration; keys that the text leaves out have their defaults.

    Raises:
        ValueError: The text is not TOML, or has a table, key or value that does not belong.

    **Collective**: local.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"expected TOML, but {_lower_first(str(error))}") from error
    classes: dict[str, Any] = get_type_hints(Config)
    _check_names(tables, set(classes), "table", "")
    made = {}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UsageError(f"{name}: expected a table, got {table!r}")
        hints = get_type_hints(classes[name], include_extras=False)
        _check_names(table, {field.name for field in fields(classes[name])}, "key", f"{name}.")
        values = {key: _typed(f"{name}.{key}", value, hints[key]) for key, value in table.items()}
        made[name] = classes[name](**values)
    return Config(**made)


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]


def _check_names(given: dict[str, Any], known: set[str], what: str, prefix: str) -> None:
    for name in given:
        if name not in known:
            listing = ", ".join(sorted(known))
            raise UsageError(f"{prefix}{name}: unknown {what}; known here are {listing}")


def _typed(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    choices = get_args(hint)
    if choices:
        if value not in choices:
            raise UsageError(f"{name}: expected {' or '.join(choices)}, got {value!r}")
        return value
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UsageError(f"{name}: expected {_NOUNS[hint]}, got {value!r}")
    return value


_NOUNS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
