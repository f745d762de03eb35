from __future__ import annotations

from pathlib import Path

from shard_train._metrics import MetricsLog, read_metrics


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    log = MetricsLog(path, after=0)
    entries = [{"step": 0, "held_out_loss": 5.5}, {"step": 1, "loss": 5.25}]
    for entry in entries:
        log.write(entry)
    assert read_metrics(path) == entries  # before it is closed: nothing is held back
    log.close()


def test_steps_to_be_taken_again_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (0, 1, 2, 2, 3, 4)))
    log = MetricsLog(path, after=2)
    log.write({"step": 3, "again": True})
    log.close()
    assert read_metrics(path) == [
        {"step": 0},
        {"step": 1},
        {"step": 2},
        {"step": 2},
        {"step": 3, "again": True},
    ]


def test_line_cut_off_by_a_kill_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1}]
    log = MetricsLog(path, after=5)
    log.write({"step": 2})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
