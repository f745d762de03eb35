"""Time saving and loading of a GPT with its AdamW state, in ratios within one run.

    python tools/bench_ckpt.py [--rounds N] [--models 69M 300M] [--folder DIR] [--json PATH]

Two ranks over Gloo, one thread each. Ours, torch.distributed.checkpoint and plain writing take
turns in every round; ratios are medians over rounds. Files are read back from the page cache, as
far as it holds them; what that takes of the processor is what it would last on an idle machine.
Give ``--folder`` to measure another file system than that of the current directory. Of the 300M
model three rounds are run, and only parameters are saved asynchronously, so that all processes
together stay below 6 GiB.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from _bench import Row, make_parser, report, row_of
from shard_ckpt import load, save, save_async
from shard_ckpt._crc import implementation
from shard_comm import Comm, SoloComm
from shard_flat import ParamSpec, ShardTensor, plan_layout
from shard_testing import run_ranks, run_threads

RANKS = 2
OTHER_RANKS = 3
SLOTS = ("param", "exp_avg", "exp_avg_sq")
MIB = 1 << 20

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT with an output layer of its own."""

    vocab: int
    width: int
    blocks: int


SIZES = {"69M": Size(8192, 768, 8), "300M": Size(8192, 1024, 24)}
ROUNDS = {"69M": 5, "300M": 3}
STAGED_SLOTS = {"69M": SLOTS, "300M": ("param",)}


def units_of(size: Size) -> list[list[ParamSpec]]:
    """Return the parameters of each unit: embedding, blocks, output."""
    width = size.width

    def block(prefix: str) -> list[ParamSpec]:
        shapes: dict[str, tuple[int, ...]] = {
            "norm1.weight": (width,),
            "attn.qkv.weight": (3 * width, width),
            "attn.out.weight": (width, width),
            "norm2.weight": (width,),
            "mlp.up.weight": (4 * width, width),
            "mlp.down.weight": (width, 4 * width),
        }
        return [ParamSpec(f"{prefix}.{n}", shape, torch.float32) for n, shape in shapes.items()]

    return [
        [ParamSpec("embed.weight", (size.vocab, width), torch.float32)],
        *(block(f"blocks.{number}") for number in range(size.blocks)),
        [
            ParamSpec("norm.weight", (width,), torch.float32),
            ParamSpec("head.weight", (size.vocab, width), torch.float32),
        ],
    ]


def numel_of(size: Size) -> int:
    """Return the number of parameters."""
    return sum(spec.numel for unit in units_of(size) for spec in unit)


class Carver:
    """Hands out consecutive parts of one buffer, so that both sides use the same memory."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._at = 0

    def take(self, numel: int) -> torch.Tensor:
        """Return the next ``numel`` elements, flat."""
        part = self._buffer[self._at : self._at + numel]
        self._at += numel
        return part


def our_state(
    size: Size, comm: Comm, buffer: torch.Tensor, slots_held: tuple[str, ...] = SLOTS
) -> dict[str, Any]:
    """Return the state as flat shards, one per unit and slot."""
    carver = Carver(buffer)
    model: dict[str, Any] = {}
    slots: dict[str, dict[str, Any]] = {}
    for unit in units_of(size):
        layout = plan_layout(unit, comm.size)
        for slot in slots_held:
            shard = carver.take(layout.shard_numel)
            for at, (spec, piece) in enumerate(zip(unit, layout.pieces(comm.rank), strict=True)):
                local = shard[piece.offset : piece.offset + piece.numel]
                tensor = ShardTensor(local, layout.shard_spec(comm.rank, at), comm=comm)
                if slot == "param":
                    model[spec.name] = tensor
                    slots[spec.name] = {"step": torch.tensor(1.0)}
                else:
                    slots[spec.name][slot] = tensor
    groups = [{"lr": 1e-3, "params": list(model)}]
    return {"model": model, "optim": {"state": slots, "param_groups": groups}, "step": 1}


def dcp_state(size: Size, mesh: DeviceMesh, buffer: torch.Tensor) -> dict[str, Any]:
    """Return the state as torch's FSDP2 shards it: rows over ranks."""
    carver = Carver(buffer)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    result: dict[str, Any] = {"step": 1}
    for slot in SLOTS:
        for unit in units_of(size):
            for spec in unit:
                shape = torch.Size(spec.shape)
                rows = shape[0] * (rank + 1) // ranks - shape[0] * rank // ranks
                local = carver.take(rows * (spec.numel // shape[0])).view(rows, *shape[1:])
                result[f"{slot}.{spec.name}"] = DTensor.from_local(
                    local, mesh, [Shard(0)], shape=shape, stride=torch.empty(shape).stride()
                )
    return result


def buffer_for(size: Size, ranks: int, slots: tuple[str, ...] = SLOTS) -> torch.Tensor:
    """Return memory for one rank's part of the state, written once."""
    room = numel_of(size) * len(slots) // ranks + 64 * 1024
    return torch.randn(room, generator=torch.Generator().manual_seed(0))


def timed(comm: Comm, work: Callable[[], object]) -> float:
    """Return the seconds from when all ranks begin to when all are done."""
    comm.barrier()
    began = time.perf_counter()
    work()
    comm.barrier()
    return time.perf_counter() - began


def write_plainly(buffer: torch.Tensor, path: Path) -> None:
    """Write a rank's bytes one after another, and make them durable; no checksums."""
    bare: Any = buffer.numpy()
    view = memoryview(bare).cast("B")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for low in range(0, len(view), 16 * MIB):
        part = view[low : low + 16 * MIB]
        while part:
            part = part[os.write(fd, part) :]
    os.fsync(fd)
    os.close(fd)


def time_saves(comm: Comm, name: str, folder: str, rounds: int) -> Times:
    """Return seconds of saving ours, torch's and plain bytes, in turns."""
    size, root = SIZES[name], Path(folder)
    buffer = buffer_for(size, comm.size)
    ours = our_state(size, comm, buffer)
    theirs = dcp_state(size, init_device_mesh("cpu", (comm.size,)), buffer)
    plain = buffer[: numel_of(size) * len(SLOTS) // comm.size]
    works: dict[str, Callable[[Path], object]] = {
        "ours": lambda path: save(ours, path, comm=comm),
        "dcp": lambda path: dcp_save(theirs, checkpoint_id=path),
        "plain": lambda path: write_plainly(plain, path.with_name(f"plain-{comm.rank}")),
    }
    times: Times = {kind: [] for kind in works}
    for number in range(rounds + 1):
        for kind, work in works.items():
            path = root / f"{kind}-{number}"
            took = timed(comm, lambda work=work, path=path: work(path))  # type: ignore[misc]
            if number:  # the first is not counted
                times[kind].append(took)
            if comm.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                for rank in range(comm.size):
                    path.with_name(f"plain-{rank}").unlink(missing_ok=True)
            comm.barrier()
    return times


def time_stalls(comm: Comm, name: str, folder: str, rounds: int) -> Times:
    """Return seconds for which the loop stands still, and of a memory copy of the same bytes."""
    size, root, slots = SIZES[name], Path(folder), STAGED_SLOTS[name]
    buffer = buffer_for(size, comm.size, slots)
    state = our_state(size, comm, buffer, slots)
    source = buffer[: numel_of(size) * len(slots) // comm.size]
    copy = torch.zeros_like(source)
    times: Times = {"stall": [], "copy": [], "first": []}
    for number in range(rounds + 1):
        path = root / f"async-{number}"
        comm.barrier()
        began = time.perf_counter()
        handle = save_async(state, path, comm=comm)
        stalled = time.perf_counter() - began
        times["stall" if number else "first"].append(stalled)
        handle.wait()
        comm.barrier()
        began = time.perf_counter()
        copy.copy_(source)
        if number:
            times["copy"].append(time.perf_counter() - began)
        if comm.rank == 0:
            shutil.rmtree(path)
        comm.barrier()
    return times


def write_for_loads(comm: Comm, name: str, folder: str) -> None:
    """Leave one checkpoint of ours and one of torch's."""
    size, root = SIZES[name], Path(folder)
    buffer = buffer_for(size, comm.size)
    save(our_state(size, comm, buffer), root / "same", comm=comm)
    mesh = init_device_mesh("cpu", (comm.size,))
    dcp_save(dcp_state(size, mesh, buffer), checkpoint_id=root / "dcp")


def write_by_others(comm: Comm, name: str, folder: str) -> None:
    """Leave a checkpoint of ours from another number of ranks."""
    size = SIZES[name]
    state = our_state(size, comm, buffer_for(size, comm.size))
    save(state, Path(folder) / "other", comm=comm)


def time_loads(comm: Comm, name: str, folder: str, rounds: int) -> Times:
    """Return seconds of loading, and this rank's bytes read and memory taken by ours."""
    size, root = SIZES[name], Path(folder)
    buffer = buffer_for(size, comm.size)
    ours = our_state(size, comm, buffer)
    theirs = dcp_state(size, init_device_mesh("cpu", (comm.size,)), buffer)
    works: dict[str, Callable[[], object]] = {
        "same": lambda: load(ours, root / "same", comm=comm),
        "other": lambda: load(ours, root / "other", comm=comm),
        "dcp": lambda: dcp_load(theirs, checkpoint_id=root / "dcp"),
    }
    times: Times = {kind: [] for kind in (*works, *(f"{kind} cpu" for kind in works))}
    times["share"] = [numel_of(size) * len(SLOTS) * 4 / comm.size]
    for kind in ("same", "other"):
        drop_cached(root / kind, comm)
        before, resident = read_bytes(), reset_peak()
        load(ours, root / kind, comm=comm)
        times[f"{kind} read"] = [read_bytes() - before]
        times[f"{kind} memory"] = [peak_bytes() - resident]
    for number in range(rounds + 1):
        for kind, work in works.items():
            busy = time.process_time()
            took = timed(comm, work)
            if number:
                times[kind].append(took)
                times[f"{kind} cpu"].append(time.process_time() - busy)
    return times


def drop_cached(folder: Path, comm: Comm) -> None:
    """Ask the system to forget what it holds of a folder's files, so that reads are seen."""
    comm.barrier()
    if comm.rank == 0:
        for path in folder.iterdir():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    comm.barrier()


def _status(path: str, key: str) -> int:
    for line in Path(path).read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise RuntimeError(f"{path}: no {key}")


def read_bytes() -> int:
    """Return what this process has caused to be read from storage, in bytes."""
    return _status("/proc/self/io", "read_bytes:")


def reset_peak() -> int:
    """Forget the peak of resident memory; return what is resident now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("/proc/self/status", "VmRSS:") * 1024


def peak_bytes() -> int:
    """Return the most that was resident since ``reset_peak``, in bytes."""
    return _status("/proc/self/status", "VmHWM:") * 1024


def save_rows(name: str, folder: Path, rounds: int) -> list[Row]:
    """Saving against torch.distributed.checkpoint and plain writing; the stall of async."""
    saved = run_ranks(time_saves, RANKS, name, str(folder), rounds, timeout_s=1800)[0]
    stalls = run_ranks(time_stalls, RANKS, name, str(folder), rounds, timeout_s=1800)
    longest = [max(pair) for pair in zip(*(times["stall"] for times in stalls), strict=True)]
    copies = [max(pair) for pair in zip(*(times["copy"] for times in stalls), strict=True)]
    first = [max(times["first"][0] for times in stalls)]
    return [
        row_of(f"{name}: save, s", "torch", saved["ours"], saved["dcp"], target=1.0),
        row_of(f"{name}: save, s", "plain writing", saved["ours"], saved["plain"], target=1.25),
        row_of(f"{name}: async stall, s", "a memory copy", longest, copies, target=1.2),
        row_of(f"{name}: first async stall, s", "a memory copy", first, copies[:1]),
    ]


def load_rows(name: str, folder: Path, rounds: int) -> list[Row]:
    """Loading against torch.distributed.checkpoint and against another number of ranks."""
    run_ranks(write_for_loads, RANKS, name, str(folder), timeout_s=600)
    run_threads(write_by_others, OTHER_RANKS, name, str(folder), timeout_s=600)
    loaded = run_ranks(time_loads, RANKS, name, str(folder), rounds, timeout_s=1800)
    times = loaded[0]
    load_s, other = f"{name}: load, s", f"{name}: load of {OTHER_RANKS} ranks', s"
    rows = [
        row_of(load_s, "torch", times["same"], times["dcp"], target=1.0),
        row_of(f"{load_s} of processor", "torch", times["same cpu"], times["dcp cpu"]),
        row_of(other, "torch", times["other"], times["dcp"], target=1.2),
        row_of(other, "load", times["other"], times["same"]),
    ]
    share = times["share"][0] / MIB
    for kind, what in (("same", "load"), ("other", f"load of {OTHER_RANKS} ranks'")):
        read = [t[f"{kind} read"][0] / MIB for t in loaded]
        held = max(t[f"{kind} memory"][0] / MIB for t in loaded)
        mean, most, besides = (
            f"{name}: {what}, MiB {of}"
            for of in ("from storage, mean", "from storage, most", "of memory besides")
        )
        rows += [
            row_of(mean, "its share", [sum(read) / len(read)], [share], target=1.01),
            row_of(most, "its share", [max(read)], [share], target=1.01),
            row_of(besides, "64 MiB", [held], [64.0], target=1.0),
        ]
    return rows


def tiny_rows(folder: Path) -> list[Row]:
    """Save and load of many tiny tensors, and of a tenth as many: linear is a ratio of 10."""
    found: dict[int, tuple[float, float]] = {}
    for count in (10_000, 100_000):
        state = {"m": {f"layers.{at}.w": torch.ones(3) for at in range(count)}}
        path = folder / f"tiny-{count}"
        began = time.perf_counter()
        save(state, path, comm=SoloComm())
        saved = time.perf_counter()
        load(state, path, comm=SoloComm())
        found[count] = saved - began, time.perf_counter() - saved
    few, many = found[10_000], found[100_000]
    return [
        row_of(f"100,000 tiny tensors: {what}, s", "10,000", [large], [small], target=15.0)
        for what, small, large in zip(("save", "load"), few, many, strict=True)
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a target is missed."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, help="of each model, instead of its own number")
    parser.add_argument("--models", nargs="+", choices=sorted(SIZES), default=["69M", "300M"])
    parser.add_argument("--folder", type=Path, help="where to write, by default here")
    arguments = parser.parse_args(argv)
    rows = []
    for name in arguments.models:
        for measure in (save_rows, load_rows):
            with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd()) as folder:
                rows += measure(name, Path(folder), arguments.rounds or ROUNDS[name])
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path.cwd()) as folder:
        rows += tiny_rows(Path(folder))
    print(f"torch {torch.__version__}, {RANKS} ranks, medians")
    print(f"checksums by {implementation().__module__}")
    return report(rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
