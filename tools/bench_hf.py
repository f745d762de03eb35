"""Time the export of Hugging Face files against torch's consolidation, in one run.

    python tools/bench_hf.py [--width N] [--layers N] [--rounds N] [--folder PATH] [--json PATH]

Two ranks are two processes over Gloo with one thread each. Both sides begin with what two ranks
saved of the same model, whole rows on each, and end with the same files. Ours and the reference
take turns in every round; a round lasts as long as its slower rank, and the ratio is the median
over rounds. Seconds of the processor are the busier rank's: on an idle machine, what is not spent
waiting for the disk. Ours compares checksums, torch has none. Neither waits for the disk, as
torch's cannot, but in the last rows, where torch's files are synced after it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from _bench import Row, make_parser, report, row_of
from shard_ckpt import export_hf, save
from shard_comm import Comm, SoloComm
from shard_flat import shard_tensor
from shard_testing import run_ranks

_WORLD_SIZE = 2
_FILES = 2


class Took(NamedTuple):
    """Seconds of a wall clock and of the processor."""

    wall_s: float
    busy_s: float


def shapes_of(width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a decoder."""
    result: dict[str, tuple[int, ...]] = {"embed.weight": (32_000, width)}
    for layer in range(layers):
        name = f"layers.{layer}"
        result |= {f"{name}.attn.{part}.weight": (width, width) for part in "qkvo"}
        result |= {f"{name}.mlp.up.weight": (4 * width, width)}
        result |= {f"{name}.mlp.down.weight": (width, 4 * width)}
        result |= {f"{name}.norm.weight": (width,)}
    return result


def prepare(comm: Comm, folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Save the model on both sides; return which file each tensor goes to on torch's."""
    mesh = init_device_mesh("cpu", (comm.size,))
    ours, theirs = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        full = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        ours[name] = shard_tensor(full, comm=comm, name=name)
        theirs[name] = distribute_tensor(full, mesh, [Shard(0)])
    save({"model": ours}, folder / "ours", comm=comm)
    names = list(shapes)
    files = {name: 1 + at * _FILES // len(names) for at, name in enumerate(names)}
    writer = HuggingFaceStorageWriter(
        path=str(folder / "theirs"), fqn_to_index_mapping=files, save_distributed=True
    )
    save_dcp(theirs, storage_writer=writer)
    return files


def bench_rank(
    comm: Comm, folder: Path, shapes: dict[str, tuple[int, ...]], rounds: int
) -> list[Row]:
    """Time all rows on one rank; all ranks get the same rows."""
    files = prepare(comm, folder, shapes)
    nbytes = 4 * sum(torch.Size(shape).numel() for shape in shapes.values())
    out, other = folder / "out", folder / "other"
    limit = nbytes // _FILES + (1 << 20)

    def ours(*, durable: bool = False) -> None:
        export_hf(folder / "ours", out, comm=comm, max_shard_size=limit, durable=durable)

    def ours_alone() -> None:
        if comm.rank == 0:
            one = SoloComm()
            export_hf(folder / "ours", out, comm=one, max_shard_size=limit, durable=False)

    def theirs() -> None:
        consolidate_safetensors_files_on_every_rank(str(folder / "theirs"), str(other), files)

    def theirs_alone() -> None:
        if comm.rank == 0:
            consolidate_safetensors_files(str(folder / "theirs"), str(other), files)

    def theirs_synced() -> None:
        theirs_alone()
        if comm.rank == 0:
            sync_files(other)

    def durably() -> None:
        ours(durable=True)

    first, every = "consolidation as DCP's save runs it", "consolidation on every rank"
    rows = []
    for name, reference, one, two, target in [
        ("export by two ranks", first, ours, theirs_alone, 3.0),
        ("export by one process", first, ours_alone, theirs_alone, None),
        ("export by two ranks", every, ours, theirs, None),
        ("durable export by two ranks", f"{first}, synced", durably, theirs_synced, None),
    ]:
        mine: list[Took] = []
        his: list[Took] = []
        for turn in range(rounds + 1):
            pair = (timed(comm, one, out), timed(comm, two, other))
            if comm.rank == 0 and turn == 0:
                check_same(out, other)
            if turn:  # the first round warms up
                mine.append(pair[0])
                his.append(pair[1])
        wall = [took.wall_s for took in mine], [took.wall_s for took in his]
        busy = [took.busy_s for took in mine], [took.busy_s for took in his]
        rows.append(row_of(f"{name}, s", reference, *wall, target=target, faster=True))
        rows.append(row_of(f"{name}, s of processor", reference, *busy, faster=True))
    return rows


def timed(comm: Comm, work: Callable[[], None], out: Path) -> Took:
    """Return what the slower rank took to fill an empty folder."""
    if comm.rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()
    comm.barrier()
    begin, busy = time.perf_counter(), time.process_time()
    work()
    took = comm.all_gather_object((time.perf_counter() - begin, time.process_time() - busy))
    return Took(max(wall for wall, _ in took), max(busy for _, busy in took))


def sync_files(folder: Path) -> None:
    """Return when a folder's files are durable."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def check_same(one: Path, other: Path) -> None:
    """Raise if two exports differ."""
    left, right = (
        {k: v for p in f.glob("*.safetensors") for k, v in load_file(p).items()}
        for f in (one, other)
    )
    if left.keys() != right.keys() or not all(torch.equal(left[n], right[n]) for n in left):
        raise AssertionError("the two exports differ")


def main(argv: list[str] | None = None) -> int:
    """Run the comparison; exit status 1 if a target is missed."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--width", type=int, default=1024, help="of the decoder")
    parser.add_argument("--layers", type=int, default=21, help="of the decoder")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    options = parser.parse_args(argv)
    shapes = shapes_of(options.width, options.layers)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows: list[Row] = run_ranks(
            bench_rank, _WORLD_SIZE, Path(folder), shapes, options.rounds, timeout_s=1200
        )[0]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
