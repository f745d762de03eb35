"""Every Python example of the READMEs runs, and every command they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from _readme import read_blocks
from _workspace import read_workspace

WORKSPACE = read_workspace()
PAGES = {
    "root": WORKSPACE.root / "README.md",
    **{package.name: package.path / "README.md" for package in WORKSPACE.packages},
}

each_page = pytest.mark.parametrize("page", PAGES.values(), ids=PAGES.keys())


@each_page
def test_examples_run_in_the_order_of_the_page(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = read_blocks(page, "python")
    assert blocks, f"{page} shows no example"
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks:
        lead = "\n" * (block.line - 1)  # tracebacks name the line of the page
        exec(compile(lead + block.code, page, "exec"), names)


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
