from __future__ import annotations

import json
import os
import pickle
import resource
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shard_ckpt import (
    FileRecord,
    PerRank,
    Range,
    _posix,
    export_hf,
    inspect,
    load,
    save,
    save_async,
    verify,
)
from shard_ckpt._blocks import BLOCK_BYTES
from shard_ckpt._commit import Manifest, build_index
from shard_ckpt._index import encode_index
from shard_ckpt._leaf import Leaf
from shard_comm import Comm, Recorded, SoloComm, ThreadComm
from shard_flat import ParamSpec, ShardSpec, ShardTensor, plan_layout
from shard_testing import run_ranks, run_threads


def piece(full: torch.Tensor, comm: Comm, share: int, origin: int = 0) -> ShardTensor:
    """Cut so that rank ``r`` holds ``[r * share - origin, (r + 1) * share - origin)``."""
    shape = tuple(full.shape)
    start, stop = ShardSpec("", shape, 0, 0, origin, share).range_of(comm.rank)
    spec = ShardSpec("", shape, start, stop, origin, share)
    return ShardTensor(full.reshape(-1)[start:stop].clone(), spec, comm=comm)


def flat_group(comm: Comm, shapes: Sequence[tuple[int, ...]]) -> dict[str, ShardTensor]:
    """Parameters whose pieces are views of one flat shard, as the runtime holds them."""
    specs = [ParamSpec(f"w{at}", shape, torch.float32) for at, shape in enumerate(shapes)]
    layout = plan_layout(specs, comm.size)
    shard = torch.randn(layout.shard_numel, generator=torch.Generator().manual_seed(comm.rank))
    result = {}
    for at, (spec, part) in enumerate(zip(specs, layout.pieces(comm.rank), strict=True)):
        local = shard[part.offset : part.offset + part.numel]
        result[spec.name] = ShardTensor(local, layout.shard_spec(comm.rank, at), comm=comm)
    return result


def stock(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def counted_writes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    calls: list[list[int]] = []
    write = _posix.write

    def counted(fd: int, views: Sequence[memoryview]) -> int:
        calls.append([len(view) for view in views])
        return write(fd, views)

    monkeypatch.setattr(_posix, "write", counted)
    return calls


def test_files_and_keys(tmp_path: Path) -> None:
    full = torch.arange(6.0).view(2, 3)

    def rank(comm: Comm) -> None:
        state = {
            "model": {"w": piece(full, comm, 4, origin=4), "all": piece(full, comm, 6)},
            "optim": {
                "state": {"w": {"step": torch.tensor(3.0), "exp_avg": piece(full, comm, 5)}},
                "param_groups": [{"lr": 0.1, "params": ["w"]}],
            },
            "step": 3,
        }
        save(state, tmp_path / "a", comm=comm)

    run_threads(rank, 3)
    assert sorted(os.listdir(tmp_path / "a")) == [
        "COMMITTED",
        "extra-r00000.json",
        "index.json",
        "model-r00000-of-00003.safetensors",
        "model-r00001-of-00003.safetensors",
        "model-r00002-of-00003.safetensors",
        "optim-r00000-of-00003.safetensors",
        "optim-r00001-of-00003.safetensors",
    ]
    files = {
        name: {key: tensor.tolist() for key, tensor in stock(tmp_path / "a" / name).items()}
        for name in os.listdir(tmp_path / "a")
        if name.endswith(".safetensors")
    }
    assert files == {
        "model-r00000-of-00003.safetensors": {"all": [[0, 1, 2], [3, 4, 5]]},
        "model-r00001-of-00003.safetensors": {"w@0:4": [0, 1, 2, 3]},
        "model-r00002-of-00003.safetensors": {"w@4:6": [4, 5]},
        "optim-r00000-of-00003.safetensors": {"w#exp_avg@0:5": [0, 1, 2, 3, 4], "w#step": 3},
        "optim-r00001-of-00003.safetensors": {"w#exp_avg@5:6": [5]},
    }


def test_a_file_describes_itself(tmp_path: Path) -> None:
    shared = torch.arange(6.0).view(2, 3)
    save({"model": {"w": shared, "tied": shared.view(6)}}, tmp_path / "a", comm=SoloComm())
    with safe_open(tmp_path / "a" / "model-r00000-of-00001.safetensors", framework="pt") as file:
        metadata = file.metadata()
    entries = json.loads(metadata.pop("entries"))
    assert metadata == {
        "format": "pt",
        "version": "2",
        "save_id": inspect(tmp_path / "a").save_id,
        "rank": "0",
        "world_size": "1",
        "section": "model",
    }
    assert entries == {
        "tied": {
            "fqn": "tied",
            "shape": [6],
            "start": 0,
            "stop": 6,
            "ties": [["model", "w", [2, 3]]],
        }
    }


def test_index_says_where_bytes_lie_and_what_they_are(tmp_path: Path) -> None:
    full = torch.arange(10.0)

    def rank(comm: Comm) -> None:
        save({"model": {"w": piece(full, comm, 7)}}, tmp_path / "a", comm=comm)

    run_threads(rank, 2)
    index = json.loads((tmp_path / "a" / "index.json").read_bytes())
    assert index["tensors"] == {
        "model": {
            "w": {"dtype": "F32", "shape": [10], "ranges": [[0, 7, 0, 4096], [7, 10, 2, 4096]]}
        }
    }
    for file in index["files"]:
        data = (tmp_path / "a" / file["name"]).read_bytes()
        assert (file["bytes"], file["crc32"]) == (len(data), f"{zlib.crc32(data):08x}")
    data = (tmp_path / "a" / index["files"][2]["name"]).read_bytes()
    assert data[4096:] == full[7:].numpy().tobytes()


def test_a_flat_shard_is_written_from_its_buffer_in_large_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted_writes(monkeypatch)
    state = flat_group(SoloComm(), [(1000, 1000)] * 10)  # 40 MB in ten views of one buffer
    save({"model": state}, tmp_path / "a", comm=SoloComm())
    nbytes = sum(t.numel() for t in state.values()) * 4
    (header, first), middle, last = (call for call in calls if sum(call) > 5000)
    assert header == 4096
    assert first == BLOCK_BYTES - header
    assert middle == [BLOCK_BYTES]
    assert last == [nbytes - 2 * BLOCK_BYTES + header]
    assert list(stock(tmp_path / "a" / "model-r00000-of-00001.safetensors")) == sorted(state)


def test_slots_of_one_flat_buffer_are_one_run_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """State interleaves the slots of each parameter; on disk each slot's buffer is one run."""
    calls = counted_writes(monkeypatch)
    shapes = [(3, 5), (7, 7), (2,), (11,)]
    exp_avg, exp_avg_sq = flat_group(SoloComm(), shapes), flat_group(SoloComm(), shapes)
    state = {n: {"exp_avg": exp_avg[n], "exp_avg_sq": exp_avg_sq[n]} for n in exp_avg}
    save({"optim": {"state": state, "param_groups": []}}, tmp_path / "a", comm=SoloComm())
    gaps = plan_layout([ParamSpec(str(s), s, torch.float32) for s in shapes], 1).gaps()
    assert len(calls[0]) <= 1 + 2 * (len(gaps) + 1)
    assert sum(calls[0]) == 4096 + 2 * 4 * (15 + 49 + 2 + 11)


def test_every_dtype_is_aligned_without_padding(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.float64, torch.bfloat16, torch.float32, torch.int8, torch.complex64]
    state = {str(at): torch.ones(3, dtype=dtype) for at, dtype in enumerate(dtypes)}
    save({"m": state}, tmp_path / "a", comm=SoloComm())
    for record in inspect(tmp_path / "a").tensors:
        assert record.ranges[0].offset % record.itemsize == 0
    size = (tmp_path / "a" / "m-r00000-of-00001.safetensors").stat().st_size
    assert size == 4096 + 3 * (1 + 8 + 2 + 4 + 1 + 8)


def test_replicated_tensors_are_written_once_and_evenly(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        state: dict[str, Any] = {f"s{at:02d}": torch.full((1000,), float(at)) for at in range(16)}
        state["big"] = torch.arange(3_000_000)
        save({"model": state}, tmp_path / "a", comm=comm)

    run_threads(rank, 4)
    info = inspect(tmp_path / "a")
    sizes = [file.nbytes for file in info.files if file.name.startswith("model")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 4096
    assert sum(sizes) <= 24_000_000 + 16 * 4000 + 4 * 8192
    big = next(record for record in info.tensors if record.name == "big")
    assert [(part.start, part.stop) for part in big.ranges] == [
        (at * 750_000, (at + 1) * 750_000) for at in range(4)
    ]
    assert all(len(record.ranges) == 1 for record in info.tensors if record.name != "big")


def test_no_tensor_travels_and_messages_stay_small(tmp_path: Path) -> None:
    def rank(comm: Comm) -> list[tuple[str, int]]:
        recorded = Recorded(comm)
        state = {"w": piece(torch.zeros(100_000), comm, 50_000)}
        save({"model": state}, tmp_path / "a", comm=recorded)
        return [(op, record.calls) for op, record in recorded.records.items()]

    assert run_threads(rank, 2) == [[("all_gather_object", 3)]] * 2


def test_hybrid_replicas_share_the_writing(tmp_path: Path) -> None:
    """Four ranks, two replicas, each cut over two ranks: every rank writes a quarter."""
    full = torch.arange(4000.0)
    groups = [ThreadComm.group(2), ThreadComm.group(2)]

    def rank(comm: Comm) -> None:
        shard_comm = groups[comm.rank // 2][comm.rank % 2]
        state = {"w": piece(full, shard_comm, 2000)}
        save({"model": state}, tmp_path / "a", comm=comm)

    run_threads(rank, 4)
    (record,) = inspect(tmp_path / "a").tensors
    assert [(part.start, part.stop) for part in record.ranges] == [
        (0, 1000),
        (1000, 2000),
        (2000, 3000),
        (3000, 4000),
    ]
    template = {"w": torch.zeros(4000)}
    load({"model": template}, tmp_path / "a", comm=SoloComm())
    assert torch.equal(template["w"], full)


def test_ties_are_stored_once(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        table = flat_group(comm, [(3, 3), (5,)])
        state = {"embed": table["w0"], "head": table["w0"].detach(), "norm": table["w1"]}
        save({"model": state, "ema": {"embed": table["w0"]}}, tmp_path / "a", comm=comm)

    run_threads(rank, 2)
    info = inspect(tmp_path / "a")
    assert {(r.section, r.name): r.tie for r in info.tensors} == {
        ("ema", "embed"): None,
        ("model", "embed"): ("ema", "embed"),
        ("model", "head"): ("ema", "embed"),
        ("model", "norm"): None,
    }
    data_bytes = sum(f.nbytes - 4096 for f in info.files if f.name.endswith(".safetensors"))
    assert data_bytes == (9 + 5) * 4
    template = {
        "model": {"embed": torch.zeros(3, 3), "head": torch.zeros(3, 3), "norm": torch.zeros(5)},
        "ema": {"embed": torch.zeros(3, 3)},
    }
    load(template, tmp_path / "a", comm=SoloComm())
    assert torch.equal(template["model"]["embed"], template["ema"]["embed"])
    assert torch.equal(template["model"]["head"], template["ema"]["embed"])
    assert template["ema"]["embed"].abs().min() > 0


def test_strided_and_lazy_tensors_are_stored_in_their_order(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    state = {
        "t": base.t(),
        "step": base[:, ::2],
        "expanded": torch.tensor(5.0).expand(2, 2),
        "conj": torch.tensor([1 + 2j]).conj(),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    save({"m": state}, tmp_path / "a", comm=SoloComm())
    found = stock(tmp_path / "a" / "m-r00000-of-00001.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())


def test_saving_again_gives_the_same_bytes_but_for_the_save_id(tmp_path: Path) -> None:
    def rank(comm: Comm) -> None:
        state = {"model": flat_group(comm, [(5, 3), (7,)]), "step": 1, "a": {"b": torch.ones(2)}}
        for name in ("a", "b"):
            save(state, tmp_path / name, comm=comm)

    run_threads(rank, 2)
    ids = [inspect(tmp_path / name).save_id.encode() for name in ("a", "b")]
    assert ids[0] != ids[1]
    names = sorted(os.listdir(tmp_path / "a"))
    assert names == sorted(os.listdir(tmp_path / "b"))
    for name in names:
        if name.startswith(("model", "a-", "extra")):
            left, right = ((tmp_path / at / name).read_bytes() for at in ("a", "b"))
            assert left.replace(ids[0], b"") == right.replace(ids[1], b"")


def test_values_come_back(tmp_path: Path) -> None:
    values = {
        "step": 2**70,
        "loss": float("inf"),
        "name": "é",
        "blob": b"\0\xff",
        "none": None,
        "pair": (1, [2, (3,)]),
        "ints": {0: "a", 1: {"x": True}},
        "empty": {},
    }
    save(values, tmp_path / "a", comm=SoloComm())
    assert load({}, tmp_path / "a", comm=SoloComm()) == values
    assert os.listdir(tmp_path) == ["a"]
    assert verify(tmp_path / "a") == ()


def test_rank_zeros_values_are_stored_unless_marked(tmp_path: Path) -> None:
    def saved(comm: Comm) -> None:
        state = {
            "plain": comm.rank + 10,
            "rng": PerRank({"cpu": torch.tensor([comm.rank]), "seed": b"%d" % comm.rank}),
        }
        save(state, tmp_path / "a", comm=comm)

    def loaded(comm: Comm) -> Any:
        out = load({"plain": 0, "rng": PerRank(None)}, tmp_path / "a", comm=comm)
        return out["plain"], out["rng"]

    run_threads(saved, 3)
    for rank, (plain, rng) in enumerate(run_threads(loaded, 3)):
        assert plain == 10
        assert (rng["cpu"].tolist(), rng["seed"]) == ([rank], b"%d" % rank)
    for plain, rng in run_threads(loaded, 2):
        assert plain == 10
        assert type(rng).__name__ == "RankValues"
        assert [item["cpu"].tolist() for item in rng] == [[0], [1], [2]]


def each_error(fn: Callable[[Comm], None], world_size: int) -> list[str]:
    def rank(comm: Comm) -> str:
        try:
            fn(comm)
        except (ValueError, TypeError, OSError, RuntimeError) as exc:
            return f"{type(exc).__name__}: {exc}"
        return "no error"

    results: list[str] = run_threads(rank, world_size)
    return results


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (
            [{"m": {"w": torch.zeros(2)}}, {"m": {"w": torch.zeros(3)}}],
            "ValueError: m: w: expected ['F32', (2,), None, []] as on rank 0, got "
            "['F32', (3,), None, []] (rank 1 of 2)",
        ),
        (
            [{"m": {"w": torch.zeros(2)}}, {"m": {"v": torch.zeros(2)}}],
            "ValueError: m: v: expected nothing as on rank 0, got ['F32', (2,), None, []]",
        ),
        ([{}, {"r": PerRank(1)}], "ValueError: state['r']: expected nothing as on rank 0"),
        ([{}, {"w": torch.zeros(2)}], "ValueError: state['w']: a tensor needs a section"),
        (
            [{"a": PerRank(1), "b": PerRank(2)}, {"b": PerRank(2), "a": PerRank(1)}],
            "ValueError: state['a']: rank 1 of 2 has state['b'] in its place; all ranks must hold",
        ),
        ([{"x": object()}, {}], "TypeError: state['x']: expected a tensor, number, string"),
    ],
)
def test_ranks_that_differ_all_raise(tmp_path: Path, states: Any, text: str) -> None:
    errors = each_error(lambda comm: save(states[comm.rank], tmp_path / "a", comm=comm), 2)
    assert errors[0] == errors[1]
    assert errors[0].startswith(text)
    assert os.listdir(tmp_path) == []


def test_ranks_with_different_paths_all_raise(tmp_path: Path) -> None:
    errors = each_error(lambda comm: save({}, tmp_path / "ab"[comm.rank], comm=comm), 2)
    assert errors[0] == errors[1]
    assert "pass the same path on all ranks" in errors[0]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("work", ["save", "save_async", "export_hf"])
def test_a_rank_without_a_path_stops_all(tmp_path: Path, work: str) -> None:
    state = {"model": {"w": torch.ones(2)}}
    save(state, tmp_path / "c", comm=SoloComm())

    def rank(comm: Comm) -> None:
        path: Any = None if comm.rank else tmp_path / "out" / "a"
        if work == "save":
            save(state, path, comm=comm)
        elif work == "save_async":
            save_async(state, path, comm=comm).wait()
        else:
            export_hf(tmp_path / "c", path, comm=comm)

    text = "TypeError: expected str, bytes or os.PathLike object, not NoneType"
    zero, one = each_error(rank, 2)
    assert zero == f"{text} (rank 1 of 2)"
    assert one.startswith(text)
    assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]


def test_elements_that_nobody_holds_are_missed_before_publishing(tmp_path: Path) -> None:
    full = torch.zeros(10)
    errors = each_error(
        lambda comm: save(
            {"m": {"w": piece(full, comm, [4, 5][comm.rank])}},
            tmp_path / "a",
            comm=comm,
        ),
        2,
    )
    text = "m: w: nobody stored elements [4, 5) of 10; save with a comm of all ranks that hold"
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"ValueError: {text}")
    assert os.listdir(tmp_path) == []


def test_a_comm_without_all_holders_is_refused(tmp_path: Path) -> None:
    comm = ThreadComm.group(2)[0]
    state = {"m": {"w": piece(torch.zeros(4), comm, 2)}}
    with pytest.raises(ValueError, match="m: w: cut over 2 ranks, but saved by 1"):
        save(state, tmp_path / "a", comm=SoloComm())
    assert os.listdir(tmp_path) == []


def test_one_name_for_two_entries_of_a_file_is_refused(tmp_path: Path) -> None:
    def fn(comm: Comm) -> None:
        state = {"w": piece(torch.zeros(4), comm, 2), "w@0:2": torch.zeros(1)}
        save({"m": state}, tmp_path / "a", comm=comm)

    errors = each_error(fn, 2)
    assert errors[0] == errors[1]
    assert "m: w@0:2 and w would both be called 'w@0:2' in one file" in errors[0].replace(
        "w and w@0:2", "w@0:2 and w"
    )


def test_nothing_is_replaced(tmp_path: Path) -> None:
    save({"step": 1}, tmp_path / "a", comm=SoloComm())
    errors = each_error(lambda comm: save({"step": 2}, tmp_path / "a", comm=comm), 2)
    assert errors[0] == errors[1]
    assert errors[0].startswith("FileExistsError: [Errno 17] a checkpoint is never replaced")
    assert load({}, tmp_path / "a", comm=SoloComm()) == {"step": 1}


def test_memory_does_not_grow_with_the_state(tmp_path: Path) -> None:
    (grown,) = run_ranks(grown_by, 1, str(tmp_path / "a"))
    saving, loading = grown
    assert saving < 8 << 20
    assert loading < 40 << 20


def grown_by(comm: Comm, path: str) -> tuple[int, int]:
    """Save and load 200 MB; return by how many bytes each raised the process's peak."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    warm = {"m": {"w": torch.ones(10)}}
    save(warm, f"{path}-warm", comm=comm)
    load(warm, f"{path}-warm", comm=comm)
    state = {"m": flat_group(comm, [(1000, 1000)] * 50)}
    before = peak()
    save(state, path, comm=comm)
    saved = peak()
    load(state, path, comm=comm)
    return saved - before, peak() - saved


def test_an_index_of_1024_ranks_and_1000_parameters_takes_under_a_second() -> None:
    specs = [ParamSpec(f"w{at:03d}", (2048, 1024), torch.float32) for at in range(1000)]
    layouts = [plan_layout(specs[at : at + 20], 1024) for at in range(0, 1000, 20)]
    none = torch.zeros(1)
    leaves = [Leaf("model", s.name, none, s.shape, 0, 0, 1024, none) for s in specs]
    manifests = []
    for rank in range(1024):
        ranges, offset = [], 4096
        for group, layout in enumerate(layouts):
            for at, part in enumerate(layout.pieces(rank)):
                if part.numel:
                    ranges.append((group * 20 + at, Range(part.start, part.stop, 0, offset)))
                    offset += part.numel * 4
        manifests.append(Manifest((FileRecord(f"r{rank}", offset, b""),), tuple(ranges)))
    started = time.process_time()
    index = build_index(leaves, "id", manifests=manifests)
    assert time.process_time() - started < 1.0
    assert len(encode_index(index)) < 4 << 20
    assert max(len(pickle.dumps(manifest)) for manifest in manifests) < 4096


def test_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save({"m": {"w": torch.ones(2)}, "step": 1}, tmp_path / "a", comm=SoloComm())
    finally:
        os.umask(before)
    modes = {name: (tmp_path / "a" / name).stat().st_mode for name in os.listdir(tmp_path / "a")}
    assert {mode & 0o777 for mode in modes.values()} == {0o640}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o750
