from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shard_ckpt import Checkpointer, PerRank, main, save, verify
from shard_ckpt._screen import Bar, format_bytes, format_table
from shard_comm import SoloComm

W = torch.arange(35.0).view(7, 5)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a folder with three steps, one without a marker, and a dead draft."""
    steps = Checkpointer(tmp_path / "run", comm=SoloComm())
    for step in (10, 20, 30):
        state: dict[str, Any] = {"model": {"w": W + step, "head": W}, "step": step, "note": b"x"}
        steps.save(step, state)
    state["model"]["head"] = state["model"]["w"]
    steps.save(40, state)
    (steps.path(50)).mkdir()
    (tmp_path / "run" / f".tmp-step-00000060-{'0' * 32}").mkdir()
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments], prog="shard ckpt")
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    status, out, _ = call(capsys, *arguments, "--json")
    return status, json.loads(out)


def test_ls(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "ls", run_dir)
    lines = out.splitlines()
    assert (status, err, len(lines)) == (0, "", 7)
    assert lines[0].split() == ["name", "size", "files", "ranks"]
    assert lines[1].split()[0] == "step-00000010"
    assert lines[1].split()[-2:] == ["2", "1"]
    assert lines[5].startswith("skipped .tmp-step-00000060")
    assert lines[5].endswith("left by a save or removal that was cut off")
    assert "skipped step-00000050: " in lines[6]
    assert "no COMMITTED marker" in lines[6]
    _, table = call_json(capsys, "ls", run_dir)
    assert [row["name"][-2:] for row in table["checkpoints"]] == ["10", "20", "30", "40"]
    assert len(table["skipped"]) == 2


def test_ls_goes_on_past_damaged_markers(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "step-00000020").rename(run_dir / "best")
    for name in ("best", "step-00000010"):
        (run_dir / name / "COMMITTED").write_bytes(b"{}")
    status, table = call_json(capsys, "ls", run_dir)
    assert status == 0
    assert [row["name"][-2:] for row in table["checkpoints"]] == ["30", "40"]
    skipped = {row["name"]: row["reason"] for row in table["skipped"]}
    assert "expected format version 2, got None" in skipped["best"]
    assert "expected format version 2, got None" in skipped["step-00000010"]


def test_inspect(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "inspect", run_dir / "step-00000040")
    lines = out.splitlines()
    assert status == 0
    assert ", ranks: 1, files: 2, size: " in lines[0]
    assert lines[2].split() == ["model", "head", "F32", "7x5", "140", "B", "1"]
    assert lines[3].split() == ["model", "w", "F32", "7x5", "140", "B", "=", "head"]
    assert lines[4:] == ["note = b'x'", "step = 30"]
    _, table = call_json(capsys, "inspect", run_dir / "step-00000040")
    assert table["tensors"][1]["tie"] == ["model", "head"]
    assert table["values"] == {"step": 30, "note": {"$bytes": "eA=="}}
    assert table["world_size"] == 1


def test_inspect_shows_what_each_rank_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save({"rng": PerRank({"seed": 5}), "l": [PerRank(6)]}, tmp_path / "a", comm=SoloComm())
    _, out, _ = call(capsys, "inspect", tmp_path / "a")
    assert out.splitlines()[2:] == ["l = [[6]]", "rng = [{'seed': 5}]"]
    _, table = call_json(capsys, "inspect", tmp_path / "a")
    assert table["values"] == {"l": [[6]], "rng": [{"seed": 5}]}


def test_names_that_the_terminal_cannot_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"\xff")
    save({"m": {"\u00e4": W}}, folder / "a", comm=SoloComm())
    for encoding, name in (("ascii", "\\xe4"), ("utf-8", "\u00e4")):
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
        assert [main([what, str(folder / "a")]) for what in ("inspect", "verify")] == [0, 0]
        assert f"m        {name} " in raw.getvalue().decode(encoding)
        assert "\\udcff/a: whole and unaltered" in raw.getvalue().decode(encoding)


def test_a_store_that_is_not_installed_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("shard_ckpt._commands.place_of", missing)
    text = "shard ckpt: error: Install s3fs to access S3\n"
    assert call(capsys, "ls", "s3://bucket") == (2, "", text)


def test_verify(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "step-00000010"
    assert call(capsys, "verify", path) == (0, f"{path}: whole and unaltered\n", "")
    file = path / "model-r00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, out, _ = call(capsys, "verify", path)
    assert status == 1
    assert f"{file}: bytes 0 to" in out
    status, table = call_json(capsys, "verify", path)
    assert (status, len(table["problems"])) == (1, 1)


def test_diff(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run_dir / "step-00000010", run_dir / "step-00000020"
    assert call(capsys, "diff", a, a) == (0, "", "")
    status, out, _ = call(capsys, "diff", a, b)
    assert status == 1
    assert out.splitlines() == [
        "model: w: 35 of 35 elements differ, by 10 at most",
        "state['step']: 10 and 20",
    ]
    _, table = call_json(capsys, "diff", a, b)
    assert [item["what"] for item in table["differences"]] == ["elements", "value"]


def test_export(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "hf"
    flags = ["--rename", "w=m.w", "--tie", "head=m.w", "--cast", "bf16", "--max-shard-size", "1GiB"]
    status, shown, _ = call(capsys, "export", run_dir / "step-00000040", out, *flags)
    assert (status, shown) == (0, f"{out / 'model.safetensors'}\n")
    got = load_file(out / "model.safetensors")
    assert list(got) == ["m.w"]
    assert torch.equal(got["m.w"], (W + 30).bfloat16())


def test_convert(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"net": {"w": W}, "args": 3}, tmp_path / "f.pt")
    flags = ["--section", "net=model", "--skip", "args"]
    made = tmp_path / "c"
    assert call(capsys, "convert", tmp_path / "f.pt", made, *flags) == (0, f"{made}\n", "")
    assert call(capsys, "convert", made, tmp_path / "d", "--to", "dcp")[0] == 0
    assert (tmp_path / "d" / ".metadata").exists()
    assert call(capsys, "convert", tmp_path / "d", tmp_path / "e", "--from", "dcp")[0] == 0
    assert call(capsys, "diff", made, tmp_path / "e")[0] == 0


def test_reindex(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_dir / "step-00000010"
    nothing = f"{path}: marker and index are intact, nothing to do\n"
    assert call(capsys, "reindex", path) == (0, nothing, "")
    (path / "index.json").unlink()
    assert call(capsys, "reindex", path) == (0, f"{path}: index written\n", "")
    (path / "COMMITTED").unlink()
    status, _, err = call(capsys, "reindex", path)
    assert status == 2
    assert "no COMMITTED marker" in err
    assert call(capsys, "reindex", path, "--commit")[0] == 0
    assert verify(path) == ()


def test_prune(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(os.listdir(run_dir))
    status, out, _ = call(capsys, "prune", run_dir, "--keep", "2", "--dry-run")
    assert (status, out) == (0, "would remove step-00000010\nwould remove step-00000020\n")
    assert sorted(os.listdir(run_dir)) == before
    status, table = call_json(capsys, "prune", run_dir, "--keep", "2")
    assert table["removed"] == ["step-00000010", "step-00000020"]
    assert sorted(os.listdir(run_dir)) == ["step-00000030", "step-00000040", "step-00000050"]
    status, _, err = call(capsys, "prune", run_dir / "none", "--keep", "2")
    assert (status, err) == (2, f"shard ckpt: error: {run_dir / 'none'}: no such folder\n")
    status, _, err = call(capsys, "prune", run_dir, "--keep", "0")
    assert (status, err) == (2, "shard ckpt: error: --keep: expected at least 1, got 0\n")


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = tmp_path / "none"
    for command in ("inspect", "verify"):
        line = f"shard ckpt: error: {none}: no such checkpoint\n"
        assert call(capsys, command, none) == (2, "", line)
    line = f"shard ckpt: error: {none}: No such file or directory\n"
    assert call(capsys, "ls", none) == (2, "", line)
    for arguments in (["export", "a"], ["nothing"], ["export", "a", "b", "--cast", "int8"], []):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2


def test_ls_of_a_checkpoint_says_what_to_do(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = call(capsys, "ls", run_dir / "step-00000010")
    assert status == 2
    assert "a checkpoint itself; list the folder that holds it" in err


def test_as_a_module(run_dir: Path) -> None:
    command = [sys.executable, "-m", "shard_ckpt", "ls", str(run_dir), "--json"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(json.loads(shown.stdout)["checkpoints"]) == 4
    assert shown.stderr == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_for_terminals() -> None:
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        bar = Bar("verify", stream)
        bar(0, 2_000_000)
        bar(1, 2_000_000)  # too soon to be shown
        bar(2_000_000, 2_000_000)
        bar.clear()
    assert file.getvalue() == ""
    assert terminal.getvalue() == (
        f"\rverify [{' ' * 30}]   0% of 2 MB\rverify [{'#' * 30}] 100% of 2 MB\r\x1b[K"
    )


def test_long_work_shows_a_bar(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["verify", str(run_dir / "step-00000010")]) == 0
    assert "verify [" in terminal.getvalue()
    assert "100% of" in terminal.getvalue()


def test_sizes_and_tables() -> None:
    sizes = [format_bytes(n) for n in (0, 999, 1536, 999_600, 5_000_000_000)]
    assert sizes == ["0 B", "999 B", "1.54 kB", "1 MB", "5 GB"]
    assert format_table([("a", "bcd"), ("efg", "h")]) == ["a    bcd", "efg  h"]
    assert format_table([]) == []
