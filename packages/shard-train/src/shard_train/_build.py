"""The sharded model and its optimizer."""

from __future__ import annotations

import torch
from torch import nn

from shard_comm import Comm
from shard_fsdp import MixedPrecisionPolicy, fully_shard
from shard_optim import AdamW
from shard_train._config import Config
from shard_train._model import Block, build_model
from shard_wrap import by_class


def sharded_model(config: Config, comm: Comm) -> nn.Module:
    """Build the decoder and shard it, block by block.

    Args:
        config: Sizes, seed and precision.
        comm: The ranks.

    Returns:
        The model; its parameters are sharded over ``comm``.

    **Collective**: all ranks of ``comm``.
    **Memory**: the whole model while it is built, this rank's share of it afterwards.
    """
    model = build_model(config.model, seed=config.data.seed).to(comm.device)
    dtype = torch.bfloat16 if config.model.precision == "bf16" else None
    fully_shard(
        model,
        mesh=comm,
        policy=by_class(Block),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    return model


def make_optimizer(model: nn.Module, config: Config) -> AdamW:
    """Make the optimizer of a sharded model.

    Args:
        model: From ``sharded_model``.
        config: Learning rate and decay.

    Returns:
        AdamW that decays parameters with two or more dimensions; sharded parameters keep the
        number of dimensions of the whole.

    **Collective**: local.
    """
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.optim.lr, betas=(0.9, 0.95))
