"""Fenced code blocks of Markdown pages."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_FENCE = "```"


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        language: Word after the opening fence; empty if there is none.
        line: Line number of its first line of code, counted from 1.
        code: Text between the fences.
    """

    language: str
    line: int
    code: str


def read_blocks(page: Path, language: str) -> list[Block]:
    """Return the fenced blocks of one language, in the order of the page.

    Raises:
        ValueError: A fence is not closed.
    """
    blocks: list[Block] = []
    opened: Block | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if opened is None:
            if line.startswith(_FENCE):
                opened, lines = Block(line.removeprefix(_FENCE).strip(), number + 1, ""), []
        elif line.rstrip() == _FENCE:
            code = "".join(text + "\n" for text in lines)
            blocks.append(Block(opened.language, opened.line, code))
            opened = None
        else:
            lines.append(line)
    if opened is not None:
        raise ValueError(f"{page}:{opened.line - 1}: expected a closing {_FENCE}, found none")
    return [block for block in blocks if block.language == language]
