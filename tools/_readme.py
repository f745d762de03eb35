"""Fenced code blocks of Markdown pages, and what the page says that they print."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, replace
from pathlib import Path

_FENCE = "```"
_INDENT = "    "


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
        language: Word after the opening fence; empty if there is none.
        line: Line number of its first line of code, counted from 1.
        code: Text between the fences.
        output: What the page says that the code prints: the indented block that follows the
            fence, with nothing but blank lines in between; None if there is no such block.
            Dots (``...``) stand for what varies, such as timings.
    """

    language: str
    line: int
    code: str
    output: str | None = None

    def difference(self, printed: str) -> str:
        """Return how ``printed`` differs from the output that is shown; empty if it does not."""
        checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
        if self.output is None or checker.check_output(self.output, printed, flags):
            return ""
        return checker.output_difference(doctest.Example(self.code, self.output), printed, flags)


def read_blocks(page: Path, language: str) -> list[Block]:
    """Return the fenced blocks of one language, in the order of the page.

    Raises:
        ValueError: A fence is not closed.
    """
    text = page.read_text(encoding="utf-8").splitlines()
    blocks: list[Block] = []
    opened: Block | None = None
    for number, line in enumerate(text, start=1):
        if opened is None:
            if line.startswith(_FENCE):
                opened = Block(line.removeprefix(_FENCE).strip(), number + 1, "")
        elif line.rstrip() == _FENCE:
            code = "".join(f"{inside}\n" for inside in text[opened.line - 1 : number - 1])
            blocks.append(replace(opened, code=code, output=_indented(text[number:])))
            opened = None
    if opened is not None:
        raise ValueError(f"{page}:{opened.line - 1}: expected a closing {_FENCE}, found none")
    return [block for block in blocks if block.language == language]


def _indented(lines: list[str]) -> str | None:
    """Return the indented block at the head of some lines, without its indent."""
    found: list[str] = []
    for line in lines:
        if line.strip() and not line.startswith(_INDENT):
            break
        found.append(line.removeprefix(_INDENT).rstrip())
    text = "\n".join(found).strip("\n")
    return f"{text}\n" if text else None
