"""The table of hyper-parameters in shard-optim's README is that of the code."""

from __future__ import annotations

import re

import torch
from torch import nn

import shard_optim
from _workspace import read_workspace

_README = read_workspace().root / "packages" / "shard-optim" / "README.md"
_ROW = re.compile(r"^\| `(\w+)` \| `(lr=.*)` \|$", re.MULTILINE)


def test_defaults_are_those_of_the_optimizers() -> None:
    rows: dict[str, str] = dict(_ROW.findall(_README.read_text(encoding="utf-8")))
    optimizers = {
        name
        for name in shard_optim.__all__
        if isinstance(kind := getattr(shard_optim, name), type)
        and issubclass(kind, torch.optim.Optimizer)
    }
    assert rows.keys() == optimizers - {"ShardedOptimizer"}
    for name, row in rows.items():
        optimizer = getattr(shard_optim, name)([nn.Parameter(torch.ones(2, 2))])
        assert optimizer.defaults == eval(f"dict({row})"), name
