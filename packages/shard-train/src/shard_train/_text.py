"""Text from files, with some of it held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shard_train._config import STDLIB, DataConfig
from shard_train._errors import UsageError

_SKIPPED_IN_STDLIB = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_ONE_IN = 20
_SNIFFED_BYTES = 8192


@dataclass(frozen=True)
class Text:
    """The text of a run.

    Attributes:
        train: Bytes to learn from.
        held_out: Bytes to evaluate on.
        files: Number of files with anything in ``train``.
        held_out_files: Number of files with anything in ``held_out``.
        digest: Hash of both texts, as hexadecimal digits.
    """

    train: bytearray
    held_out: bytearray
    files: int
    held_out_files: int
    digest: str


def read_text(config: DataConfig) -> Text:
    """Read the text of a run and hold some out.

    Of a folder, about one file in twenty is held out, chosen by a hash of its name relative
    to the folder, so that other files coming or going do not change the choice. Of a single
    file the last twentieth is held out. Of a folder in which no file is chosen, the file
    whose hash comes first is. Folders and files whose names begin with a dot, and files with
    a zero byte near their start, are not text and are left out.

    Args:
        config: Where the text is, and the length of a sequence.

    Returns:
        The text, files in the order of their names.

    Raises:
        UsageError: There is nothing to read, or less than one sequence to learn from or to
            hold out.

    **Collective**: local.
    **Memory**: all of the text, for as long as the result lives.
    """
    files = _read_files(config.path)
    where = _where(config.path)
    if not any(files.values()):
        raise UsageError(f"{where}: expected text, got none; --data takes a file or a folder")
    train, held_out = _split(files)
    for what, part in (("to learn from", train), ("to hold out", held_out)):
        numel = sum(map(len, part.values()))
        if numel <= config.seq:
            raise UsageError(
                f"--seq {config.seq}: expected more than {config.seq} bytes {what} in {where}, "
                f"got {numel}; take a shorter sequence or more text"
            )
    texts = bytearray(b"".join(train.values())), bytearray(b"".join(held_out.values()))
    digest = hashlib.sha256(texts[0])
    digest.update(b"held out")
    digest.update(texts[1])
    return Text(*texts, len(train), len(held_out), digest.hexdigest())


def _where(path: str) -> str:
    return "the standard library" if path == STDLIB else path


def _read_files(path: str) -> dict[str, bytes]:
    root = Path(sysconfig.get_path("stdlib") if path == STDLIB else path)
    if not root.exists():
        raise UsageError(f"--data {path}: no such file or folder")
    try:
        if root.is_file():
            return {root.name: root.read_bytes()}
        names = _stdlib_names(root) if path == STDLIB else _names(root)
        found = {name: (root / name).read_bytes() for name in sorted(names)}
    except OSError as error:
        raise UsageError(
            f"--data {path}: cannot read {error.filename}: {error.strerror}"
        ) from error
    return {name: data for name, data in found.items() if b"\0" not in data[:_SNIFFED_BYTES]}


def _names(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in skipped]
        for name in files:
            path = Path(folder, name)
            if name[0] != "." and path.is_file():
                yield path.relative_to(root).as_posix()


def _stdlib_names(root: Path) -> Iterator[str]:
    return (name for name in _names(root, _SKIPPED_IN_STDLIB) if name.endswith(".py"))


def _raise(error: OSError) -> None:
    raise error


def _split(files: dict[str, bytes]) -> tuple[dict[str, bytes], dict[str, bytes]]:
    if len(files) == 1:
        ((name, data),) = files.items()
        cut = len(data) - len(data) // _ONE_IN
        return {name: data[:cut]}, {name: data[cut:]}
    hashes = {name: int(hashlib.sha256(os.fsencode(name)).hexdigest(), 16) for name in files}
    chosen = {name for name, value in hashes.items() if value % _ONE_IN == 0}
    chosen = chosen or {min(hashes, key=hashes.__getitem__)}
    train = {name: data for name, data in files.items() if name not in chosen}
    return train, {name: data for name, data in files.items() if name in chosen}
