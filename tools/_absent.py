"""An import guard: what is named in an environment variable cannot be imported.

It holds for a process and for those that it starts, if `sitecustomize` calls `install`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

VARIABLE = "ABSENT_PACKAGES"


class AbsentFinder(importlib.abc.MetaPathFinder):
    """Refuses to find some packages, wherever they are installed.

    Args:
        packages: Import names of top-level packages.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Raise ModuleNotFoundError for an absent package; leave others to the next finder."""
        if fullname.partition(".")[0] in self.packages:
            raise ModuleNotFoundError(
                f"{fullname}: not declared by the package under test", name=fullname
            )
        return None


def install() -> None:
    """Guard this process from what the variable names, separated by commas."""
    packages = frozenset(filter(None, os.environ.get(VARIABLE, "").split(",")))
    sys.meta_path.insert(0, AbsentFinder(packages))
