"""Hold the versions of all members in lockstep.

    python tools/versions.py               check; exit status 1 and one line per disagreement
    python tools/versions.py --set 0.2.0   move every version and every pin, then check

The rules: all members carry one version; the meta-package pins the others with `==`, all
others use `~=`; every member supports the same Pythons and the same torch, and ruff and mypy
check for the oldest of those Pythons.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from _workspace import ROOT, Member, Workspace, read_workspace

META = "shard-train"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def disagreements(workspace: Workspace) -> list[str]:
    """Return one line for each setting that breaks lockstep; empty when all agree."""
    first = workspace.packages[0]
    torch = _torch(first)
    found: list[str] = []
    for member in workspace.members:
        found += _differs(member, "version", member.version, first.version)
        found += _differs(member, "requires-python", member.requires_python, first.requires_python)
        found += _differs(member, "torch", _torch(member), torch)
        operator = "==" if member.name == META else "~="
        names = {m.name for m in workspace.members}
        for requirement in member.requirements:
            if requirement.name in names:
                wanted = operator + first.version
                found += _differs(member, requirement.name, requirement.specifier, wanted)
    return found + _tool_targets(workspace, first.requires_python)


def set_version(workspace: Workspace, version: str) -> None:
    """Write `version` into every member's version and into every pin between members.

    Raises:
        ValueError: `version` is not three numbers.
    """
    if not _VERSION.fullmatch(version):
        raise ValueError(f"--set: expected three numbers such as 0.2.0, got {version!r}")
    names = "|".join(re.escape(m.name) for m in workspace.members)
    own = re.compile(r'^version = "[^"]*"$', re.MULTILINE)
    pin = re.compile(rf'"({names})(==|~=)[^"]*"')
    for member in workspace.members:
        path = member.path / "pyproject.toml"
        text = own.sub(f'version = "{version}"', path.read_text(encoding="utf-8"), count=1)
        path.write_text(pin.sub(rf'"\g<1>\g<2>{version}"', text), encoding="utf-8")


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Check the workspace, after moving it to another version if asked to."""
    parser = argparse.ArgumentParser(description="Check that all members move in lockstep.")
    parser.add_argument("--set", metavar="X.Y.Z", help="write this version everywhere first")
    wanted: str | None = parser.parse_args(argv).set
    if wanted is not None:
        try:
            set_version(read_workspace(root), wanted)
        except ValueError as error:
            parser.error(str(error))
    workspace = read_workspace(root)
    found = disagreements(workspace)
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"{len(workspace.members)} members agree on {workspace.packages[0].version}")
    return 1 if found else 0


def _torch(member: Member) -> str:
    return next((r.specifier for r in member.requirements if r.name == "torch"), "none")


def _differs(member: Member, setting: str, got: str, expected: str) -> list[str]:
    if got == expected:
        return []
    return [f"{member.name}: {setting}: expected {expected}, got {got}"]


def _tool_targets(workspace: Workspace, requires_python: str) -> list[str]:
    """Hold the targets of ruff and mypy against the oldest Python."""
    oldest = requires_python.removeprefix(">=")
    tools = workspace.settings["tool"]
    targets = {
        "ruff target-version": (tools["ruff"]["target-version"], "py" + oldest.replace(".", "")),
        "mypy python_version": (tools["mypy"]["python_version"], oldest),
    }
    return [
        f"pyproject.toml: {name}: expected {expected}, got {got}"
        for name, (got, expected) in targets.items()
        if got != expected
    ]


if __name__ == "__main__":
    sys.exit(main())
