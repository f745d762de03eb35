"""Run each package's tests where nothing can be imported that it does not declare.

    python tools/check_alone.py [package ...]

One environment serves all packages. For each, the members that its own environment would hold are
put on the path, and an import of any other member, or of a third party that only other members
declare, fails; so it does in every process that a test starts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _absent import VARIABLE
from _workspace import ROOT, Member, Workspace, read_workspace

TOOLS = Path(__file__).resolve().parent


def absent(workspace: Workspace, package: Member) -> set[str]:
    """Return the import names of what the package's environment would not hold.

    Requirements with a marker are left out: what they name may serve the test tools too.
    """
    everything, held = _importable(workspace.members), _importable(workspace.environment(package))
    return everything - held


def run_alone(workspace: Workspace, package: Member) -> int:
    """Run one package's tests; return pytest's exit status."""
    sources = [str(member.path / "src") for member in workspace.environment(package)]
    with tempfile.TemporaryDirectory() as folder:
        guard = "from _absent import install\n\ninstall()\n"
        (Path(folder) / "sitecustomize.py").write_text(guard, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([folder, str(TOOLS), *sources]),
            VARIABLE: ",".join(sorted(absent(workspace, package))),
        }
        command = [sys.executable, "-m", "pytest", "-q", str(package.path / "tests")]
        return subprocess.run(command, cwd=workspace.root, env=environment, check=False).returncode


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Run the tests of all packages, or of those named; exit status 1 if any failed."""
    workspace = read_workspace(root)
    known = [p.name for p in workspace.packages]
    parser = argparse.ArgumentParser(description="Run each package's tests by itself.")
    parser.add_argument("package", nargs="*", help=f"any of {', '.join(known)}; default all")
    names = parser.parse_args(argv).package or known
    if unknown := set(names) - set(known):
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    failed = []
    for name in names:
        package, begin = workspace.member(name), time.monotonic()
        held = ", ".join(m.name for m in workspace.environment(package))
        print(f"--- {name}, with {held}", flush=True)
        if run_alone(workspace, package):
            failed.append(name)
        print(f"--- {name}: {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _importable(members: tuple[Member, ...]) -> set[str]:
    """Return the import names of members and of what they require."""
    required = {r.name for m in members for r in m.requirements if not r.marker}
    return {name.replace("-", "_") for name in required | {m.name for m in members}}


if __name__ == "__main__":
    sys.exit(main())
