"""The command line: ``python -m shard_ckpt`` and ``shard ckpt``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

import torch

from shard_ckpt import _commands as commands
from shard_ckpt._commands import Reply
from shard_ckpt._dtypes import torch_dtype
from shard_ckpt._errors import CheckpointError
from shard_ckpt._naming import Naming
from shard_ckpt._progress import told_to
from shard_ckpt._screen import Bar

_TROUBLE = 2

_EPILOG = """\
exit status: 0 done, or nothing found; 1 problems (verify) or differences (diff) found;
2 a mistake in what was asked, or a checkpoint that cannot be read
"""


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m shard_ckpt") -> int:
    """Run a command on checkpoints.

    Args:
        argv: arguments; those of the process if None.
        prog: what help and errors call the command.

    Returns:
        The exit status: 0, 1 for problems or differences found, 2 for an error, which is shown in
        one line, 128 and the signal's number if interrupted.

    Raises:
        SystemExit: help was asked for, or an argument is wrong.

    **Collective**: local.
    """
    options = _parser(prog).parse_args(argv)
    bar = Bar(options.command)
    try:
        with told_to(bar):
            reply: Reply = options.run(options)
    except (CheckpointError, OSError, ValueError, TypeError, ImportError) as exc:
        bar.clear()
        sys.stderr.write(f"{prog}: error: {_one_line(exc)}\n")
        return _TROUBLE
    except KeyboardInterrupt:
        bar.clear()
        return 128 + signal.SIGINT
    bar.clear()
    text = json.dumps(reply.table) if options.json else "\n".join(reply.lines)
    try:
        if text:
            sys.stdout.write(f"{_printable(text)}\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return reply.status


def _printable(text: str) -> str:
    """Return text with escapes for what the terminal's encoding lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _one_line(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.errno is not None:
        where = f"{exc.filename}: " if exc.filename is not None else ""
        return f"{where}{exc.strerror}"
    return " ".join(str(exc).split())


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Look at, check and convert checkpoints.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str, run: Callable[[argparse.Namespace], Reply]) -> _Arguments:
        sub = subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument("--json", action="store_true", help="print one JSON object")
        sub.set_defaults(run=run)
        return _Arguments(sub)

    add("ls", "list the checkpoints in a folder", lambda o: commands.list_folder(o.dir)).place(
        "dir"
    )
    add("inspect", "show what a checkpoint holds", lambda o: commands.show(o.path)).place("path")
    add(
        "verify", "read a whole checkpoint and say what is wrong", lambda o: commands.check(o.path)
    ).place("path")
    add("diff", "compare two checkpoints bit for bit", lambda o: commands.compare(o.a, o.b)).place(
        "a"
    ).place("b")
    _add_export(add("export", "write safetensors files for from_pretrained", _export))
    _add_convert(add("convert", "write a checkpoint of one format as another", _convert))
    add(
        "reindex",
        "make a lost index.json again from the files",
        lambda o: commands.rebuild(o.path, commit=o.commit),
    ).place("path").flag("--commit", "write the marker too, if it is lost as well")
    add(
        "prune",
        "remove all but the newest steps of a folder",
        lambda o: commands.prune(o.dir, keep=o.keep, dry_run=o.dry_run),
    ).place("dir").option("--keep", "N", "how many to keep", type=int, required=True).flag(
        "--dry-run", "only say what would be removed"
    )
    return parser


class _Arguments:
    """Adds arguments to a subcommand, one after another."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def place(self, name: str, text: str = "a path or URL") -> _Arguments:
        self._parser.add_argument(name, metavar=name.upper(), help=text)
        return self

    def flag(self, name: str, text: str) -> _Arguments:
        self._parser.add_argument(name, action="store_true", help=text)
        return self

    def option(self, name: str, metavar: str, text: str, **more: object) -> _Arguments:
        self._parser.add_argument(name, metavar=metavar, help=text, **more)  # type: ignore[arg-type]
        return self


def _add_export(arguments: _Arguments) -> None:
    arguments.place("ckpt").place("out", "a folder without safetensors files, or its URL")
    arguments.option("--max-shard-size", "SIZE", "bytes per file (default: 5GB)", default="5GB")
    arguments.option("--section", "NAME", "which section (default: model)", default="model")
    arguments.option("--cast", "DTYPE", "convert floating-point tensors, to bf16 say", type=_dtype)
    arguments.flag("--no-sync", "do not wait until the files are durable")
    arguments.option("--prefix", "TEXT", "what to take off the front of names", default="")
    arguments.option(
        "--strip", "COMPONENT", "a component to leave out of names", action="append", default=[]
    )
    arguments.option("--rename", "OLD=NEW", "another name", action="append", default=[], type=_pair)
    arguments.option(
        "--tie",
        "NAME=STORED",
        "leave NAME out, which is the same as STORED",
        action="append",
        default=[],
        type=_pair,
    )


def _add_convert(arguments: _Arguments) -> None:
    arguments.place("source").place("path", "the folder to make, or its URL")
    arguments.option(
        "--from",
        "FORMAT",
        "shard, dcp, torch, deepspeed or hf (default: told by its files)",
        dest="source_format",
        default="auto",
    )
    arguments.option(
        "--to", "FORMAT", "shard or dcp (default: shard)", dest="target_format", default="shard"
    )
    arguments.option(
        "--section",
        "OLD=NEW",
        "another name for a section",
        action="append",
        default=[],
        type=_pair,
        dest="sections",
    )
    arguments.option("--skip", "SECTION", "a section to leave out", action="append", default=[])


def _export(options: argparse.Namespace) -> Reply:
    names = Naming(options.prefix, tuple(options.strip), dict(options.rename), dict(options.tie))
    return commands.export(
        options.ckpt,
        options.out,
        max_shard_size=options.max_shard_size,
        section=options.section,
        cast=options.cast,
        durable=not options.no_sync,
        names=names,
    )


def _convert(options: argparse.Namespace) -> Reply:
    return commands.transform(
        options.source,
        options.path,
        source_format=options.source_format,
        target_format=options.target_format,
        sections=dict(options.sections),
        skip=tuple(options.skip),
    )


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"expected two names with = between, got {text!r}")
    return old, new


def _dtype(text: str) -> torch.dtype:
    dtype = torch_dtype(text.upper()) or getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise argparse.ArgumentTypeError(f"expected a floating-point dtype, got {text!r}")
    return dtype
