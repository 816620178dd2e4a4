"""Parts, numbers, merged files and sentences: a text's part depends on the text alone."""

import random

import numpy as np
import pytest

from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.apps.corpus.collection.reshaping import (
    AddIdConfig,
    MergeConfig,
    PresplitConfig,
    SplitConfig,
    add_ids,
    cumulative_shares,
    exact_bounds,
    merge,
    presplit,
    split_corpus,
)
from megatron.config import ConfigError
from megatron.features.raw_text.encoder import build_splitter

PARTS = ("train", "valid", "test")


def corpus(count: int) -> list[dict]:
    """Documents of which every tenth text occurs three times."""
    texts = [f"text {i}" for i in range(count)]
    texts += [t for t in texts[::10] for _ in range(2)]
    random.Random(0).shuffle(texts)
    return [{"text": text, "n": n} for n, text in enumerate(texts)]


def split(files, records, folder="parts", **flags) -> dict[str, list[dict]]:
    path = files.lines("corpus.jsonl", records)
    config = SplitConfig(input=(path,), output_dir=files / folder, **flags)
    split_corpus(config, LineJobConfig())
    return {part: files.records(f"{folder}/{part}.jsonl") for part in PARTS}


@pytest.mark.parametrize("method", ["hash", "exact"])
def test_every_document_once_and_equal_texts_together(files, method):
    records = corpus(2000)
    found = split(files, records, method=method, split="80,15,5")
    assert sorted(r["n"] for part in PARTS for r in found[part]) == list(range(len(records)))
    texts = [{r["text"] for r in found[part]} for part in PARTS]
    assert not texts[0] & texts[1] and not texts[0] & texts[2] and not texts[1] & texts[2]
    for part in PARTS:  # in the order of the input
        assert [r["n"] for r in found[part]] == sorted(r["n"] for r in found[part])


def test_exact_shares(files):
    records = [{"text": f"text {i}"} for i in range(1000)]
    found = split(files, records, method="exact", split="949,50,1")
    assert [len(found[part]) for part in PARTS] == [949, 50, 1]


def test_hash_shares_are_near_and_stay_when_documents_come(files):
    records = [{"text": f"text {i}"} for i in range(4000)]
    found = split(files, records, split="80,10,10")
    # binomial: five standard deviations of 4000 documents at 10 % are 95
    assert abs(len(found["valid"]) - 400) < 95 and abs(len(found["test"]) - 400) < 95
    more = split(
        files, [{"text": f"text {i}"} for i in range(-500, 4000)], "more", split="80,10,10"
    )
    for part in PARTS:
        assert [r for r in more[part] if r in records] == found[part]


def test_seed_changes_the_split(files):
    records = [{"text": f"text {i}"} for i in range(100)]
    first, same = split(files, records), split(files, records, "again")
    assert first == same != split(files, records, "other", seed=1)


def test_by_another_key(files):
    records = [{"text": f"text {i}", "id": i // 5} for i in range(500)]
    found = split(files, records, key="id", method="exact", split="50,25,25")
    ids = [{r["id"] for r in found[part]} for part in PARTS]
    assert sum(map(len, ids)) == 100 and len(found["train"]) == 250


def test_record_without_the_key_is_malformed(files):
    path = files.lines("corpus.jsonl", [{"text": "a"}, {"other": 1}])
    config = SplitConfig(input=(path,), output_dir=files / "parts", method="exact")
    with pytest.raises(ValueError, match=f'{path}, line 2: no key "text"'):
        split_corpus(config, LineJobConfig())
    assert split_corpus(config, LineJobConfig(on_bad_line="skip")).bad == {'no key "text"': 1}


@pytest.mark.parametrize("text", ["1,2", "a,b,c", "0,0,0", "1,-1,1", "1,nan,1", "inf,1,1"])
def test_refused_shares(text):
    with pytest.raises(ConfigError, match="--split"):
        cumulative_shares(text)


def test_empty_share_gets_nothing():
    assert cumulative_shares("0.9,0.1,0") == pytest.approx((0.9, 1, 1))
    assert cumulative_shares("0.9,0.1,0")[1:] == (1.0, 1.0)


def test_exact_bounds_of_groups():
    hashes = np.array([5, 5, 5, 9, 1], np.uint64)  # 1 | 5 5 5 | 9
    assert exact_bounds(hashes, (0.2, 0.8, 1.0)) == (5, 9, 1 << 64)
    assert exact_bounds(hashes, (1.0, 1.0, 1.0)) == (1 << 64,) * 3
    assert exact_bounds(hashes[:0], (0.5, 1.0, 1.0)) == (1 << 64,) * 3


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


def test_sentences_on_lines(files):
    texts = [
        "Dr. Smith came. He saw\nnothing!  Then he left?",
        "One only",
        " \n ",
        "First.\n\nA second paragraph. End.",
    ]
    path = files.lines("a.jsonl", [{"id": i, "text": text} for i, text in enumerate(texts)])
    config = PresplitConfig(input=(path,), output=files / "b.jsonl", sentence_splitter="rules")
    report = presplit(config, LineJobConfig())
    assert files.records("b.jsonl") == [
        {"id": 0, "text": "Dr. Smith came.\nHe saw nothing!\nThen he left?"},
        {"id": 1, "text": "One only"},
        {"id": 3, "text": "First.\nA second paragraph.\nEnd."},
    ]
    assert report.counts == {"sentences written": 7, "empty documents left out": 1}


def test_sentences_under_another_key(files):
    path = files.lines("a.jsonl", [{"body": "One. Two.", "text": "A. B."}])
    presplit(
        PresplitConfig((path,), files / "b.jsonl", text_key="body", sentence_splitter="rules"),
        LineJobConfig(),
    )
    assert files.records("b.jsonl") == [{"body": "One.\nTwo.", "text": "A. B."}]


@pytest.mark.realdata
def test_sentences_of_real_text_keep_its_words(files, realdata):
    source = realdata / "corpora" / "c4_demo.jsonl"
    config = PresplitConfig((str(source),), files / "b.jsonl", sentence_splitter="rules")
    presplit(config, LineJobConfig())
    import orjson

    split = build_splitter("rules", "english", False)
    texts = [orjson.loads(line)["text"] for line in source.read_bytes().splitlines()]
    assert len(texts) == 300
    for text, record in zip(texts, files.records("b.jsonl"), strict=True):
        assert record["text"].split() == text.split()
        assert len(record["text"].split("\n")) == len(split(text))
