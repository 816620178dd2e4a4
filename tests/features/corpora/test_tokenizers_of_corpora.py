"""The tokenizer comes with the corpora."""

import json

import pytest

from megatron.config import ConfigError, Setting
from megatron.features.corpora.corpora import with_corpora

NULL = {"tokenizer_type": "NullTokenizer", "vocab_size": 50}


@pytest.fixture
def settings(tmp_path):
    file = tmp_path / "corpora.json"
    corpora = {
        "a": {"files": "a", "tokenizer": NULL},
        "b": {"files": "b"},
        "c": {"files": "c", "tokenizer": NULL | {"vocab_size": 60}},
        "d": {"files": "d", "tokenizer": {"tokenizer_type": "X", "vocab_file": "vocab.txt"}},
        "ab": {"corpora": ["a", "b"]},
    }
    file.write_text(json.dumps(corpora))
    return {"corpora_file": Setting(str(file), "flag --corpora-file")}


def train_data(*words):
    return {"train_data": Setting(words, "flag --train-data")}


def test_nothing_named_nothing_read():
    given = {"corpora_file": Setting("nowhere", "")}
    assert with_corpora(given) is given


def test_a_corpus_says_what_it_was_tokenized_with(settings, tmp_path):
    found = with_corpora(settings | train_data("0.5", "ab", "0.5", "b"))
    origin = f"{tmp_path / 'corpora.json'}: a"
    assert found["tokenizer_type"] == Setting("NullTokenizer", origin)
    assert found["vocab_size"] == Setting(50, origin)
    assert "tokenizer_type" not in with_corpora(settings | train_data("b"))
    own = {"tokenizer_type": Setting("NullTokenizer", "flag --tokenizer-type")}
    assert with_corpora(settings | own | train_data("a"))["tokenizer_type"].origin.startswith(
        "flag"
    )
    path = with_corpora(settings | train_data("d"))["vocab_file"].value
    assert path == str(tmp_path / "vocab.txt")


def test_one_tokenizer_for_all(settings):
    other = {"tokenizer_type": Setting("HFTokenizer", "flag --tokenizer-type")}
    with pytest.raises(
        ConfigError, match="flag --tokenizer-type has tokenizer_type HFTokenizer, bu"
    ):
        with_corpora(settings | other | train_data("a"))
    with pytest.raises(ConfigError, match="json: a has vocab_size 50, but .*json: c was tokenized"):
        with_corpora(settings | train_data("a", "c"))
    valid = {"valid_data": Setting(("c",), "flag --valid-data")}
    with pytest.raises(ConfigError, match="all data of a run must have the same tokenizer"):
        with_corpora(settings | train_data("a") | valid)
