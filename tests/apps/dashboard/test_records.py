"""The record of a run's last start, which is found near its metrics."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megatron.apps.dashboard.records import newest_record, read_record


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


def nested(levels: int, name: str, leaves: int) -> str:
    inner = "{" + ",".join(f'"a{number}":1' for number in range(leaves)) + "}"
    return f'{{"{name}":' * levels + inner + "}" * levels


@pytest.mark.parametrize(
    "content, words",
    [
        (nested(50, "k" * 100_000, 3000), "config.json is left out: it has 5,0"),
        (nested(39, "k" * 100_000, 3000), "config.json: 1 values are left out"),
        (nested(50, "kkkk", 40_000), "config.json: 35,900 values are left out"),
        (nested(3, "k" * 90, 40_000), "config.json: 36,"),
        (nested(101, "k", 1), "config.json is left out: is not valid JSON: nested more than 100"),
        ("[" * 4_000_000, "config.json is left out: is not valid JSON: nested more than 100"),
        (json.dumps({"a": list(range(100_000))}), "config.json: 1 values are left out"),
        (json.dumps({f"k{n}": "x" * 9000 for n in range(400)}), "config.json: 284 values are"),
    ],
)
def test_a_configuration_costs_no_more_than_its_file(content, words, tmp_path):
    """The first took 14 GB."""
    folder = start(tmp_path / "save", 1, "m.jsonl")
    (folder / "config.json").write_text(content)
    tracemalloc.start()
    _, configuration, left_out = read_record(folder)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(left_out) == 1 and left_out[0].startswith(words)
    assert most < 100_000_000
    assert sum(len(name) + len(json.dumps(value)) for name, value in configuration.items()) < 2**21


def test_a_record_has_what_the_page_shows_and_nothing_else(tmp_path):
    """Values of other types than a run writes would end the page's scripts."""
    devices = [{"host": "a", "ranks": [0, 1], "devices": ["H100"], "numbers": [0, 1]}]
    folder = start(
        tmp_path / "save",
        1,
        "m.jsonl",
        hosts=devices,
        data=5,
        git={"commit": ["x"]},
        command=["python"] * 3000,
        end="e" * 20_000,
        versions={"torch": "2", "other": "1"},
        environment={"a": "b" * 10_000},
    )
    record, _, left_out = read_record(folder)
    assert record == {
        "start": 1,
        "folder": str(tmp_path),
        "hosts": [{"host": "a", "ranks": [0, 1], "devices": ["H100"]}],
        "command": ["python"] * 2000,
        "end": "e" * 10_000,
        "versions": {"torch": "2"},
    }
    assert left_out == [
        "record.json: command is cut to the first 2,000 of 3,000",
        "record.json: git is left out: expected a text",
        "record.json: data is left out: expected a list",
    ]
