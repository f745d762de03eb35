"""Windows: what is computed in one is computed in the memory of the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shard_optim import Adafactor, AdamW8bit, Lion, _window
from shard_optim._window import Scratch, windows

WINDOW = 512


class NewMemory(TorchDispatchMode):
    """Counts results as large as a window that are in no argument's memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tensors_of((args, kwargs))}
        self.count += sum(
            t.untyped_storage().data_ptr() not in given
            for t in tensors_of(result)
            if t.numel() >= WINDOW
        )
        return result


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


KINDS: dict[str, Callable[[Any], Any]] = {
    "lion": lambda p: Lion(p, lr=0.1, weight_decay=0.1),
    "adamw8bit": lambda p: AdamW8bit(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1, weight_decay=0.1),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_reuse_memory(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype) -> None:
    """However many windows there are."""
    monkeypatch.setitem(_window._WINDOW, "cpu", WINDOW)

    def made(numel: int) -> int:
        params = [nn.Parameter(torch.ones(numel, dtype=dtype)) for _ in range(2)]
        params += [nn.Parameter(torch.ones(128, numel // 128, dtype=dtype))]
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer = KINDS[kind](params)
        optimizer.step()
        with NewMemory() as memory:
            optimizer.step()
        return int(memory.count)

    few = made(16 * WINDOW)
    assert few <= 8
    assert made(64 * WINDOW) == few


def test_memory_of_a_name() -> None:
    room = Scratch()
    first, second = torch.zeros(6), torch.zeros(2, 2, dtype=torch.bfloat16)
    memory = room.take("a", first, torch.float32)
    assert memory.shape == (6,)
    smaller = room.take("a", second, torch.float32)
    assert smaller.shape == (2, 2)
    assert smaller.data_ptr() == memory.data_ptr()
    assert room.take("b", first, torch.float32).data_ptr() != memory.data_ptr()
    assert room.wide("a", first) is first
    wide = room.wide("a", second.fill_(3))
    assert wide.tolist() == [[3.0, 3.0]] * 2
    assert wide.data_ptr() == memory.data_ptr()


def test_windows_lie_at_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_window._WINDOW, "cpu", 4)
    cut = list(windows([torch.arange(10.0).view(2, 5), torch.arange(10)]))
    assert [a.tolist() for a, _ in cut] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [b.tolist() for _, b in cut] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
