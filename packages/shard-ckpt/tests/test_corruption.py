"""Damage of any kind is refused by name, with nothing loaded: C5."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shard_ckpt import CheckpointError, PerRank, _check, _posix, load, save, verify
from shard_ckpt._grains import GRAIN_BYTES, grain_count
from shard_ckpt._index import encode_index, parse_index
from shard_ckpt._marker import encode_marker, marker_for
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads

MODEL = "model-r00001-of-00002.safetensors"


def make_state(comm: Comm, *, value: float) -> dict[str, Any]:
    return {
        "model": {
            "layers.0": shard_tensor(torch.full((70, 10), value), comm=comm),
            "layers.1": shard_tensor(torch.full((300,), value).bfloat16(), comm=comm),
        },
        "buffers": {"count": torch.full((5,), int(value)), "empty": torch.zeros(0, 2)},
        "step": int(value),
        "rng": PerRank([comm.rank, value]),
    }


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pristine")
    for name, value in (("a", 1.0), ("b", 2.0)):
        run_threads(
            lambda comm, n=name, v=value: save(make_state(comm, value=v), folder / n, comm=comm), 2
        )
    return folder


@pytest.fixture
def path(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine / "a", tmp_path / "a")
    return tmp_path / "a"


def refused(path: Path, *names: str) -> None:
    """All ranks of other and of the same number refuse, naming ``names``, and load nothing."""

    def rank(comm: Comm) -> tuple[str, bool]:
        state = make_state(comm, value=7.0)
        try:
            load(state, path, comm=comm)
        except CheckpointError as exc:
            error = str(exc)
        else:
            error = "no error"
        before = make_state(comm, value=7.0)
        untouched = all(
            torch.equal(state["model"][n].local, before["model"][n].local) for n in state["model"]
        ) and torch.equal(state["buffers"]["count"], before["buffers"]["count"])
        return error, untouched

    for world_size in (1, 2, 3):
        results = run_threads(rank, world_size)
        assert [untouched for _, untouched in results] == [True] * world_size
        assert len({error for error, _ in results}) == 1
        for name in names:
            assert name in results[0][0]
    problems = "\n".join(verify(path))
    for name in names:
        assert name in problems


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)


def test_an_intact_copy_loads(path: Path) -> None:
    def rank(comm: Comm) -> float:
        state = make_state(comm, value=7.0)
        load(state, path, comm=comm)
        return float(
            state["model"]["layers.0"].local.sum() / state["model"]["layers.0"].local.numel()
        )

    assert run_threads(rank, 2) == [1.0, 1.0]
    assert verify(path) == ()


ALL_FILES = [
    "COMMITTED",
    "index.json",
    "extra-r00000.json",
    "model-r00000-of-00002.safetensors",
    MODEL,
    "buffers-r00000-of-00002.safetensors",
]


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_missing_file(path: Path, name: str) -> None:
    (path / name).unlink()
    refused(path, name)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_truncated_file(path: Path, name: str) -> None:
    size = (path / name).stat().st_size
    os.truncate(path / name, size - 1)
    refused(path, name)
    os.truncate(path / name, 0)
    refused(path, name)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_truncated_file_brought_back_to_its_size(path: Path, name: str) -> None:
    size = (path / name).stat().st_size
    os.truncate(path / name, size - 10)
    os.truncate(path / name, size)
    refused(path, name)


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_flipped_bit_anywhere(path: Path, name: str) -> None:
    bits = (path / name).stat().st_size * 8
    for bit in [0, 8 * 8, bits // 2, bits - 1, *random.Random(name).sample(range(bits), 4)]:
        flip(path / name, bit)
        refused(path, name)
        flip(path / name, bit)
    assert verify(path) == ()


def test_a_flipped_bit_names_the_tensor(path: Path) -> None:
    flip(path / MODEL, (path / MODEL).stat().st_size * 8 - 1)
    refused(path, MODEL, "layers.1", "altered: expected CRC-32")


def test_two_files_swapped(path: Path) -> None:
    other = path / "model-r00000-of-00002.safetensors"
    (path / MODEL).rename(path / "x")
    other.rename(path / MODEL)
    (path / "x").rename(other)
    refused(path, "model-r0000")


@pytest.mark.parametrize("name", ["COMMITTED", "index.json", "extra-r00000.json", MODEL])
def test_a_file_of_another_save(path: Path, pristine: Path, name: str) -> None:
    shutil.copy(pristine / "b" / name, path / name)
    refused(
        path, "COMMITTED" if name == "index.json" else "index.json" if name == "COMMITTED" else name
    )


@pytest.mark.parametrize("name", ["model-r00002-of-00002.safetensors", "extra-r00002.json"])
def test_an_extra_file(path: Path, name: str) -> None:
    (path / name).write_bytes(b"x")
    refused(path, name, "not in the index")


def test_files_of_other_kinds_are_no_concern(path: Path) -> None:
    (path / "README.md").write_text("mine")
    assert verify(path) == ()


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the index and make the marker fit, as a malicious or mistaken tool might."""
    table = json.loads((path / "index.json").read_bytes())
    change(table)
    raw = json.dumps(table, sort_keys=True, separators=(",", ":")).encode()
    (path / "index.json").write_bytes(raw)
    index = parse_index(encode_index(parse_index(raw)))
    (path / "COMMITTED").write_bytes(encode_marker(marker_for(index, raw)))


def test_an_index_that_says_otherwise_than_the_header(path: Path) -> None:
    def exchange(table: dict[str, Any]) -> None:
        ranges = table["tensors"]["model"]["layers.0"]["ranges"]
        ranges[0][3] += 4  # one element later, still inside of the file

    reseal(path, exchange)
    refused(path, "model-r0000", "layers.0")


def test_an_index_with_another_dtype_than_the_header(path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        table["tensors"]["buffers"]["count"]["dtype"] = "F64"

    reseal(path, change)
    problems = "\n".join(verify(path))
    assert "'count' is not in the index as the file states it" in problems


def test_an_index_without_a_tensor_that_a_file_holds(path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        del table["tensors"]["buffers"]["empty"]

    reseal(path, change)
    assert "'empty' is not in the index as the file states it" in "\n".join(verify(path))


def test_an_index_with_a_tensor_that_no_file_holds(path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        entry = dict(table["tensors"]["buffers"]["count"], shape=[1])
        (start, _, file, offset), *_ = entry["ranges"]
        table["tensors"]["buffers"]["more"] = {**entry, "ranges": [[start, 1, file, offset]]}

    reseal(path, change)
    assert "'more' is in the index, but not in the file" in "\n".join(verify(path))


def test_a_file_that_changes_after_it_was_checked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = _check.check_grains

    def then_replace(*args: Any) -> None:
        check(*args)
        data = (path / MODEL).read_bytes()
        (path / "new").write_bytes(data)
        (path / "new").rename(path / MODEL)

    monkeypatch.setattr("shard_ckpt._load.check_grains", then_replace)

    def rank(comm: Comm) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(make_state(comm, value=7.0), path, comm=comm)
        return str(caught.value)

    (error,) = run_threads(rank, 1)
    assert f"{MODEL}: changed while it was being read" in error


def test_only_what_is_needed_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three grains of 256 KiB, damage in the last: whoever does not need that grain loads."""
    numel = 3 * GRAIN_BYTES
    state = {"m": {"a": torch.zeros(numel - 10, dtype=torch.uint8), "z": torch.ones(10)}}

    def saved(comm: Comm) -> None:
        save(state, tmp_path / "a", comm=comm)

    run_threads(saved, 1)
    name = "m-r00000-of-00001.safetensors"
    flip(tmp_path / "a" / name, (tmp_path / "a" / name).stat().st_size * 8 - 1)

    def loaded(comm: Comm, wanted: str) -> list[float]:
        template = torch.zeros_like(state["m"][wanted])
        load({"m": {wanted: template}}, tmp_path / "a", comm=comm, strict=False)
        head: list[float] = template[:2].tolist()
        return head

    assert run_threads(loaded, 1, "z") == [[1.0, 1.0]]
    with pytest.raises(CheckpointError, match="they hold m: a"):
        run_threads(loaded, 1, "a")


def test_altered_grains_are_named_to_the_byte(tmp_path: Path) -> None:
    """Of 20 MiB, in pieces of 16 MiB: one bit in the second grain, one in the last but one."""
    save({"m": {"a": torch.zeros(20 << 20, dtype=torch.uint8)}}, tmp_path / "a", comm=SoloComm())
    file = tmp_path / "a" / "m-r00000-of-00001.safetensors"
    grains = grain_count(file.stat().st_size)
    for grain in (1, grains - 2):
        flip(file, grain * GRAIN_BYTES * 8 + 3)
    problems = verify(tmp_path / "a")
    assert [line.split(": ")[1].split(" are")[0] for line in problems] == [
        f"bytes {GRAIN_BYTES} to {2 * GRAIN_BYTES}",
        f"bytes {(grains - 2) * GRAIN_BYTES} to {(grains - 1) * GRAIN_BYTES}",
    ]


def test_a_header_is_checked_beyond_its_first_grain(tmp_path: Path) -> None:
    state = {"m": {f"{'n' * 500}.{at}": torch.ones(1) for at in range(1000)}}
    save(state, tmp_path / "a", comm=SoloComm())
    file = tmp_path / "a" / "m-r00000-of-00001.safetensors"
    at = file.read_bytes().index(b'n.7\\",\\"shape') - 200  # in the metadata, not the table
    assert at > GRAIN_BYTES
    flip(file, at * 8)
    wanted = {"m": {next(iter(state["m"])): torch.zeros(1)}}
    with pytest.raises(CheckpointError, match="they hold the header"):
        load(wanted, tmp_path / "a", comm=SoloComm(), strict=False)


def test_what_is_needed_next_is_asked_for_ahead_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 MiB in one file, of which a rank needs the first 36 MiB and the header."""
    state = {"m": {"a": torch.zeros(36 << 20, dtype=torch.uint8), "z": torch.ones(4 << 20).byte()}}
    save(state, tmp_path / "a", comm=SoloComm())
    asked: list[tuple[int, int]] = []
    exact: list[int] = []
    monkeypatch.setattr(_posix, "fetch", lambda fd, low, nbytes: asked.append((low, nbytes)))
    monkeypatch.setattr(_posix, "read_no_further", exact.append)
    template = {"m": {"a": torch.ones(36 << 20, dtype=torch.uint8)}}
    load(template, tmp_path / "a", comm=SoloComm(), strict=False)
    assert int(template["m"]["a"].max()) == 0
    tail, piece = 4 * (1 << 20) + GRAIN_BYTES, 16 << 20
    assert asked == [(tail, piece), (tail + piece, piece)]
    assert len(exact) == 2  # to check, and to fill
