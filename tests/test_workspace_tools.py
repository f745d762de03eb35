"""The tools that read the workspace, each on a copy or an example of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import _bench
import check_alone
import check_types
import ci_matrix
import versions
from _imports import read_imports
from _readme import Block, read_blocks
from _workspace import ROOT, Requirement, parse_requirement, read_workspace

MEMBER = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.10"
dependencies = [{needs}]
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the workspace's settings, without its code."""
    for path in [ROOT / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]:
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def add_member(root: Path, name: str, *needs: str) -> None:
    path = root / "packages" / name / "pyproject.toml"
    path.parent.mkdir(parents=True)
    quoted = ", ".join(f'"{need}"' for need in needs)
    path.write_text(MEMBER.format(name=name, needs=quoted), encoding="utf-8")


class TestWorkspace:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("torch", Requirement("torch", "")),
            ("torch >= 2.11", Requirement("torch", ">=2.11")),
            ("Shard_Flat[x]~=0.1.0", Requirement("shard-flat", "~=0.1.0")),
            (
                "tomli>=2.0; python_version < '3.11'",
                Requirement("tomli", ">=2.0", "python_version < '3.11'"),
            ),
        ],
    )
    def test_requirement(self, text: str, expected: Requirement) -> None:
        assert parse_requirement(text) == expected

    def test_not_a_requirement(self) -> None:
        with pytest.raises(ValueError, match=r"got '>=2\.11'"):
            parse_requirement(">=2.11")

    def test_order_and_closure(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
        add_member(tmp_path, "a-top", "m-middle~=0.1.0", "torch")
        add_member(tmp_path, "m-middle", "z-bottom~=0.1.0")
        add_member(tmp_path, "z-bottom")
        add_member(tmp_path, "b-apart")
        workspace = read_workspace(tmp_path)
        names = [p.name for p in workspace.packages]
        assert names == ["b-apart", "z-bottom", "m-middle", "a-top"]
        closure = workspace.closure(workspace.member("a-top"))
        assert [m.name for m in closure] == ["z-bottom", "m-middle", "a-top"]
        assert [m.name for m in workspace.dependents({"m-middle"})] == ["m-middle", "a-top"]

    def test_circle_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
        add_member(tmp_path, "one", "two")
        add_member(tmp_path, "two", "one")
        with pytest.raises(ValueError, match="circle: one, two"):
            read_workspace(tmp_path)


class TestCheckAlone:
    def test_what_is_absent(self) -> None:
        workspace = read_workspace()
        members = {m.import_name for m in workspace.members}
        flat = check_alone.absent(workspace, workspace.member("shard-flat"))
        assert flat == (members - {"shard_flat"}) | {"safetensors", "tyro", "rich"}
        ckpt = check_alone.absent(workspace, workspace.member("shard-ckpt"))
        assert ckpt == {"shard_wrap", "shard_fsdp", "shard_optim", "shard_train", "tyro", "rich"}
        assert check_alone.absent(workspace, workspace.member("shard-train")) == set()

    def test_an_import_that_is_not_declared_fails(
        self, copy: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Also in a process that a test starts."""
        for name in ("one-package", "other-package"):
            add_member(copy, name)
            module = name.replace("-", "_")
            source = copy / "packages" / name / "src" / f"{module}.py"
            source.parent.mkdir()
            source.write_text("VALUE = 1\n", encoding="utf-8")
            tests = copy / "packages" / name / "tests"
            tests.mkdir()
            run = "subprocess.run([sys.executable, '-c', 'import one_package'], check=True)"
            code = f"import subprocess, sys\n\ndef test_it():\n    import {module}\n    {run}\n"
            (tests / "test_it.py").write_text(code, encoding="utf-8")
        assert check_alone.main(["one-package"], root=copy) == 0
        assert check_alone.main(["one-package", "other-package"], root=copy) == 1
        out, err = capfd.readouterr()
        assert err.endswith("failed: other-package\n")
        assert "one_package: not declared by the package under test" in out


class TestVersions:
    def test_names_each_disagreement(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        edit(copy / "packages/shard-optim/pyproject.toml", "shard-flat~=0.1.0", "shard-flat==0.1.0")
        edit(copy / "packages/shard-wrap/pyproject.toml", "torch>=2.11", "torch>=2.10")
        edit(copy / "pyproject.toml", 'python_version = "3.10"', 'python_version = "3.11"')
        assert versions.main([], root=copy) == 1
        assert capsys.readouterr().err.splitlines() == [
            "shard-wrap: torch: expected >=2.11, got >=2.10",
            "shard-optim: shard-flat: expected ~=0.1.0, got ==0.1.0",
            "pyproject.toml: mypy python_version: expected 3.10, got 3.11",
        ]

    def test_sets_versions_and_pins_and_nothing_else(self, copy: Path) -> None:
        before = read_workspace(copy)
        assert versions.main(["--set", "1.20.3"], root=copy) == 0
        after = read_workspace(copy)
        assert {m.version for m in after.members} == {"1.20.3"}
        meta = {r.name: r.specifier for r in after.member("shard-train").requirements}
        assert meta["shard-fsdp"] == "==1.20.3"
        fsdp = {r.name: r.specifier for r in after.member("shard-fsdp").requirements}
        assert fsdp == {
            "shard-comm": "~=1.20.3",
            "shard-flat": "~=1.20.3",
            "shard-wrap": "~=1.20.3",
            "torch": ">=2.11",
        }
        versions.set_version(after, before.packages[0].version)
        assert read_workspace(copy) == before

    @pytest.mark.parametrize("version", ["1.2", "1.2.3rc1", "v1.2.3", ""])
    def test_refuses_other_versions(self, copy: Path, version: str) -> None:
        before = read_workspace(copy)
        with pytest.raises(SystemExit) as refused:
            versions.main(["--set", version], root=copy)
        assert refused.value.code == 2
        assert read_workspace(copy) == before


class TestCiMatrix:
    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ("packages/shard-wrap/src/shard_wrap/_units.py", {"wrap", "fsdp", "train"}),
            ("packages/shard-ckpt/tests/test_save.py", {"ckpt", "train"}),
            ("packages/shard-flat/README.md", {"flat", "optim", "ckpt", "fsdp", "train"}),
            (
                "tools/shard-testing/src/shard_testing/__init__.py",
                {"comm", "optim", "ckpt", "fsdp", "train"},
            ),
            ("packages/shard-flatter/pyproject.toml", set()),
            ("README.md", set()),
            ("tests/test_parity.py", set()),
            ("conftest.py", {"flat", "comm", "wrap", "optim", "ckpt", "fsdp", "train"}),
        ],
    )
    def test_affected(self, changed: str, expected: set[str]) -> None:
        found = ci_matrix.affected(read_workspace(), ["LICENSE", changed])
        assert set(found) == {f"shard-{name}" for name in expected}

    def test_affected_since_a_commit(self, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
        git(copy, "init", "--quiet")
        git(copy, "add", ".")
        git(copy, "commit", "--quiet", "--message", "one")
        edit(copy / "packages/shard-optim/pyproject.toml", "torch>=2.11", "torch>=2.12")
        assert ci_matrix.main(["--affected", "HEAD"], root=copy) == 0
        assert json.loads(capsys.readouterr().out) == ["shard-optim", "shard-train"]

    @pytest.mark.parametrize("base", ["", "0" * 40])
    def test_an_unknown_commit_affects_everything(
        self, copy: Path, capsys: pytest.CaptureFixture[str], base: str
    ) -> None:
        git(copy, "init", "--quiet")
        assert ci_matrix.main(["--affected", base], root=copy) == 0
        assert len(json.loads(capsys.readouterr().out)) == 7

    def test_check_sees_a_new_package(self, copy: Path) -> None:
        assert ci_matrix.main(["--check"], root=copy) == 1
        assert ci_matrix.main(["--write"], root=copy) == 0
        assert ci_matrix.main(["--check"], root=copy) == 0
        add_member(copy, "shard-new", "torch>=2.11")
        assert ci_matrix.main(["--check"], root=copy) == 1

    def test_no_common_torch_floor_is_refused(self, copy: Path) -> None:
        edit(copy / "packages/shard-wrap/pyproject.toml", "torch>=2.11", "torch>=2.10")
        with pytest.raises(ValueError, match=r"got \['>=2\.10', '>=2\.11'\]"):
            ci_matrix.main([], root=copy)


class TestReadBlocks:
    def test_language_and_line(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text(
            "# T\n\n```sh\nls\n```\n\n```python\na = 1\n\nb = 2\n```\n", encoding="utf-8"
        )
        (block,) = read_blocks(page, "python")
        assert (block.line, block.code) == (8, "a = 1\n\nb = 2\n")

    def test_the_indented_block_that_follows_is_what_the_code_prints(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        shown = "\n\n    1\n\n      2\n\n"
        pages = {
            f"```python\na\n```{shown}Text.\n": "1\n\n  2\n",
            f"```python\na\n```{shown}": "1\n\n  2\n",
            f"```python\na\n```\nText.{shown}": None,
            f"```python\na\n```\n\n```sh\nb\n```{shown}": None,
            "```python\na\n```\n": None,
        }
        for text, output in pages.items():
            page.write_text(text, encoding="utf-8")
            (block,) = read_blocks(page, "python")
            assert block.output == output

    def test_output_that_differs_from_the_page(self) -> None:
        block = Block("python", 1, "run()\n", "loss 3.25 in ... s\n")
        assert block.difference("loss 3.25 in 0.7 s\n") == ""
        for printed in ("loss 3.26 in 0.7 s\n", "loss 3.25\n", ""):
            difference = block.difference(printed)
            assert "loss 3.25 in ... s" in difference
            assert printed.strip() in difference
        assert Block("python", 1, "run()\n").difference("what nobody shows\n") == ""

    def test_open_fence_is_refused(self, tmp_path: Path) -> None:
        page = tmp_path / "page.md"
        page.write_text("text\n```python\na = 1\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"page\.md:2: expected a closing"):
            read_blocks(page, "python")


class TestReadImports:
    def test_eager_and_later_imports(self, tmp_path: Path) -> None:
        lines = [
            "import os.path, torch",
            "from . import _sibling",
            "from typing import TYPE_CHECKING",
            "if TYPE_CHECKING:",
            "    from numpy.typing import NDArray",
            "try:",
            "    import tomllib",
            "except ImportError:",
            "    import tomli",
            "def f():",
            "    import rich",
            "    importlib.import_module('transformers.models')",
        ]
        (tmp_path / "m.py").write_text("\n".join(lines), encoding="utf-8")
        found = [(i.package, i.line, i.eager) for i in read_imports(tmp_path)]
        assert found == [
            ("os", 1, True),
            ("torch", 1, True),
            ("typing", 3, True),
            ("numpy", 5, False),
            ("tomllib", 7, True),
            ("tomli", 9, True),
            ("rich", 11, False),
            ("transformers", 12, False),
        ]


class TestCheckTypes:
    def test_tests_go_one_folder_per_run(self, copy: Path) -> None:
        for place in ("packages/shard-comm/src", "packages/shard-flat/src", "tests"):
            (copy / place).mkdir()
            (copy / place / "some.py").touch()
        for place in ("packages/shard-comm/tests", "packages/shard-flat/tests"):
            (copy / place).mkdir()
        (copy / "packages/shard-flat/tests/test_some.py").touch()

        def shown(names: set[str]) -> list[list[str]]:
            groups = check_types.runs(read_workspace(copy), names)
            return [[path.relative_to(copy).as_posix() for path in group] for group in groups]

        flat = ["packages/shard-flat/tests"]
        assert shown({"shard-flat"}) == [["packages/shard-flat/src"], flat]
        sources = ["packages/shard-comm/src", "packages/shard-flat/src"]
        assert shown(set()) == [sources, flat, ["tests"]]


class TestBench:
    ROUNDS = [1.0, 2.0, 9.0], [2.0, 8.0, 3.0]

    def test_medians_are_of_the_rounds_ratios(self) -> None:
        """Not the ratio of medians: rounds 0.5, 0.25 and 3, or 2, 4 and a third."""
        row = _bench.row_of("step, ms", "torch", *self.ROUNDS)
        assert (row.ours, row.reference, row.ratio, row.met) == (2.0, 3.0, 0.5, True)
        assert _bench.row_of("step, ms", "torch", *self.ROUNDS, faster=True).ratio == 2.0

    @pytest.mark.parametrize(
        ("target", "faster", "missed"),
        [(0.5, False, False), (0.4, False, True), (2.0, True, False), (2.1, True, True)],
    )
    def test_a_target_that_is_missed_is_said(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        target: float,
        *,
        faster: bool,
        missed: bool,
    ) -> None:
        free = _bench.row_of("bytes", "the share", [70_000.0], [7.0])
        row = _bench.row_of("step, ms", "torch", *self.ROUNDS, target=target, faster=faster)
        assert _bench.report([free, row], tmp_path / "rows.json") == int(missed)
        lines = capsys.readouterr().out.splitlines()
        assert len({len(line) for line in lines}) == 1
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
        assert cells[0] == ["bytes", "the share", "70000", "7", "10000", "-"]
        bound = f"{'>=' if faster else '<='} {target:g}{', missed' if missed else ''}"
        assert cells[1] == ["step, ms", "torch", "2", "3", "2" if faster else "0.5", bound]
        stored = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
        assert [each["met"] for each in stored] == [True, not missed]
        assert stored[1]["target"] == target
        _bench.report([free], tmp_path / "more.json", seconds=[1.5])
        more = json.loads((tmp_path / "more.json").read_text(encoding="utf-8"))
        assert more == {"seconds": [1.5], "rows": stored[:1]}


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)
