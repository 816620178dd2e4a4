"""What the data flags name."""

import json

import pytest

from megatron.config import ConfigError, DataConfig
from megatron.data.sources import Blend, BlendReader, DataSource, Parts


def parts(reader: BlendReader | None = None, **fields: object) -> Parts:
    return (reader or BlendReader()).parts(DataConfig(**fields))


def plain(path: str, weight: float | None = None, share=(0.0, 1.0)) -> DataSource:
    return DataSource((path,), weight=weight, share=share)


def test_one_path_is_split() -> None:
    found = parts(data_path=("a",), split="9,1,0")
    assert found.train == Blend("--data-path", (plain("a"),), "9,1,0", 0)
    assert found.train.is_plain
    assert found.valid == {"valid": Blend("--data-path", (plain("a"),), "9,1,0", 1)}
    assert found.test == {}


def test_weights_and_ranges() -> None:
    found = parts(train_data_path=("2", "a@0:0.95", "6", "b@.5:", "1", "user@host:c"))
    assert found.train == Blend(
        "--train-data-path",
        (plain("a", 2.0, (0.0, 0.95)), plain("b", 6.0, (0.5, 1.0)), plain("user@host:c", 1.0)),
    )
    assert not found.train.is_plain and found.valid == found.test == {}


def test_paths_in_files(tmp_path) -> None:
    arguments, splits = tmp_path / "arguments.txt", tmp_path / "splits.json"
    arguments.write_text("0.5 a\n0.5 'b c'  # both\n")
    found = parts(data_args_path=str(arguments))
    assert found.train is not None
    assert found.train.sources == (plain("a", 0.5), plain("b c", 0.5))
    splits.write_text(json.dumps({"train": ["1", "a", "2", "b"], "valid": ["c"]}))
    found = parts(per_split_data_args_path=str(splits))
    assert found.train == Blend("--per-split-data-args-path", (plain("a", 1.0), plain("b", 2.0)))
    assert found.valid["valid"].sources == (plain("c"),) and found.test == {}


def test_bloom_groups(tmp_path) -> None:
    file = tmp_path / "groups.txt"
    file.write_text('"books: 1 0.9:0.95 a" "all: 0.4 0.9:0.95 a, 0.6 0.9:1 b"')
    found = parts(
        train_weighted_split_paths=("train: 0.4 0:0.9 a, 0.6 0:0.9 b",),
        valid_weighted_split_paths_path=str(file),
    )
    assert found.train is not None
    assert found.train.sources == (plain("a", 0.4, (0, 0.9)), plain("b", 0.6, (0, 0.9)))
    assert list(found.valid) == ["books", "all"]
    assert found.valid["books"].sources == (plain("a", 1.0, (0.9, 0.95)),)
    assert not found.valid["books"].is_plain


def test_several_validation_sets_by_path(tmp_path) -> None:
    """Megatron-LM's flags: each path is a set, as it is."""
    sets = {"valid_data_path": ("x/books", "y/code@0.9:1"), "multiple_validation_sets": True}
    found = parts(train_data_path=("t",), **sets)
    assert list(found.valid) == ["books", "code@0.9:1"] and list(found.test) == []
    assert found.valid["books"].sources == (plain("x/books"),) and found.valid["books"].is_plain
    named = parts(train_data_path=("t",), **sets, validation_set_names=("first", "second"))
    assert list(named.valid) == ["first", "second"]
    assert named.valid["second"].sources == (plain("y/code", None, (0.9, 1.0)),)
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": ["a"], "valid": ["b", "c"], "test": ["d"]}))
    found = parts(per_split_data_args_path=str(splits), multiple_validation_sets=True)
    assert list(found.valid) == ["b", "c"] and list(found.test) == ["test"]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"valid_data_path": ("1", "a", "2", "b")}, "no weights; leave out 1 2"),
        ({"valid_data_path": ("x/a", "y/a")}, "two validation sets have the name a; give --valid"),
        ({"valid_data_path": ("a", "b"), "validation_set_names": ("one",)}, "1 names for the 2"),
        ({"valid_weighted_split_paths": ("n: 1 0:1 a",)}, "are the paths of --valid-data-path"),
    ],
)
def test_what_is_wrong_with_several_validation_sets(flags, message) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(train_data_path=("t",), multiple_validation_sets=True, **flags)


def test_evaluation_has_its_own_text_key(tmp_path) -> None:
    reader = BlendReader(kind_of=lambda path: "text", eval_text_key="review")
    found = parts(reader, train_data_path=("a.jsonl",), valid_data_path=("b.jsonl",))
    assert found.train is not None and found.train.sources[0].text_key is None
    assert found.valid["valid"].sources[0].text_key == "review"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_path": ("x", "y")}, "--data-path x y: give one PREFIX, or WEIGHT PREFIX pairs"),
        ({"data_path": ("1", "x", "2")}, "--data-path 1 x 2"),
        ({"data_path": ("1", "x", "nan", "y")}, "the weight nan"),
        ({"train_data_path": ("0", "x", "1", "y")}, "--train-data-path: the weight 0 "),
        ({"data_path": ("x",), "valid_data_path": ("y",)}, "--data-path and --valid-data-path"),
        ({"data_path": ("x@0.5:0.5",)}, r"--data-path x@0.5:0.5: the range 0.5:0.5 must be"),
        ({"data_path": ("x",), "split": "0,1,0"}, "--split 0,1,0 leaves nothing for training"),
        ({"data_path": ("x",), "split": "a"}, "--split 'a'"),
        ({"data_args_path": "/nowhere"}, "--data-args-path /nowhere cannot be read"),
        ({"train_weighted_split_paths": ("a b",)}, "give 'NAME: WEIGHT FIRST:LAST PATH"),
        ({"train_weighted_split_paths": ("n: 1 0:2 a",)}, "the range 0:2 must be"),
        ({"train_weighted_split_paths": ("n: 1 0:1 a", "m: 1 0:1 b")}, "one group, not n, m"),
        ({"valid_weighted_split_paths": ("n: 1 0:1 a", "n: 1 0:1 b")}, "the group n twice"),
        (
            {"train_data_path": ("a",), "train_weighted_split_paths": ("n: 1 0:1 a",)},
            "--train-data-path and --train-weighted-split-paths name the same data",
        ),
        ({"train_data": ("nobody",)}, "--train-data nobody: no corpora have names"),
        ({"train_data_path": ("a",), "split": "1,1,1"}, "--split 1,1,1 would change nothing: --tr"),
    ],
)
def test_flags_that_cannot_be_used(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parts(**fields)
