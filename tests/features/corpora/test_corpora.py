"""Corpora that the data flags name."""

import json

import pytest

from megatron.config import ConfigError, DataConfig
from megatron.data.sources import Blend, BlendReader, DataSource, Parts
from megatron.features.corpora.corpora import Corpora, NamedSources, read_corpora


def parts(reader: BlendReader, **fields: object) -> Parts:
    return reader.parts(DataConfig(**fields))


def corpora(tmp_path, content) -> BlendReader:
    file = tmp_path / "corpora.json"
    file.write_text(json.dumps(content))
    known = read_corpora(str(file), ("indexed", "text", "instruction"))
    return BlendReader(by_name=NamedSources(known))


CORPORA = {
    "wiki": {"files": ["w1", "w2"], "weight": 3, "range": "0:0.9"},
    "books": {"files": "b.jsonl", "type": "text", "text_key": "body", "weight": 1},
    "web": {"files": "web"},
    "both": {"corpora": ["wiki", "books"]},
    "all": {"corpora": ["both", "web"]},
}


def test_corpora_by_name(tmp_path) -> None:
    reader = corpora(tmp_path, CORPORA)
    wiki = DataSource((str(tmp_path / "w1"), str(tmp_path / "w2")), "indexed", 3, (0.0, 0.9))
    books = DataSource((str(tmp_path / "b.jsonl"),), "text", 1, text_key="body")
    sources = parts(reader, train_data=("wiki", "books"), split="8,1,1")
    assert sources.train == Blend("--train-data", (wiki, books), "8,1,1", 0)
    assert set(sources.valid) == {"valid"} and set(sources.test) == {"test"}
    own = parts(reader, train_data=("both",), valid_data=("web",))
    assert own.train == Blend("--train-data", (wiki, books)) and own.test == {}
    assert own.valid["valid"].sources == (DataSource((str(tmp_path / "web"),)),)
    weighted = parts(reader, train_data=("8", "both", "2", "web"))
    assert weighted.train is not None
    assert [s.weight for s in weighted.train.sources] == [6.0, 2.0, 2.0]


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="has no corpus nobody"):
        parts(BlendReader(by_name=NamedSources(Corpora())), train_data=("nobody",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "one JSON object"),
        ({"a": {"file": "x"}}, "a must be an object with keys among files"),
        ({"a": {}}, "a needs files"),
        ({"a": {"files": []}}, "a needs files"),
        ({"a": {"files": "x", "type": "tape"}}, "type 'tape' must be one of indexed, text"),
        ({"a": {"files": "x", "weight": 0}}, "weight 0 is not"),
        ({"a": {"files": "x", "range": "0.5"}}, "range '0.5' is not FIRST:LAST"),
        ({"a": {"files": "x", "range": "1:0"}}, "the range 1:0 must be"),
        ({"a": {"files": "no/*.bin"}}, "no/\\*.bin matches no file"),
        ({"a": {"files": "x", "tokenizer": {"vocab": "y"}}}, "tokenizer must be an object"),
        ({"a": {"corpora": ["b"], "weight": 1}}, "a group must have only a list"),
        ({"a": {"corpora": ["a"]}}, "the group a contains itself"),
        ({"wiki": {"files": "x"}, "b": {"corpora": ["wikki"]}}, "Did you mean wiki"),
    ],
)
def test_corpora_files_that_cannot_be_used(tmp_path, content, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(corpora(tmp_path, content), train_data=tuple(content)[-1:])


def test_a_weight_over_a_group_without_weights(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--train-data 2 all: .* web has none"):
        parts(corpora(tmp_path, CORPORA), train_data=("2", "all", "1", "web"))


def test_a_missing_corpora_file() -> None:
    with pytest.raises(ConfigError, match="--corpora-file nowhere.json does not exist"):
        read_corpora("nowhere.json", ("indexed",))


def test_a_corpus_is_named_once(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--train-data wiki both names wiki twice"):
        parts(corpora(tmp_path, CORPORA), train_data=("wiki", "both"))
    twice = {"a": {"files": "x"}, "b": {"corpora": ["a", "a"]}}
    with pytest.raises(ConfigError, match="--train-data b names a twice, perhaps within a group"):
        parts(corpora(tmp_path, twice), train_data=("b",))
    (tmp_path / "corpora.json").write_text('{"a": {"files": "x"}, "a": {"files": "y"}}')
    with pytest.raises(ConfigError, match='the key "a" occurs twice'):
        read_corpora(str(tmp_path / "corpora.json"), ("indexed",))


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "../*", "/etc/pass*"])
def test_paths_of_a_corpora_file_stay_below_its_folder(tmp_path, path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "x").write_text("")
    file = tmp_path / "mine" / "corpora.json"
    contents = [{"files": path}]
    if "*" not in path:
        contents.append({"files": "a", "tokenizer": {"vocab_file": path}})
    for content in contents:
        file.write_text(json.dumps({"evil": content}))
        with pytest.raises(ConfigError, match=r"corpora.json: evil: .* is not below .*--corpora-o"):
            read_corpora(str(file), ("indexed",))
        read_corpora(str(file), ("indexed",), outside=True)


def test_a_corpora_file_may_name_its_own_folder_in_full(tmp_path) -> None:
    content = {"a": {"files": [str(tmp_path / "x"), "b/../y", "s3://bucket/z"]}}
    (tmp_path / "corpora.json").write_text(json.dumps(content))
    paths = read_corpora(str(tmp_path / "corpora.json"), ("indexed",)).sources["a"].paths
    assert paths[0] == str(tmp_path / "x") and paths[2] == "s3://bucket/z"


def test_a_corpora_file_that_is_nested_too_deep_is_refused(tmp_path) -> None:
    (tmp_path / "corpora.json").write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match="--corpora-file .*corpora.json is not valid JSON"):
        read_corpora(str(tmp_path / "corpora.json"), ("indexed",))
