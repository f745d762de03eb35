"""Write the CI workflow from the workspace, and say which packages a change touches.

    python tools/ci_matrix.py                   print the workflow
    python tools/ci_matrix.py --write           write it to .github/workflows/ci.yml
    python tools/ci_matrix.py --check           exit status 1 if that file is out of date
    python tools/ci_matrix.py --affected BASE   print, as a JSON list, the packages to test
                                                for the change since commit BASE

A package is tested when one of its own files changed, or one of a member's that its
environment installs. A change of the settings that all share tests every package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from _workspace import ROOT, Workspace, read_workspace

WORKFLOW = ".github/workflows/ci.yml"
PYTHONS = ("3.10", "3.12", "3.13")
SHARED = frozenset({"pyproject.toml", "conftest.py", WORKFLOW})
FIXED_JOBS = {
    "lint": "hatch run lint",
    "types": "hatch run types",
    "workspace": "hatch run test tests tools",
    "wheels": "hatch run wheels",
    "demo": "hatch run demo",
}

_HEAD = """\
# Written by tools/ci_matrix.py from the workspace; change that and run
# `hatch run ci-matrix --write`.

name: ci

on:
  pull_request:
  push:
    branches: [main]
  workflow_dispatch:

concurrency:
  group: ci-${{ github.ref }}
  cancel-in-progress: ${{ github.event_name == 'pull_request' }}

permissions:
  contents: read

env:
  # Optional repository variable: an index that holds CPU builds of torch, so that no job
  # downloads a CUDA build.
  PIP_EXTRA_INDEX_URL: ${{ vars.PIP_EXTRA_INDEX_URL }}

jobs:
  changes:
    runs-on: ubuntu-latest
    timeout-minutes: 5
    outputs:
      packages: ${{ steps.affected.outputs.packages }}
    steps:
      - uses: actions/checkout@v5
        with:
          fetch-depth: 0
      - uses: actions/setup-python@v6
        with:
          python-version: "3.12"
      - id: affected
        env:
          BASE: ${{ github.event.pull_request.base.sha || github.event.before }}
        run: |
          packages=$(python tools/ci_matrix.py --affected "$BASE")
          echo "packages=$packages" >> "$GITHUB_OUTPUT"
"""

_PACKAGE = """
  PACKAGE:
    needs: changes
    if: contains(fromJSON(needs.changes.outputs.packages), 'PACKAGE')
    runs-on: ubuntu-latest
    timeout-minutes: 30
    strategy:
      fail-fast: false
      matrix:
        python: PYTHONS
        torch: TORCHES
    env:
      TORCH_REQUIREMENT: ${{ matrix.torch }}
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: ${{ matrix.python }}
      - run: python -m pip install hatch
      - run: hatch run PACKAGE:test
"""

_FIXED = """
  JOB:
    runs-on: ubuntu-latest
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v5
      - uses: actions/setup-python@v6
        with:
          python-version: "3.12"
      - run: python -m pip install hatch
      - run: COMMAND
"""

_PASSED = """
  # The one job that a branch rule has to require. Packages left out as untouched are fine.
  passed:
    needs: NEEDS
    if: always()
    runs-on: ubuntu-latest
    timeout-minutes: 5
    steps:
      - if: contains(needs.*.result, 'failure') || contains(needs.*.result, 'cancelled')
        run: exit 1
      - run: echo "all jobs passed"
"""


def workflow(workspace: Workspace) -> str:
    """Return the text of the workflow."""
    torches = ["torch" + torch_floor(workspace), "torch"]
    text = _HEAD
    for package in workspace.packages:
        job = _PACKAGE.replace("PACKAGE", package.name)
        job = job.replace("PYTHONS", json.dumps(PYTHONS))
        text += job.replace("TORCHES", json.dumps(torches))
    for name, command in FIXED_JOBS.items():
        text += _FIXED.replace("JOB", name).replace("COMMAND", command)
    needs = ["changes", *(p.name for p in workspace.packages), *FIXED_JOBS]
    return text + _PASSED.replace("NEEDS", f"[{', '.join(needs)}]")


def torch_floor(workspace: Workspace) -> str:
    """Return the specifier of the oldest torch that the packages support, such as `==2.11.*`.

    Raises:
        ValueError: The packages do not say `torch>=X.Y` with one X.Y.
    """
    floors = {r.specifier for p in workspace.packages for r in p.requirements if r.name == "torch"}
    if len(floors) != 1 or not (floor := min(floors)).startswith(">="):
        raise ValueError(f"torch: expected one floor such as >=2.11, got {sorted(floors)}")
    return f"=={floor.removeprefix('>=')}.*"


def affected(workspace: Workspace, changed: list[str]) -> list[str]:
    """Return the names of the packages to test when these paths changed.

    Args:
        workspace: The workspace.
        changed: Paths relative to its root, with forward slashes.
    """
    if SHARED & set(changed):
        return [p.name for p in workspace.packages]
    touched = {
        member.name
        for member in workspace.members
        for path in changed
        if path.startswith(member.path.relative_to(workspace.root).as_posix() + "/")
    }
    return [p.name for p in workspace.dependents(touched)]


def changed_since(base: str, root: Path) -> list[str] | None:
    """Return the paths that differ from commit `base`, or None if it is not at hand."""
    command = ["git", "diff", "--name-only", "--no-renames", "-z", base, "--"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return [p for p in done.stdout.split("\0") if p] if done.returncode == 0 else None


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Print, write or check the workflow, or print the packages that a change touches."""
    parser = argparse.ArgumentParser(description="Generate the CI workflow from the workspace.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help=f"write {WORKFLOW}")
    action.add_argument("--check", action="store_true", help=f"fail if {WORKFLOW} is out of date")
    action.add_argument("--affected", metavar="BASE", help="packages changed since this commit")
    options = parser.parse_args(argv)
    workspace = read_workspace(root)
    if options.affected is not None:
        changed = changed_since(options.affected, root) if options.affected else None
        everything = [p.name for p in workspace.packages]
        print(json.dumps(everything if changed is None else affected(workspace, changed)))
        return 0
    text, path = workflow(workspace), root / WORKFLOW
    if options.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    elif options.check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{WORKFLOW} is out of date; run `hatch run ci-matrix --write`", file=sys.stderr)
            return 1
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
