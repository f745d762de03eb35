from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shard_ckpt import FileRecord, _posix
from shard_ckpt._draft import Draft, discard, draft_is_live, draft_path, is_draft, sweep
from shard_ckpt._index import Index
from shard_ckpt._marker import read_index

ID = "0123456789abcdef" * 2
INDEX = Index(ID, 1, {}, (FileRecord("a.safetensors", 0, b""),))

HOLD_AND_WAIT = """
import sys
from pathlib import Path
from shard_ckpt._draft import Draft
draft = Draft(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_by_another_process(target: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_AND_WAIT, str(target), ID],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_draft_becomes_its_target_at_once(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "step-1"
    with Draft(target, ID) as draft:
        assert draft.path == target.parent / f".tmp-step-1-{ID}"
        assert is_draft(draft.path.name)
        assert os.listdir(draft.path) == []
        assert not target.exists()
        draft.publish(INDEX)
        assert os.listdir(target.parent) == ["step-1"]
    assert read_index(target) == INDEX
    assert os.listdir(target.parent) == ["step-1"]


def test_a_draft_that_is_not_published_is_removed(tmp_path: Path) -> None:
    with Draft(tmp_path / "a", ID) as draft:
        (draft.path / "data").write_bytes(b"x")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_nothing_is_replaced(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "a"
    if kind == "folder":
        target.mkdir()
    elif kind == "file":
        target.write_bytes(b"x")
    else:
        target.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match=r"never replaced; .*/a'$"):
        Draft(target, ID)
    assert os.listdir(tmp_path) == ["a"]


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with Draft(target, ID) as draft:
        target.mkdir()
        with pytest.raises(FileExistsError, match="never replaced"):
            draft.publish(INDEX)
    assert os.listdir(tmp_path) == ["a"]
    assert os.listdir(target) == []


def test_a_rename_that_may_not_be_durable_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = _posix.sync_folder

    def fail_on_parent(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, "broken")
        sync(path)

    monkeypatch.setattr(_posix, "sync_folder", fail_on_parent)
    with Draft(tmp_path / "a", ID) as draft, pytest.raises(OSError, match="broken"):
        draft.publish(INDEX)
    assert os.listdir(tmp_path) == []


def test_a_live_draft_is_not_swept_and_a_dead_one_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "a"
    path = draft_path(target, ID)
    with held_by_another_process(target) as process:
        sweep(tmp_path)
        assert path.is_dir()
        assert draft_is_live(path)
        assert caplog.text == ""
        process.kill()
        process.wait()
        assert not draft_is_live(path)
        sweep(tmp_path)
    assert os.listdir(tmp_path) == []
    assert f"{path}: removed" in caplog.text


def test_a_live_draft_of_this_process_is_not_swept(tmp_path: Path) -> None:
    with Draft(tmp_path / "a", ID) as draft:
        sweep(tmp_path)
        assert draft.path.is_dir()


def test_sweeping_takes_only_what_is_ours(tmp_path: Path) -> None:
    dead = tmp_path / f".tmp-a-{ID}"
    dead.mkdir()
    (dead / "data").write_bytes(b"x")
    (tmp_path / f".tmp-b-{ID}.lock").touch()
    kept = [".tmp-a", f".tmp-a-{ID}-old", f"tmp-a-{ID}", f".tmp-a-{ID[:-1]}", "step-00000001"]
    for name in kept:
        (tmp_path / name).mkdir()
    sweep(tmp_path)
    sweep(tmp_path / "nowhere")
    assert sorted(os.listdir(tmp_path)) == sorted(kept)


def test_a_lock_file_swept_before_it_was_held_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path = tmp_path / f".tmp-a-{ID}.lock"
    flock = fcntl.flock
    calls: list[int] = []

    def swept_at_first(fd: int, operation: int) -> None:
        if not calls:
            lock_path.unlink()
        calls.append(fd)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", swept_at_first)
    with Draft(tmp_path / "a", ID) as draft:
        assert len(calls) == 2
        assert draft_is_live(draft.path)


def test_where_locks_do_not_work_nothing_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "no locks here")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Draft(tmp_path / "a", ID) as draft:
        assert "dead saves are not swept" in caplog.text
        sweep(tmp_path)
        assert draft.path.is_dir()
        assert "cannot tell whether it is live" in caplog.text
    assert os.listdir(tmp_path) == []


def test_discarding_removes_the_marker_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Draft(tmp_path / "a", ID) as draft:
        draft.publish(INDEX)
    calls: list[str] = []
    for name in ("unlink", "sync_folder", "rename"):
        original = getattr(_posix, name)

        def noted(*args: Path, name: str = name, original: object = original) -> None:
            calls.append(f"{name} {args[0].name}")
            assert callable(original)
            original(*args)

        monkeypatch.setattr(_posix, name, noted)
    discard(tmp_path / "a")
    assert calls == ["unlink COMMITTED", "sync_folder a", "rename a"]
    assert os.listdir(tmp_path) == []


def test_of_a_link_only_itself_is_discarded(tmp_path: Path) -> None:
    with Draft(tmp_path / "a", ID) as draft:
        draft.publish(INDEX)
    (tmp_path / "b").symlink_to("a")
    discard(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    assert read_index(tmp_path / "a") == INDEX


def test_what_cannot_be_removed_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING), Draft(tmp_path / "a", ID) as draft:
        path = draft.path
    assert f"{path}: could not be removed" in caplog.text
