"""The workspace against its design: dependencies, exports, documents, environments."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import pytest
import yaml

import ci_matrix
import versions
from _imports import Import, parse_imports, read_imports
from _readme import read_blocks
from _workspace import Member, read_workspace

WORKSPACE = read_workspace()

# What each package may need: members, then third parties.
DESIGN: dict[str, tuple[set[str], set[str]]] = {
    "shard-flat": (set(), {"torch"}),
    "shard-comm": (set(), {"torch"}),
    "shard-wrap": (set(), {"torch"}),
    "shard-optim": ({"shard-flat", "shard-comm"}, {"torch"}),
    "shard-ckpt": ({"shard-flat", "shard-comm"}, {"torch", "safetensors"}),
    "shard-fsdp": ({"shard-flat", "shard-comm", "shard-wrap"}, {"torch"}),
    "shard-train": (
        {"shard-flat", "shard-comm", "shard-wrap", "shard-optim", "shard-ckpt", "shard-fsdp"},
        {"torch", "tyro", "rich", "tomli"},
    ),
}
EXTRAS = {
    "shard-ckpt": {"fast", "fsspec"},
    "shard-train": {"hf", "tensorboard", "plots"},
}
STANDARD = sys.stdlib_module_names | {"tomllib"}  # the latter since Python 3.11
TEST_TOOLS = {"pytest", "hypothesis", "numpy"}

each_package = pytest.mark.parametrize("package", WORKSPACE.packages, ids=lambda p: p.name)


def test_packages_are_those_of_the_design() -> None:
    assert {p.name for p in WORKSPACE.packages} == set(DESIGN)
    assert [h.name for h in WORKSPACE.helpers] == ["shard-testing"]


@each_package
def test_declared_dependencies_are_those_of_the_design(package: Member) -> None:
    members, third_parties = DESIGN[package.name]
    assert {m.name for m in WORKSPACE.needs(package)} == members
    assert {r.name for r in package.requirements} == members | third_parties
    assert set(package.extras) == EXTRAS.get(package.name, set())


@each_package
def test_sources_import_only_what_is_declared(package: Member) -> None:
    required = {_importable(r.name) for r in package.requirements}
    optional = {_importable(r.name) for extra in package.extras.values() for r in extra}
    found = _outside(package)
    assert found, f"{package.source} holds no source that imports anything"
    assert not [str(i) for i in found if i.package not in required | optional]
    at_import = [str(i) for i in found if i.eager and i.package in optional - required]
    assert not at_import, "extras may be imported only inside functions"


@each_package
def test_all_that_is_declared_is_needed(package: Member) -> None:
    """By the sources, or by the example with which the package is introduced."""
    declared = {_importable(r.name) for r in package.requirements}
    if package.name == versions.META:  # its purpose is to pin the members, imported or not
        declared -= {m.import_name for m in WORKSPACE.members}
    readme = package.path / "README.md"
    needed = _outside(package) + parse_imports(read_blocks(readme, "python")[0].code, readme)
    assert declared - {i.package for i in needed} == set()


@each_package
def test_tests_import_only_what_their_environment_holds(package: Member) -> None:
    members = {m.import_name for m in WORKSPACE.environment(package)}
    third_parties = {
        _importable(r.name) for m in WORKSPACE.environment(package) for r in m.requirements
    }
    known = STANDARD | TEST_TOOLS | members | third_parties
    found = read_imports(package.path / "tests")
    assert not [str(i) for i in found if i.package not in known]


@each_package
def test_environment_installs_the_closure_and_nothing_else(package: Member) -> None:
    environment = WORKSPACE.settings["tool"]["hatch"]["envs"][package.name]
    patterns = environment["workspace"]["members"]
    listed = {path for pattern in patterns for path in WORKSPACE.root.glob(pattern)}
    assert listed == {m.path for m in WORKSPACE.environment(package)}
    assert environment["template"] == "member"


@each_package
def test_all_lists_the_public_names(package: Member) -> None:
    module = importlib.import_module(package.import_name)
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, ModuleType)
    }
    exported = set(module.__all__) - {"__version__"}
    assert exported == public
    assert len(module.__all__) == len(set(module.__all__))


@each_package
def test_public_names_are_documented(package: Member) -> None:
    module = importlib.import_module(package.import_name)
    assert not [name for name, text in _public_things(module) if not text]


@each_package
def test_modules_are_private(package: Member) -> None:
    names = {path.stem for path in package.source.rglob("*.py")} - {"__init__", "__main__"}
    assert not [name for name in names if not name.startswith("_")]


@each_package
def test_package_is_whole_by_itself(package: Member) -> None:
    assert (package.source / "py.typed").is_file()
    assert list((package.path / "tests").glob("test_*.py"))
    licence = (WORKSPACE.root / "LICENSE").read_text(encoding="utf-8")
    assert (package.path / "LICENSE").read_text(encoding="utf-8") == licence
    readme = (package.path / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"# {package.name}\n")
    changelog = (package.path / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {package.version}" in changelog


@each_package
def test_readme_opens_with_a_short_example_of_the_package_alone(package: Member) -> None:
    example = read_blocks(package.path / "README.md", "python")[0].code
    assert len(example.splitlines()) < 15
    assert package.import_name in example
    above = {m.import_name for m in WORKSPACE.members} - {
        m.import_name for m in WORKSPACE.closure(package)
    }
    assert not [name for name in above if name in example]


def test_versions_move_in_lockstep() -> None:
    assert versions.disagreements(WORKSPACE) == []


def test_ci_workflow_is_up_to_date() -> None:
    assert ci_matrix.main(["--check"]) == 0


def test_ci_workflow_tests_every_package_and_requires_every_job() -> None:
    jobs: dict[str, Any] = yaml.safe_load(ci_matrix.workflow(WORKSPACE))["jobs"]
    for package in WORKSPACE.packages:
        matrix = jobs[package.name]["strategy"]["matrix"]
        assert matrix["python"] == ["3.10", "3.12", "3.13"]
        assert matrix["torch"] == ["torch==2.11.*", "torch"]
        assert jobs[package.name]["steps"][-1] == {"run": f"hatch run {package.name}:test"}
    assert {"lint", "types", "wheels", "demo"} <= set(jobs)
    assert set(jobs["passed"]["needs"]) == set(jobs) - {"passed"}


def test_every_environment_pins_torch_first() -> None:
    environments = WORKSPACE.settings["tool"]["hatch"]["envs"]
    for name in ("default", "member"):
        assert environments[name]["installer"] == "pip"
        assert environments[name]["dependencies"][:2] == [
            "{env:TORCH_REQUIREMENT:torch==2.13.0}",
            "numpy",
        ]


def _importable(distribution: str) -> str:
    return distribution.replace("-", "_")


def _outside(package: Member) -> list[Import]:
    """Return the imports in a package's source of what is neither standard nor its own."""
    own = STANDARD | {package.import_name}
    return [i for i in read_imports(package.source) if i.package not in own]


def _public_things(module: ModuleType) -> Iterator[tuple[str, str | None]]:
    """Yield names and docstrings: the module, what it exports, and public methods of that."""
    yield module.__name__, module.__doc__
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isfunction(thing):
            yield name, thing.__doc__
        if inspect.isclass(thing):
            written = thing.__doc__ or ""
            yield name, None if written.startswith(f"{name}(") else written  # dataclass default
            for key, value in vars(thing).items():
                method = isinstance(value, FunctionType | property | classmethod | staticmethod)
                if method and not key.startswith("_"):
                    yield f"{name}.{key}", inspect.getdoc(getattr(thing, key))
