"""Reading checkpoints behind URLs by what is not ``load``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shard_ckpt import Checkpointer, convert, diff, export_hf, main
from shard_ckpt._remote import remote_path
from shard_comm import SoloComm

BIG = torch.arange(6_000_000, dtype=torch.int32).view(2000, 3000)  # two blocks


@pytest.fixture
def run() -> Iterator[str]:
    """Return a URL below which two steps are."""
    url = f"memory://{uuid.uuid4().hex}"
    steps = Checkpointer(url, comm=SoloComm())
    for step in (1, 2):
        steps.save(step, {"model": {"w": BIG, "s": torch.tensor(step)}, "step": step})
    yield url
    remote_path(url).remove()


def test_export(run: str, tmp_path: Path) -> None:
    export_hf(f"{run}/step-00000001", tmp_path / "hf")
    got = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(got["w"], BIG)
    assert got["s"].item() == 1


def test_diff_and_convert(run: str, tmp_path: Path) -> None:
    first, second = f"{run}/step-00000001", f"{run}/step-00000002"
    assert [item.where for item in diff(first, second)] == ["model: s", "state['step']"]
    convert(first, tmp_path / "c")
    assert diff(first, tmp_path / "c") == ()


def test_commands(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", run, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in table["checkpoints"]] == ["step-00000001", "step-00000002"]
    assert main(["verify", f"{run}/step-00000001"]) == 0
    assert main(["inspect", f"{run}/step-00000001"]) == 0
    assert "I32" in capsys.readouterr().out
