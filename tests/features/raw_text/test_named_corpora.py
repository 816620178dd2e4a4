"""NAMED_CORPORA of data_utils/corpora.py: their texts, their errors, and what is next to them."""

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest

from megatron.config import ConfigError, DataConfig
from megatron.data.sources import BlendReader
from megatron.features.corpora.corpora import Corpora, NamedSources, corpora_of
from megatron.features.raw_text import named_corpora
from megatron.features.raw_text.flags import RawTextConfig
from megatron.features.raw_text.named_corpora import NamedCorpora

ROOT = Path(__file__).parents[3]
OURS = str(ROOT / "compat" / "data_utils" / "corpora.py")
USERS = """
import torch
from data_utils.datasets import csv_dataset, json_dataset

class Essays(torch.utils.data.Dataset):
    PATH = "essays"
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return ITEMS[index]

class Reviews(csv_dataset):
    PATH = "reviews.tsv"
    def __init__(self, **kwargs):
        super().__init__(Reviews.PATH, **kwargs)

class Lines(torch.utils.data.IterableDataset):
    PATH = "essays/a.txt"
    def __init__(self, text_key):
        self.key = text_key
    def __iter__(self):
        yield from (self.key, open(self.PATH).read())

class wikipedia(json_dataset):
    PATH = "wiki.json"
    def __init__(self, **kwargs):
        kwargs["text_key"] = "text"
        super(wikipedia, self).__init__(wikipedia.PATH, **kwargs)

class NoPath(torch.utils.data.Dataset):
    pass

class Moved(NoPath):
    PATH = "moved.json"

ITEMS = [{"text": "one\\ntwo", "length": 7}, "three \\u2028", {"text": ""}]
NAMED_CORPORA = {
    "essays": Essays, "reviews": Reviews, "lines": Lines, "wikipedia": wikipedia,
    "no path": NoPath, "moved": Moved, "a list": ["x"],
}
"""


@pytest.fixture
def forget(monkeypatch):
    """Reads data_utils/corpora.py again, in this test and after it."""

    def forget():
        named_corpora._module.cache_clear()
        for name in [n for n in sys.modules if n.split(".")[0] == "data_utils"]:
            del sys.modules[name]

    monkeypatch.syspath_prepend(str(ROOT / "compat"))
    forget()
    yield forget
    forget()


@pytest.fixture
def folder(tmp_path, monkeypatch, forget):
    """The working directory of a user with corpora."""
    for place in ("data_utils", "essays"):
        (tmp_path / place).mkdir()
    (tmp_path / "data_utils" / "corpora.py").write_text(USERS)
    (tmp_path / "essays" / "a.txt").write_text("a")
    (tmp_path / "reviews.tsv").write_text("stars\ttext\n5\tgood\n1\tso, bad\n")
    (tmp_path / "wiki.json").write_text('{"text": "w"}\n\n{"text": "x"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def find(name, **config):
    return NamedCorpora(RawTextConfig(**config))[name]


def texts(source) -> list[str]:
    source.make()
    lines = Path(source.paths[0]).read_text("utf-8").split("\n")
    assert lines.pop() == ""
    return [json.loads(line)["text"] for line in lines]


def test_texts_of_classes(folder):
    found = find("essays")
    assert (found.kind, found.text_key, found.weight) == ("text", "text", None)
    assert texts(found) == ["one\ntwo", "three \u2028", ""]
    assert Path(found.paths[0]).parent == folder / "index-cache"
    assert texts(find("reviews")) == ["good", "so, bad"]
    assert texts(find("reviews", text_key="stars")) == ["5", "1"]
    assert texts(find("lines", text_key="k")) == ["k", "a"]
    assert texts(find("wikipedia", text_key="k")) == ["w", "x"]
    assert "data_utils.corpora" in sys.modules and str(folder) not in sys.path


def test_texts_are_written_once_for_all_that_they_depend_on(folder, forget):
    found = find("essays")
    assert not Path(found.paths[0]).exists(), "naming a corpus reads nothing"
    texts(found)
    os.utime(found.paths[0], (1, 1))
    texts(find("essays"))
    assert Path(found.paths[0]).stat().st_mtime == 1
    names = {found.paths[0]}
    (folder / "essays" / "b.txt").write_text("b")
    names.add(find("essays").paths[0])
    names.add(find("essays", text_key="k").paths[0])  # its constructor has no such argument
    assert len(names) == 2
    corpora = folder / "data_utils" / "corpora.py"
    corpora.write_text(USERS.replace("three", "four"))
    forget()
    assert texts(find("essays"))[1] == "four \u2028"
    (folder / "cache").mkdir()
    cached = NamedCorpora(RawTextConfig(), str(folder / "cache"))["essays"]
    assert Path(cached.paths[0]).parent == folder / "cache"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no path", r"corpora.py, class NoPath \(corpus no path\): the class has no PATH; set it"),
        ("moved", r"corpora.py, class Moved .*: its PATH moved.json does not exist; set PATH in"),
        ("a list", r"corpora.py: NAMED_CORPORA\['a list'\] is \['x'\]; it must be a class derived"),
    ],
)
def test_classes_that_cannot_be_used(folder, name, message):
    with pytest.raises(ConfigError, match=message):
        find(name)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ('["a", {"body": "b"}, "c"]', r"essays\): item 1 is {'body': 'b'}; it must be a string"),
        ('["a", "b", b"c"]', "item 2 is b'c'"),
        ('["a", "\\ud800", "c"]', "item 1 is not valid text"),
        ('[open("nowhere")]', "class Essays .*No such file or directory: 'nowhere'"),
    ],
)
def test_items_that_are_not_texts(folder, forget, items, message):
    code = USERS.replace("ITEMS[index]", f"({items})[index]")
    (folder / "data_utils" / "corpora.py").write_text(code)
    forget()
    with pytest.raises(ValueError, match=message):
        find("essays").make()
    assert not list(folder.glob("index-cache/*.jsonl*partial*"))


def test_a_cache_that_cannot_be_written(folder):
    (folder / "index-cache").write_text("a file")
    with pytest.raises(OSError, match="the corpus essays cannot be written.*--data-cache-path"):
        find("essays").make()


def parts(folder, reader=None, **fields):
    named = NamedCorpora(RawTextConfig())
    kind_of = lambda path: "text" if path.endswith("json") else "indexed"  # noqa: E731
    corpora = corpora_of(fields.pop("corpora_file", DataConfig.corpora_file), named, kind_of)
    return BlendReader(kind_of, by_name=NamedSources(corpora, kind_of)).parts(DataConfig(**fields))


def names(blend):
    return [(Path(s.paths[0]).name.partition("-")[0], s.weight) for s in blend.sources]


def test_texts_that_changed_are_named(folder, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    texts(find("essays"))
    assert "the corpus essays changed" not in caplog.text
    (folder / "essays" / "b.txt").write_text("b")
    texts(find("essays"))
    assert "the corpus essays changed since its texts were last written" in caplog.text


@pytest.mark.parametrize(
    "code, message",
    [
        ("NAMED_CORPORA = ['essays']", "corpora.py: NAMED_CORPORA is a list; it must be a dict"),
        ("\nraise KeyError('x')", "corpora.py, line 2: KeyError: 'x'"),
        ("import no_such_package", "data_utils.corpora: No module named 'no_such_package'"),
    ],
)
def test_modules_that_cannot_be_used(folder, forget, code, message):
    (folder / "data_utils" / "corpora.py").write_text(code)
    forget()
    with pytest.raises(ConfigError, match=re.escape(message)):
        find("essays")


def test_the_corpora_file_comes_first(folder):
    content = {"reviews": {"files": "mine"}, "both": {"corpora": ["reviews", "essays"]}}
    (folder / "corpora.json").write_text(json.dumps(content))
    found = parts(folder, train_data=("both", "wikipedia", "wiki.json"))
    assert names(found.train) == [
        *[("mine", None), ("essays", None), ("wikipedia", None), ("wiki.json", None)]
    ]
    weighted = parts(folder, train_data=("2", "essays", "1", "wiki.json"))
    assert names(weighted.train) == [("essays", 2.0), ("wiki.json", 1.0)]


def test_an_unknown_name_lists_both_places(folder):
    where = f"NAMED_CORPORA of {folder}/data_utils/corpora.py has essays, reviews"
    with pytest.raises(ConfigError, match="corpora-file corpora.json does not exist") as error:
        parts(folder, train_data=("esays",))
    assert where in str(error.value) and str(error.value).endswith("Did you mean essays?")
    (folder / "corpora.json").write_text('{"books": {"files": "b"}}')
    with pytest.raises(ConfigError, match="--train-data: corpora.json has no corpus x, but books"):
        parts(folder, train_data=("x",))
    with pytest.raises(ConfigError, match="--corpora-file other.json does not exist"):
        parts(folder, train_data=("essays",), corpora_file="other.json")


def test_a_split_next_to_files_of_one_part(folder):
    """As in 2019, the parts without files of their own share the training data."""
    data = {"train_data": ("essays",), "valid_data": ("reviews",)}
    found = parts(folder, **data, split="80,10,20")
    assert (
        found.train.split
        == found.test["test"].split
        == "0.7272727272727273,0.0,0.18181818181818182"
    )
    assert names(found.valid["valid"]) == [("reviews", None)]
    assert found.valid["valid"].split is None
    whole = parts(folder, **data)
    assert whole.train.split is None and whole.test == {}
    with pytest.raises(ConfigError, match="--split 1,1,1 would change nothing"):
        parts(folder, **data, test_data=("lines",), split="1,1,1")


def test_the_names_that_came_with_2019(tmp_path, monkeypatch, forget):
    monkeypatch.chdir(tmp_path)
    assert list(NamedCorpora(RawTextConfig())) == ["wikipedia", "webtext"]
    with pytest.raises(ConfigError, match=f"{OURS}, .* data/wikipedia/wikidump_lines.json does no"):
        find("wikipedia")
    (tmp_path / "data" / "webtext").mkdir(parents=True)
    (tmp_path / "data" / "webtext" / "data.json").write_text('{"text": "a"}\n{"text": "b"}\n')
    assert texts(find("webtext")) == ["a", "b"]


def test_without_such_a_module(tmp_path, monkeypatch, forget):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(named_corpora, "MODULE", "data_utils.nowhere")
    assert not list(NamedCorpora(RawTextConfig())) and "x" not in Corpora()
