from __future__ import annotations

from pathlib import Path

import pytest

from shard_ckpt import CheckpointError, FileRecord
from shard_ckpt._index import Index, encode_index
from shard_ckpt._marker import encode_marker, marker_for, read_index, read_marker

INDEX = Index("cafe", 2, {}, (FileRecord("a.safetensors", 5000, b"crcs"),))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    encoded = encode_index(INDEX)
    (tmp_path / "index.json").write_bytes(encoded)
    (tmp_path / "COMMITTED").write_bytes(encode_marker(marker_for(INDEX, encoded)))
    return tmp_path


def test_what_was_written_is_read(folder: Path) -> None:
    marker = read_marker(folder)
    assert (marker.save_id, marker.world_size, marker.files, marker.nbytes) == ("cafe", 2, 1, 5000)
    assert read_index(folder) == INDEX


def test_a_folder_without_a_marker_is_no_checkpoint(folder: Path) -> None:
    (folder / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match="no COMMITTED marker, so it is not a finished"):
        read_index(folder)


def test_a_folder_of_checkpoints_says_what_is_in_it(folder: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMMITTED").write_bytes((folder / "COMMITTED").read_bytes())
    (tmp_path / "c").mkdir()
    (folder / "COMMITTED").unlink()
    with pytest.raises(CheckpointError, match=r"not a finished checkpoint; it holds .*: a, b$"):
        read_marker(tmp_path)


def test_a_folder_of_torch_says_what_reads_it(tmp_path: Path) -> None:
    (tmp_path / ".metadata").touch()
    text = r"not a finished checkpoint; torch\.distributed\.checkpoint made it .* convert\(\)"
    with pytest.raises(CheckpointError, match=text):
        read_marker(tmp_path)


def test_no_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        read_index(tmp_path / "x")


def test_the_index_is_what_the_marker_names(folder: Path) -> None:
    raw = (folder / "index.json").read_bytes()
    (folder / "index.json").write_bytes(raw + b" ")
    with pytest.raises(CheckpointError, match=r"index\.json: altered: expected SHA-256"):
        read_index(folder)
    (folder / "index.json").unlink()
    with pytest.raises(CheckpointError, match=r"index\.json: missing, though COMMITTED names it"):
        read_index(folder)


def test_every_flipped_bit_of_marker_and_index_is_seen(folder: Path) -> None:
    for name in ("COMMITTED", "index.json"):
        path = folder / name
        raw = path.read_bytes()
        for at in range(len(raw) * 8):
            damaged = bytearray(raw)
            damaged[at // 8] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                read_index(folder)
        path.write_bytes(raw)
    assert read_index(folder) == INDEX


@pytest.mark.parametrize("cut", [0, 1, 20, -1])
def test_a_shortened_marker_is_seen(folder: Path, cut: int) -> None:
    path = folder / "COMMITTED"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="COMMITTED"):
        read_marker(folder)


def test_another_versions_marker_is_named(folder: Path) -> None:
    path = folder / "COMMITTED"
    path.write_bytes(path.read_bytes().replace(b'"version":2', b'"version":9'))
    with pytest.raises(CheckpointError, match="expected format version 2, got 9"):
        read_marker(folder)
