"""Build every package and use each one alone in a clean environment.

    python tools/check_wheels.py [package ...] [--out DIR]

Each package is built as a source archive and then as a wheel from that archive. Its wheel is
installed with the wheels of the members below it, and nothing else of the workspace, into an
environment of its own. There `pip check` must pass, the package must import, its console
scripts must answer `--help`, and the first block of its README must run.

torch is large, so it is installed once, as the version that runs this tool, and the
environments see that one installation through a `.pth` file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

from _readme import read_blocks
from _workspace import Member, Workspace, read_toml, read_workspace


def build(workspace: Workspace, packages: list[Member], out: Path) -> dict[str, Path]:
    """Build source archives and wheels into `out`; return the wheels by package name."""
    archives = []
    for package in packages:
        run(package.path, sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out)
        archives.append(out / f"{package.import_name}-{package.version}.tar.gz")
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(out)]
    run(out, *pip_wheel, "--no-deps", "--no-build-isolation", *archives)
    wheels = {p.name: out / f"{p.import_name}-{p.version}-py3-none-any.whl" for p in packages}
    for package in packages:
        names = set(zipfile.ZipFile(wheels[package.name]).namelist())
        info = f"{package.import_name}-{package.version}.dist-info"
        for name in (f"{package.import_name}/py.typed", f"{info}/licenses/LICENSE"):
            if name not in names:
                raise ValueError(f"{wheels[package.name].name}: expected {name}, found none")
    return wheels


def make_environment(path: Path, borrowed: Path | None) -> Path:
    """Make a virtual environment without pip; return its interpreter.

    Args:
        path: Where to make it.
        borrowed: Folder of installed distributions that the environment may also import.
    """
    venv.create(path, with_pip=False, symlinks=os.name != "nt")
    python = path / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if borrowed is not None:
        (site_folder(python) / "borrowed.pth").write_text(f"{borrowed}\n", encoding="utf-8")
    return python


def site_folder(python: Path) -> Path:
    """Return the folder into which this interpreter's pip installs."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python.parent, python, "-Ic", program).strip())


def install(python: Path, things: list[str]) -> None:
    """Install into another environment with this environment's pip."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run(python.parent, *pip, "install", "--quiet", *things)


def check(package: Member, python: Path, folder: Path) -> None:
    """Use an installed package: `pip check`, import, console scripts, the README's first block."""
    run(folder, sys.executable, "-m", "pip", "--python", python, "check")
    run(folder, python, "-Ic", f"import {package.import_name}")
    scripts = read_toml(package.path / "pyproject.toml")["project"].get("scripts", {})
    for script in scripts:
        run(folder, python.parent / script, "--help")
    example = read_blocks(package.path / "README.md", "python")[0]
    (folder / "example.py").write_text(example.code, encoding="utf-8")
    run(folder, python, "-I", folder / "example.py")


def run(folder: Path, *command: str | Path) -> str:
    """Run a command in `folder` and return what it printed.

    Raises:
        RuntimeError: It failed; the message holds the command and all its output.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stdout}{done.stderr}exit {done.returncode}")
    return done.stdout


def main(argv: list[str] | None = None) -> int:
    """Build and check; exit status 1 with the failing command's output if anything fails."""
    workspace = read_workspace()
    known = [p.name for p in workspace.packages]
    parser = argparse.ArgumentParser(description="Use each wheel alone in a clean environment.")
    parser.add_argument("package", nargs="*", help=f"any of {', '.join(known)}; default all")
    parser.add_argument("--out", type=Path, help="keep the archives and wheels in this folder")
    options = parser.parse_args(argv)
    chosen = [p for p in workspace.packages if p.name in (options.package or known)]
    if unknown := set(options.package) - set(known):
        parser.error(f"no such package: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        try:
            check_all(workspace, chosen, options.out, Path(name))
        except (RuntimeError, ValueError) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def check_all(workspace: Workspace, chosen: list[Member], out: Path | None, work: Path) -> None:
    """Check the chosen packages one by one below the folder `work`, printing seconds taken."""
    dist = (out or work / "dist").resolve()
    dist.mkdir(parents=True, exist_ok=True)
    below = {m.name for package in chosen for m in workspace.closure(package)}
    started = time.monotonic()
    wheels = build(workspace, [p for p in workspace.packages if p.name in below], dist)
    started = _report(f"{len(wheels)} packages built", started)
    torch = f"torch=={version('torch').partition('+')[0]}"
    base = make_environment(work / "base", None)
    install(base, [torch])
    started = _report(f"{torch} installed", started)
    for package in chosen:
        folder = work / package.name
        python = make_environment(folder / "venv", site_folder(base))
        members = workspace.closure(package)
        install(python, [torch, *(str(wheels[m.name]) for m in members)])
        check(package, python, folder)
        shutil.rmtree(folder)
        started = _report(f"{package.name} alone", started)


def _report(what: str, started: float) -> float:
    now = time.monotonic()
    print(f"{what}: {now - started:.1f} s", flush=True)
    return now


if __name__ == "__main__":
    sys.exit(main())
