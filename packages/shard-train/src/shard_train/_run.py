"""Running a configuration, without paying for torch before it is needed."""

from __future__ import annotations

from shard_train._config import Config


def run(config: Config) -> int:
    """Run a configuration to its end, as ``shard train`` does.

    With one rank everything happens in this process, which must call from its main thread, as
    signals are handled there. With more, ranks are started as processes of their own; under
    torchrun this process is one of them.

    Args:
        config: What to run; ``Config()`` is the command without flags.

    Returns:
        0, 1 where a rank failed, 128 and the signal's number where a signal ended the run.

    Raises:
        UsageError: What was asked for cannot be done; the message is one line.

    **Collective**: under torchrun, all ranks.
    """
    # Only now: importing torch takes seconds, and neither help nor a wrong flag needs it.
    from shard_train._start import start

    return start(config)
