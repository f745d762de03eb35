"""Run mypy over everything that is written in Python here.

    python tools/check_types.py [package ...]

Sources go together in one run. Tests go folder by folder, since test modules of two packages
may share a name. Members are found in the workspace itself, installed or not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from _workspace import ROOT, Workspace, read_workspace


def runs(workspace: Workspace, names: set[str]) -> list[list[Path]]:
    """Return the paths of each mypy run; all members and the workspace itself if no names."""
    members = [m for m in workspace.members if not names or m.name in names]
    groups = [[m.path / "src" for m in members]]
    groups += [[m.path / "tests"] for m in members]
    if not names:
        root = workspace.root
        groups += [sorted([*root.glob("*.py"), *root.glob("tools/*.py")]), [root / "tests"]]
    written = [[path for path in group if _holds_python(path)] for group in groups]
    return [group for group in written if group]


def main(argv: list[str] | None = None) -> int:
    """Run mypy; exit status 1 if any run found something."""
    workspace = read_workspace()
    known = [m.name for m in workspace.members]
    parser = argparse.ArgumentParser(description="Run mypy over sources, tests and tools.")
    parser.add_argument("package", nargs="*", help=f"any of {', '.join(known)}; default all")
    names = set(parser.parse_args(argv).package)
    if unknown := names - set(known):
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    places = [str(m.path / "src") for m in workspace.members] + [str(ROOT / "tools")]
    environment = {**os.environ, "MYPYPATH": os.pathsep.join(places)}
    failed = False
    for group in runs(workspace, names):
        shown = [str(path.relative_to(ROOT)) for path in group]
        print("mypy", *shown, flush=True)
        command = [sys.executable, "-m", "mypy", *shown]
        failed |= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0
    return 1 if failed else 0


def _holds_python(path: Path) -> bool:
    return path.is_file() or any(path.rglob("*.py"))


if __name__ == "__main__":
    sys.exit(main())
