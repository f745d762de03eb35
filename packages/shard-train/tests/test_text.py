from __future__ import annotations

import os
from pathlib import Path

import pytest

from shard_train import DataConfig, UsageError
from shard_train._text import read_text


def write(root: Path, files: dict[str, bytes]) -> DataConfig:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return DataConfig(path=str(root), seq=4)


def test_single_file_holds_out_its_last_twentieth(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)) * 2)
    text = read_text(DataConfig(path=str(tmp_path / "a.txt"), seq=4))
    assert text.train == bytes(range(100)) + bytes(range(90))
    assert text.held_out == bytes(range(90, 100))
    assert (text.files, text.held_out_files) == (1, 1)


def test_folder_holds_out_whole_files(tmp_path: Path) -> None:
    files = {f"{i:03}.txt": f"<{i:03}>".encode() for i in range(200)}
    text = read_text(write(tmp_path, files))
    held_out = [name for name, data in files.items() if data in text.held_out]
    assert text.held_out == b"".join(files[name] for name in held_out)
    assert text.train == b"".join(files[name] for name in files if name not in held_out)
    assert text.held_out_files == len(held_out)
    assert 4 <= len(held_out) <= 20  # one in twenty, by hash

    # The choice goes by name: with half of the files gone the others keep their places.
    for name in list(files)[::2]:
        (tmp_path / name).unlink()
    fewer = read_text(DataConfig(path=str(tmp_path), seq=4))
    assert fewer.held_out == b"".join(files[n] for n in held_out if n in list(files)[1::2])


def test_small_folder_holds_out_one_file(tmp_path: Path) -> None:
    text = read_text(write(tmp_path, {"a": b"aaaaaa", "b": b"bbbbbb", "c/d": b"dddddd"}))
    assert (text.files, text.held_out_files) == (2, 1)
    assert len(text.train) == 12
    assert len(text.held_out) == 6


def test_what_is_no_text_is_left_out(tmp_path: Path) -> None:
    files = {
        "a": b"aaaaaa",
        "b": b"bbbbbb",
        "image": b"\x89PNG\0\0\0\0",
        ".hidden": b"hhhhhh",
        ".git/config": b"gggggg",
    }
    text = read_text(write(tmp_path, files))
    assert sorted((bytes(text.train), bytes(text.held_out))) == [b"aaaaaa", b"bbbbbb"]


def test_links_in_a_circle_are_not_followed(tmp_path: Path) -> None:
    config = write(tmp_path, {"a": b"aaaaaa", "b": b"bbbbbb"})
    (tmp_path / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    assert read_text(config).files == 1


def test_digest_tells_texts_apart(tmp_path: Path) -> None:
    config = write(tmp_path, {"a": b"aaaaaa", "b": b"bbbbbb"})
    before = read_text(config).digest
    assert read_text(config).digest == before
    (tmp_path / "b").write_bytes(b"bbbbbB")
    assert read_text(config).digest != before


def test_standard_library() -> None:
    text = read_text(DataConfig())
    assert b"class OrderedDict(dict)" in text.train + text.held_out
    assert len(text.train) > 5e6
    assert len(text.held_out) > 1e5
    assert 0.02 < text.held_out_files / text.files < 0.1


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--data .*/none: no such file or folder"):
        read_text(DataConfig(path=str(tmp_path / "none")))
    with pytest.raises(UsageError, match="expected text, got none"):
        read_text(DataConfig(path=str(tmp_path)))
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="empty: expected text, got none"):
        read_text(DataConfig(path=str(tmp_path / "empty")))


def test_sequence_longer_than_the_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 200)
    path = str(tmp_path / "a")
    with pytest.raises(UsageError, match=r"--seq 190: .* 190 bytes to learn from .*, got 190"):
        read_text(DataConfig(path=path, seq=190))
    with pytest.raises(UsageError, match=r"--seq 10: .* 10 bytes to hold out .*, got 10"):
        read_text(DataConfig(path=path, seq=10))
    assert read_text(DataConfig(path=path, seq=9)).held_out == b"x" * 10


def test_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write(tmp_path, {"a": b"aaaaaa"})

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UsageError, match=r"cannot read .*/a: Permission denied"):
        read_text(config)
