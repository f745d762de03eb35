"""What benchmarks share: rows of figures, how they are printed and stored, and the exit status."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """Ours held against a reference of the same run.

    Attributes:
        name: what is measured, and in which unit.
        against: the reference.
        ours: our figure.
        reference: that of the reference, in the same unit.
        ratio: ours divided by the reference; the other way round with ``faster``.
        target: the most that the ratio may be, with ``faster`` the least; None where nothing is
            promised.
        faster: the ratio says how many times faster ours is.
    """

    name: str
    against: str
    ours: float
    reference: float
    ratio: float
    target: float | None = None
    faster: bool = False

    @property
    def met(self) -> bool:
        """Whether the ratio is what it should be."""
        if self.target is None:
            return True
        return self.ratio >= self.target if self.faster else self.ratio <= self.target


def row_of(
    name: str,
    against: str,
    ours: Sequence[float],
    reference: Sequence[float],
    *,
    target: float | None = None,
    faster: bool = False,
) -> Row:
    """Return medians over rounds, and the median of the rounds' ratios.

    Args:
        name: what is measured, and in which unit.
        against: the reference.
        ours: our figure of each round.
        reference: that of the reference in the same rounds.
        target: as in ``Row``.
        faster: as in ``Row``.
    """
    over, under = (reference, ours) if faster else (ours, reference)
    ratio = statistics.median(a / b for a, b in zip(over, under, strict=True))
    medians = statistics.median(ours), statistics.median(reference)
    return Row(name, against, *medians, ratio, target, faster)


def make_parser(doc: str | None, *, rounds: int | None = None) -> argparse.ArgumentParser:
    """Return a parser with what all benchmarks take.

    Args:
        doc: the benchmark's; its first line is the description.
        rounds: how many by default, where it measures in rounds.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="rounds that count")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    return parser


def report(rows: Sequence[Row], path: Path | None, **besides: Any) -> int:
    """Print rows and write them to a file if there is one; return 1 if a target is missed, else 0.

    Args:
        rows: one or more.
        path: of the JSON file.
        besides: what else to write there, by name; the rows are ``rows`` then, else alone.
    """
    lines = [["measured", "against", "ours", "reference", "ratio", "target"]]
    for row in rows:
        figures = (_shown(figure) for figure in (row.ours, row.reference, row.ratio))
        bound = "-" if row.target is None else f"{'>=' if row.faster else '<='} {row.target:g}"
        lines.append([row.name, row.against, *figures, bound + ("" if row.met else ", missed")])
    print_table(lines)
    stored = [asdict(row) | {"met": row.met} for row in rows]
    write_json(path, {**besides, "rows": stored} if besides else stored)
    return 0 if all(row.met for row in rows) else 1


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print lines of equally many cells, the heads first, for a terminal or a Markdown page."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in (lines[0], ["-" * width for width in widths], *lines[1:]):
        print("| " + " | ".join(map(str.ljust, line, widths)) + " |")


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures to a file if there is one."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _shown(figure: float) -> str:
    return f"{figure:.4g}" if abs(figure) < 1000 else f"{figure:.0f}"
