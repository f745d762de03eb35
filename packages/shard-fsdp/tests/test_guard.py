"""Saved tensors that autograd may not read for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shard_fsdp._guard import ReadGuard


def test_a_closed_guard_stops_backward_and_an_open_one_does_not() -> None:
    weights = [nn.Parameter(torch.tensor([3.0])), nn.Parameter(torch.tensor([5.0]))]
    guard = ReadGuard(weights)
    x = torch.ones(1, requires_grad=True)
    out = (x * weights[0] * weights[1].view(1, 1)).sum()
    for _ in range(2):
        guard.close()
        guard.close()
        assert [w._version for w in weights] == [1, 1]
        with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
            out.backward(retain_graph=True)
        guard.open()
        guard.open()
        assert [w._version for w in weights] == [0, 0]
    out.backward()
    assert x.grad is not None
    assert x.grad.item() == 15
