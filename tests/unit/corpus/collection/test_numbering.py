"""Ids and merged files."""

import pytest

from megatron.config import ConfigError
from megatron.corpus.collection.line_job import LineJobConfig
from megatron.corpus.collection.reshaping import AddIdConfig, MergeConfig, add_ids, merge


def test_ids_run_over_files_and_batches(files):
    a = files.lines("a.jsonl", [{"text": str(i)} for i in range(1500)])
    b = files.lines("b.jsonl.gz", [{"text": "x"}, b"bad\n", {"text": "y", "adlr_id": "old"}])
    config = AddIdConfig((a, b), files / "c.jsonl", "cc")
    report = add_ids(config, LineJobConfig(on_bad_line="skip", workers=2))
    found = files.records("c.jsonl")
    assert [r["adlr_id"] for r in found] == [f"cc-{i:010d}" for i in range(1, 1503)]
    assert [r["text"] for r in found] == [*map(str, range(1500)), "x", "y"]
    assert report.bad.total() == 1


def test_id_needs_a_prefix(files):
    with pytest.raises(ConfigError, match="--id-prefix is missing"):
        add_ids(AddIdConfig((files / "a.jsonl",), files / "c.jsonl"), LineJobConfig())


def test_merge_in_order_of_name(files):
    files.lines("b.json", [{"n": 2}])
    files.lines("a.json", [{"n": 1}, b'{"n":  11}'])
    files.lines("c.jsonl.zst", [{"n": 3}])
    for _ in range(2):  # the second time the output is there, and is no input
        merge(MergeConfig((str(files.folder),), files / "merged.json"), LineJobConfig())
        assert files.read("merged.json") == b'{"n": 1}\n{"n":  11}\n{"n": 2}\n{"n": 3}\n'


def test_merge_refuses_what_is_no_json(files):
    path = files.lines("a.json", [{"n": 1}, b"[1]\n"])
    with pytest.raises(ValueError, match=f"{path}, line 2: not a JSON object"):
        merge(MergeConfig((str(files.folder),), files / "merged.json"), LineJobConfig())
    assert not (files.folder / "merged.json").exists()
