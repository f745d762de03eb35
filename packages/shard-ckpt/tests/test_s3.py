"""A server that speaks the S3 protocol, with what such stores have and folders have not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_bytes

from shard_ckpt import (
    Checkpointer,
    CheckpointError,
    convert,
    diff,
    export_hf,
    inspect,
    load,
    load_hf,
    reindex,
    save,
    verify,
)
from shard_ckpt._remote import remote_path
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_threads

pytest.importorskip("s3fs", reason="needs s3fs and moto's server")
server: Any = pytest.importorskip("moto.server", reason="needs s3fs and moto's server")

FULL = torch.arange(6_000_000, dtype=torch.float32)  # two blocks, an upload of several parts


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        remote_path("s3://shelf").make_folder()
        yield "s3://shelf"
    running.stop()


def state_of(comm: Comm, scale: float = 1) -> dict[str, Any]:
    w = shard_tensor(FULL * scale, comm=comm, name="w")
    return {"model": {"w": w, "b": torch.ones(5) * scale}, "step": int(scale)}


def test_a_store(bucket: str, tmp_path: Path) -> None:
    def saved(comm: Comm) -> list[int]:
        steps = Checkpointer(f"{bucket}/run", comm=comm, keep=2, async_=comm.size == 2)
        for step in (1, 2, 3):
            steps.save(step, state_of(comm, step))
        steps.wait()
        comm.barrier()
        return steps.steps()

    assert run_threads(saved, 2) == [[2, 3]] * 2

    def loaded(comm: Comm) -> bool:
        state = state_of(comm, 0)
        step, out = Checkpointer(f"{bucket}/run", comm=comm).restore(state) or (0, {})
        got, want = state["model"]["w"], state_of(comm, 3)["model"]["w"]
        return step == out["step"] == 3 and torch.equal(got.local, want.local)

    assert run_threads(loaded, 3) == [True] * 3
    path = f"{bucket}/run/step-00000003"
    assert verify(path) == ()
    with pytest.raises(FileExistsError, match="never replaced"):
        save(state_of(SoloComm()), path, comm=SoloComm())
    with pytest.raises(FileExistsError):  # the store itself refuses a second marker
        remote_path(f"{path}/COMMITTED").fs.pipe_file(f"{path}/COMMITTED", b"", mode="create")

    export_hf(path, f"{bucket}/hf", comm=SoloComm(), max_shard_size="1MB")
    assert len(remote_path(f"{bucket}/hf").names()) == 3
    model = {"w": torch.zeros_like(FULL), "b": torch.zeros(5)}
    load_hf(model, f"{bucket}/hf", comm=SoloComm())
    assert torch.equal(model["w"], FULL * 3)
    raw = (remote_path(f"{bucket}/hf") / "model-00001-of-00002.safetensors").read_bytes()
    assert load_bytes(raw)["b"].tolist() == [3] * 5

    convert(path, tmp_path / "copy")
    convert(tmp_path / "copy", f"{bucket}/copy")
    assert diff(path, f"{bucket}/copy") == ()
    index = remote_path(f"{path}/{inspect(path).save_id}/index.json")
    index.remove()
    assert reindex(path) is True
    assert verify(path) == ()

    file = remote_path(f"{path}/{inspect(path).save_id}/model-r00000-of-00002.safetensors")
    altered = bytearray(file.read_bytes())
    altered[-1] ^= 1
    file.put(bytes(altered))
    state = state_of(SoloComm(), 0)
    with pytest.raises(CheckpointError, match="altered"):
        load(state, path, comm=SoloComm())
    assert state["model"]["b"].tolist() == [0] * 5
