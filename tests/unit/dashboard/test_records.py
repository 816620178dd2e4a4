"""The record of a run's last start, which is found near its metrics."""

import json
from pathlib import Path

import pytest

from megatron.dashboard.records import newest_record, read_record


def start(save: Path, number: int, metrics: str, **more: object) -> Path:
    folder = save / "run" / f"{number:03d}"
    folder.mkdir(parents=True)
    record = {"format": 1, "start": number, "folder": str(save.parent), **more}
    (folder / "record.json").write_text(json.dumps(record))
    config = {"logging": {"metrics_file": metrics}, "model": {"num_layers": number, "empty": {}}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_last_start(tmp_path):
    for number in (1, 2, 10):
        last = start(tmp_path / "save", number, "m.jsonl")
    assert newest_record(tmp_path / "m.jsonl") == last
    record, configuration, left_out = read_record(last)
    assert record is not None and record["start"] == 10 and not left_out
    assert configuration == {
        "logging.metrics_file": "m.jsonl",
        "model.num_layers": 10,
        "model.empty": {},
    }


def test_of_several_runs_that_which_wrote_the_file(tmp_path):
    mine = start(tmp_path / "a", 1, "a.jsonl")
    start(tmp_path / "b", 7, "b.jsonl")
    assert newest_record(tmp_path / "a.jsonl") == mine
    assert newest_record(tmp_path / "c.jsonl") is None


def test_a_start_that_is_being_recorded(tmp_path):
    """Its folder has no record yet; folders of other names are none of a start."""
    folder = start(tmp_path / "save", 1, "m.jsonl")
    for name in ("002", "3-partial", "notes"):
        (folder.parent / name).mkdir()
    (folder.parent / "3-partial" / "record.json").write_text("{}")
    assert newest_record(tmp_path / "m.jsonl") == folder


def test_a_path_in_a_record_that_is_none(tmp_path):
    start(tmp_path / "a", 1, "a\0.jsonl")
    mine = start(tmp_path / "b", 1, "m.jsonl")
    assert newest_record(tmp_path / "m.jsonl") == mine


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b'{"a": 1%s}' % (b"0" * 30), b'{"a": "\\ud800"}']
)
def test_broken_records_are_passed_over(content, tmp_path):
    folder = start(tmp_path / "save", 1, "m.jsonl")
    for name in ("record.json", "config.json"):
        (folder / name).write_bytes(content)
    assert newest_record(tmp_path / "m.jsonl") == folder
    record, configuration, left_out = read_record(folder)
    assert (record, configuration) == (None, {})
    assert [line.partition(" is left out: ")[0] for line in left_out] == [
        "record.json",
        "config.json",
    ]
