"""What a folder of Python files imports, read without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import statement.

    Args:
        package: First part of the imported name.
        path: File that imports it.
        line: Line of the statement, counted from 1.
        eager: Whether importing the file runs the statement; False inside functions and
            below `if TYPE_CHECKING:`.
    """

    package: str
    path: Path
    line: int
    eager: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.package}"


def read_imports(folder: Path) -> list[Import]:
    """Return the absolute imports of all Python files below `folder`."""
    found: list[Import] = []
    for path in sorted(folder.rglob("*.py")):
        found += parse_imports(path.read_text(encoding="utf-8"), path)
    return found


def parse_imports(code: str, path: Path) -> list[Import]:
    """Return the absolute imports of some code, which is or belongs to the file `path`."""
    nodes = _walk(ast.parse(code, str(path)), eager=True)
    return [Import(p, path, node.lineno, eager) for node, eager in nodes for p in _packages(node)]


def _walk(node: ast.AST, *, eager: bool) -> Iterator[tuple[ast.stmt | ast.expr, bool]]:
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        inside = eager and not later and not typing
        if isinstance(child, ast.stmt | ast.expr):
            yield child, inside
        yield from _walk(child, eager=inside)


def _packages(node: ast.stmt | ast.expr) -> list[str]:
    """Return the top-level packages that one node imports, by statement or by literal name."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module] if node.module and not node.level else []
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        literals = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
        names = [value for value in literals if isinstance(value, str)]
    else:
        names = []
    return [name.partition(".")[0] for name in names]
