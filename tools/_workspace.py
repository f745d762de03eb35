"""The workspace as its own files describe it: members, versions, dependencies.

Every tool and every workspace test reads the workspace here. Only the standard library is
used (and `tomli` on Python 3.10), so a bare interpreter can run the tools.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^]]*\])?\s*([^;]*)(?:;(.*))?$")


@dataclass(frozen=True)
class Requirement:
    """One entry of a dependency list.

    Args:
        name: Normalised distribution name, such as `shard-flat`.
        specifier: Version part without spaces, such as `~=0.1.0`; empty if any version will do.
        marker: Environment marker without the semicolon; empty if unconditional.
    """

    name: str
    specifier: str
    marker: str = ""


@dataclass(frozen=True)
class Member:
    """One distribution of the workspace.

    Args:
        name: Distribution name.
        path: Folder of its `pyproject.toml`.
        version: Static version.
        requires_python: Python range as written.
        requirements: What it needs, members and third parties alike.
        extras: Optional requirements by the name of the extra.
    """

    name: str
    path: Path
    version: str
    requires_python: str
    requirements: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]

    @property
    def import_name(self) -> str:
        """Name of the package to import."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """Folder of the package to import."""
        return self.path / "src" / self.import_name


@dataclass(frozen=True)
class Workspace:
    """All members and the settings of the workspace's root.

    Args:
        root: Top folder.
        packages: Published members, each after the members it needs.
        helpers: Members that exist for tests only and are never published.
        settings: The root `pyproject.toml`.
    """

    root: Path
    packages: tuple[Member, ...]
    helpers: tuple[Member, ...]
    settings: dict[str, Any]

    @property
    def members(self) -> tuple[Member, ...]:
        """Packages and helpers."""
        return self.packages + self.helpers

    def member(self, name: str) -> Member:
        """Return the member of this name; KeyError if there is none."""
        return {m.name: m for m in self.members}[name]

    def needs(self, member: Member) -> tuple[Member, ...]:
        """Return the members that `member` declares itself, in workspace order."""
        declared = {r.name for r in member.requirements}
        return tuple(m for m in self.members if m.name in declared)

    def closure(self, member: Member) -> tuple[Member, ...]:
        """Return `member` and all members below it, in workspace order."""
        found, waiting = {member.name}, [member]
        while waiting:
            for need in self.needs(waiting.pop()):
                if need.name not in found:
                    found.add(need.name)
                    waiting.append(need)
        return tuple(m for m in self.members if m.name in found)

    def environment(self, package: Member) -> tuple[Member, ...]:
        """Return the members that the package's own test environment installs.

        That is its closure and each helper that needs nothing beyond it.
        """
        below = {m.name for m in self.closure(package)}
        usable = (h for h in self.helpers if {m.name for m in self.needs(h)} <= below)
        return self.closure(package) + tuple(usable)

    def dependents(self, names: set[str]) -> tuple[Member, ...]:
        """Return the packages whose tests see one of the named members, in workspace order."""
        return tuple(p for p in self.packages if names & {m.name for m in self.environment(p)})


def parse_requirement(text: str) -> Requirement:
    """Parse one dependency string; ValueError if it is not one."""
    match = _REQUIREMENT.match(text)
    if match is None:
        raise ValueError(f"expected a requirement such as 'torch>=2.11', got {text!r}")
    name, specifier, marker = match.groups()
    normal = re.sub(r"[-_.]+", "-", name).lower()
    return Requirement(normal, re.sub(r"\s", "", specifier), (marker or "").strip())


def read_toml(path: Path) -> dict[str, Any]:
    """Read one TOML file."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def read_member(path: Path) -> Member:
    """Read the member whose `pyproject.toml` lies in `path`."""
    project = read_toml(path / "pyproject.toml")["project"]
    return Member(
        name=project["name"],
        path=path,
        version=project["version"],
        requires_python=project["requires-python"],
        requirements=_requirements(project.get("dependencies", [])),
        extras={k: _requirements(v) for k, v in project.get("optional-dependencies", {}).items()},
    )


def read_workspace(root: Path = ROOT) -> Workspace:
    """Read the workspace below `root`.

    Raises:
        ValueError: Members need one another in a circle.
    """
    packages = [read_member(p.parent) for p in sorted(root.glob("packages/*/pyproject.toml"))]
    helpers = [read_member(p.parent) for p in sorted(root.glob("tools/*/pyproject.toml"))]
    settings = read_toml(root / "pyproject.toml")
    return Workspace(root, _ordered(packages), tuple(helpers), settings)


def _requirements(texts: list[str]) -> tuple[Requirement, ...]:
    return tuple(parse_requirement(text) for text in texts)


def _ordered(packages: list[Member]) -> tuple[Member, ...]:
    """Sort so that each package follows the ones it needs."""
    waiting = {p.name: p for p in packages}
    done: list[Member] = []
    while waiting:
        ready = [p for p in waiting.values() if all(r.name not in waiting for r in p.requirements)]
        if not ready:
            raise ValueError(f"packages need one another in a circle: {', '.join(sorted(waiting))}")
        for package in ready:
            del waiting[package.name]
        done += ready
    return tuple(done)
