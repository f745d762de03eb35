"""What is logged, in processes of ranks too, where pytest's caplog does not reach."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(name: str, *, level: int = logging.WARNING) -> Iterator[list[str]]:
    """Collect the messages that a logger gets in the block, of a level or a higher one. Local.

    Args:
        name: of the logger; the root logger's is empty.
        level: the least one, which is the logger's meanwhile.
    """
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    usual = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield records
    finally:
        logger.setLevel(usual)
        logger.removeHandler(handler)
