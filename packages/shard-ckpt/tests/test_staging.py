from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shard_ckpt import load, save
from shard_ckpt._staging import Windows
from shard_comm import SoloComm

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [0, 1, 31, 32, 33, 64, 100])
def test_a_tensor_is_read_out_in_windows(numel: int) -> None:
    source = torch.arange(numel, dtype=torch.uint8)
    windows = Windows(CPU, window_bytes=32)
    for _ in range(2):
        parts = [view.tobytes() for view in windows.read_out(source)]
        assert b"".join(parts) == bytes(range(numel))
        assert [len(part) for part in parts] == [min(32, numel - at) for at in range(0, numel, 32)]


def test_a_view_is_good_until_the_next_but_one_is_made() -> None:
    windows = Windows(CPU, window_bytes=4)
    views = windows.read_out(torch.arange(12, dtype=torch.uint8))
    first = next(views)
    assert first.tobytes() == bytes([0, 1, 2, 3])
    second = next(views)
    assert second.tobytes() == bytes([4, 5, 6, 7])


def test_two_windows_take_turns() -> None:
    windows = Windows(CPU, window_bytes=4)
    taken = []
    for _ in range(3):
        taken.append(windows.take().data_ptr())
        windows.hand_over()
    windows.drain()
    assert taken[0] == taken[2] != taken[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    flat = torch.randn(20_000_000, device="cuda")
    state = {"a": flat[:7], "b": flat[7:19_999_999], "c": flat[-1:].bfloat16(), "d": flat.t()}
    save({"model": state}, tmp_path / "a", comm=SoloComm("cuda"))
    for device in ("cuda", "cpu"):
        template = {key: torch.zeros_like(value, device=device) for key, value in state.items()}
        load({"model": template}, tmp_path / "a", comm=SoloComm(device))
        for key, value in state.items():
            assert torch.equal(template[key].cpu(), value.cpu()), key
