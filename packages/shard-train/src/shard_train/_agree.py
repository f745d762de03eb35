"""What the ranks decide together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shard_comm import Comm
from shard_train._config import Config
from shard_train._errors import UsageError
from shard_train._folder import RunFolder, claim_folder
from shard_train._memory import held_bytes
from shard_train._text import Text, read_text


def agree(config: Config, comm: Comm) -> tuple[Text, RunFolder | None]:
    """Read the text on all ranks and take the run folder on the first.

    Args:
        config: A resolved and checked configuration.
        comm: The ranks.

    Returns:
        The text, and on rank 0 the folder.

    Raises:
        UsageError: One of the ranks met a mistake; all ranks raise it.

    **Collective**: all ranks of ``comm``.
    """
    text, folder, trouble = None, None, None
    try:
        text = read_text(config.data)
        folder = claim_folder(config, text) if comm.rank == 0 else None
    except UsageError as error:
        trouble = str(error)
    verdicts = comm.all_gather_object((trouble, text.digest if text else None))
    problems = [problem for problem, _ in verdicts if problem]
    if not problems and len({digest for _, digest in verdicts}) > 1:
        problems = [f"--data {config.data.path}: the ranks read different texts there"]
    if problems:
        if folder is not None:
            folder.release()
        raise UsageError(problems[0])
    assert text is not None
    return text, folder


@dataclass(frozen=True)
class Exchange:
    """What the ranks tell each other after each step.

    Attributes:
        loss: Mean over the ranks.
        signal: Number of the signal that the first rank to have one has; 0 for none.
        memory_bytes: The most that one rank holds.
    """

    loss: float
    signal: int
    memory_bytes: int


def exchange(loss: torch.Tensor, signal: int, *, comm: Comm) -> Exchange:
    """Tell the other ranks about a step, in one small collective.

    Args:
        loss: This rank's mean loss, a scalar.
        signal: Number of the signal that this rank has received; 0 for none.
        comm: The ranks.

    Returns:
        The same on all ranks, so that all of them end at the same step.

    **Collective**: all ranks of ``comm``.
    """
    mine = [float(loss), float(signal), float(held_bytes())]
    row = torch.tensor(mine, dtype=torch.float64, device=comm.device)
    rows = comm.empty(3 * comm.size, torch.float64)
    comm.all_gather(rows, row)
    losses, signals, memory = rows.view(comm.size, 3).T.tolist()
    return Exchange(
        loss=sum(losses) / comm.size,
        signal=next((int(number) for number in signals if number), 0),
        memory_bytes=int(max(memory)),
    )
