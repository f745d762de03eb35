"""The learning rate over the steps."""

from __future__ import annotations

import math

from shard_train._config import OptimConfig

_FLOOR = 0.1


def learning_rate(step: int, config: OptimConfig) -> float:
    """Return the learning rate of a step.

    It rises evenly to ``lr`` over the first ``warmup`` steps, falls along half a cosine to a
    tenth of it at ``decay_steps``, and stays there. It depends on nothing but the step, so
    a resumed run, or one that is given more steps, follows the same curve.

    Worked example, ``lr=1, warmup=2, decay_steps=6``::

        step   1     2     3      4      5      6     7
        lr     0.5   1.0   0.868  0.55   0.232  0.1   0.1

    Args:
        step: Number of the step, from 1.
        config: The curve.

    Returns:
        The learning rate.

    **Collective**: local.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = min((step - config.warmup) / max(config.decay_steps - config.warmup, 1), 1.0)
    return config.lr * (_FLOOR + (1 - _FLOOR) * (1 + math.cos(math.pi * done)) / 2)
