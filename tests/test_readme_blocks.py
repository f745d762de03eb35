"""Every Python example of the pages runs and prints what they show; commands they name exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from _readme import read_blocks
from _workspace import read_workspace

WORKSPACE = read_workspace()
READMES = {
    "root": WORKSPACE.root / "README.md",
    **{package.name: package.path / "README.md" for package in WORKSPACE.packages},
}
PAGES = READMES | {f"docs-{page.stem}": page for page in WORKSPACE.root.glob("docs/**/*.md")}

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


@pytest.mark.parametrize("page", READMES.values(), ids=READMES.keys())
def test_readme_shows_an_example(page: Path) -> None:
    assert read_blocks(page, "python")


@each_page
def test_examples_run_in_the_order_of_the_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(page, "python"):
        lead = "\n" * (block.line - 1)  # tracebacks name the line of the page
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(lead + block.code, page, "exec"), names)
        difference = block.difference(printed.getvalue())
        assert not difference, f"{page}:{block.line}: {difference}"


@each_page
def test_named_commands_exist(page: Path) -> None:
    environments = WORKSPACE.settings["tool"]["hatch"]["envs"]
    scripts = set(environments["default"]["scripts"])
    scripts |= {
        f"{package.name}:{script}"
        for package in WORKSPACE.packages
        for script in environments["member"]["scripts"]
    }
    named = re.findall(r"hatch run ([\w:-]+)", page.read_text(encoding="utf-8"))
    assert set(named) - scripts - {"PACKAGE:test"} == set()
