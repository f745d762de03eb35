"""What a run is made of: four frozen tables."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal

import tyro

from shard_train._errors import UsageError

STDLIB = "stdlib"


@dataclass(frozen=True)
class ModelConfig:
    """The decoder, and the dtype that it computes in.

    Attributes:
        width: Elements per position.
        layers: Number of blocks.
        heads: Attention heads per block; each gets an even share of the width.
        hidden: Elements per position inside the feed-forward; 0 stands for 8/3 of the
            width, rounded up to a multiple of 16.
        tied: Whether input and output use one table.
        precision: Dtype of the computation. Parameters and optimizer state are float32.
    """

    width: int = 256
    layers: int = 4
    heads: int = 4
    hidden: int = 0
    tied: bool = False
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut into batches.

    Attributes:
        path: A text file or a folder of text files; "stdlib" is the Python standard
            library's own source.
        seq: Bytes per sequence.
        batch: Sequences per step, over all ranks.
        held_out: Sequences in the held-out evaluation.
        seed: Draws the initial weights and the batches.
    """

    path: Annotated[str, tyro.conf.arg(name="data")] = STDLIB
    seq: int = 128
    batch: int = 16
    held_out: int = 96
    seed: int = 0


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, and the learning rate over the steps.

    Attributes:
        lr: Highest learning rate.
        warmup: Steps over which it rises from zero.
        decay_steps: Step at which it has fallen, along a cosine, to a tenth; 0 stands for
            the number of steps.
        weight_decay: Decay of parameters with two or more dimensions.
        clip: Largest norm of the gradient.
    """

    lr: float = 2e-3
    warmup: int = 20
    decay_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """How far to go, on how many ranks, and what to keep.

    Attributes:
        steps: Steps in all, those before a restart included.
        ranks: Processes to start on this machine. Under torchrun its own number counts.
        out: Run folder. A folder that holds a run goes on from its last checkpoint.
        save_every: Steps between checkpoints.
        eval_every: Steps between evaluations on the held-out text.
        log_every: Steps between lines where the output is not a terminal.
        keep: Checkpoints to keep.
        sample: Bytes to generate at the end; 0 for none.
    """

    steps: int = 130
    ranks: int = 2
    out: str = "runs/default"
    save_every: int = 40
    eval_every: int = 80
    log_every: int = 10
    keep: int = 2
    sample: int = 240


@dataclass(frozen=True)
class Config:
    """A whole run.

    The first three tables say what is learned and how: a run folder belongs to them. The
    last one may change from one start to the next.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The values by table and key."""
        return asdict(self)

    @property
    def identity(self) -> dict[str, Any]:
        """The values that a run folder belongs to, by ``table.key``."""
        tables = self.tables
        del tables["run"]
        return {f"{name}.{key}": value for name, t in tables.items() for key, value in t.items()}


def resolve(config: Config) -> Config:
    """Fill in what follows from the rest and make paths absolute.

    Args:
        config: As given by flags and files.

    Returns:
        A configuration that means the same from any folder. Resolving it again changes
        nothing.

    **Collective**: local.
    """
    model, data, optim, run = config.model, config.data, config.optim, config.run
    if not model.hidden:
        model = replace(model, hidden=16 * math.ceil(model.width * 8 / 3 / 16))
    if data.path != STDLIB:
        data = replace(data, path=os.path.abspath(os.path.expanduser(data.path)))
    if not optim.decay_steps:
        optim = replace(optim, decay_steps=run.steps)
    run = replace(run, out=os.path.abspath(os.path.expanduser(run.out)))
    return Config(model, data, optim, run)


# In the order in which they are checked: what is given comes before what follows from it.
_ABOVE_ZERO = {
    "run": ("steps", "ranks", "save_every", "eval_every", "log_every", "keep"),
    "model": ("width", "layers", "heads", "hidden"),
    "data": ("seq", "batch", "held_out"),
    "optim": ("lr", "decay_steps", "clip"),
}
_ZERO_OR_MORE = {"data": ("seed",), "optim": ("warmup", "weight_decay"), "run": ("sample",)}


def check_config(config: Config) -> None:
    """Check what can be checked without looking at the machine.

    Args:
        config: A resolved configuration.

    Raises:
        UsageError: A number is out of range, or two do not fit together.

    **Collective**: local.
    """
    tables = config.tables
    for rule, least in ((_ABOVE_ZERO, "above 0"), (_ZERO_OR_MORE, "of 0 or more")):
        for table, keys in rule.items():
            for key in keys:
                value = tables[table][key]
                good = math.isfinite(value) and (value > 0 if rule is _ABOVE_ZERO else value >= 0)
                if not good:
                    raise UsageError(f"{flag(key)}: expected a number {least}, got {value}")
    if config.data.seed >= 2**63:
        raise UsageError(f"--seed: expected a number below 2**63, got {config.data.seed}")
    _check_fit(config)


def _check_fit(config: Config) -> None:
    model, data, run = config.model, config.data, config.run
    if model.precision not in ("fp32", "bf16"):
        raise UsageError(f"--precision: expected fp32 or bf16, got {model.precision!r}")
    if model.width % model.heads:
        raise UsageError(
            f"--width {model.width}: expected a multiple of --heads {model.heads}; "
            f"the nearest are {_nearest(model.width, model.heads)}"
        )
    if model.width // model.heads % 2:
        raise UsageError(
            f"--width {model.width} over --heads {model.heads}: expected an even number of "
            f"elements per head for rotary positions, got {model.width // model.heads}"
        )
    if data.batch % run.ranks:
        raise UsageError(
            f"--batch {data.batch}: expected a multiple of the number of ranks, {run.ranks}, so "
            f"that each gets the same share; the nearest are {_nearest(data.batch, run.ranks)}"
        )


def _nearest(value: int, step: int) -> str:
    below, above = value // step * step, (value // step + 1) * step
    return f"{below} and {above}" if below else str(above)


def flag(key: str) -> str:
    """Return the command-line flag of a key.

    Args:
        key: Name of a field of one of the tables.

    Returns:
        Such as ``--save-every``.

    **Collective**: local.
    """
    return "--data" if key == "path" else "--" + key.replace("_", "-")
