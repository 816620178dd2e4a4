"""Sentences on lines, against sentence ends that were planted."""

import pytest

from megatron.corpus.collection.line_job import LineJobConfig
from megatron.corpus.collection.reshaping import PresplitConfig, presplit
from megatron.data.sentences import build_splitter


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


def test_another_key(files):
    path = files.lines("a.jsonl", [{"body": "One. Two.", "text": "A. B."}])
    presplit(
        PresplitConfig((path,), files / "b.jsonl", text_key="body", sentence_splitter="rules"),
        LineJobConfig(),
    )
    assert files.records("b.jsonl") == [{"body": "One.\nTwo.", "text": "A. B."}]


@pytest.mark.realdata
def test_real_text_keeps_its_words(files, realdata):
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
