"""Records in Parquet, CSV, TSV and JSON, and folders of data sets as the Hub has them."""

import csv
import gzip
import json
import sys
from pathlib import Path

import pytest

from megatron.features.instruction.conversations import read_examples
from megatron.features.instruction.record_files import (
    HELD_OUT,
    TRAIN,
    example_files,
    records_of,
    split_of,
)

RECORDS = [
    {"instruction": 'Say "a",\nthen b.', "input": "", "output": "a, b"},
    {"instruction": "Größe?", "input": "x\ty", "output": "7"},
]
CHAT = {
    "messages": [
        {"role": "user", "content": "Hot?", "tool_calls": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}],
        },
    ],
    "tools": [{"name": "f", "strict": None}],
    "id": 3,
}


def write(path: Path, records: list[dict]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(records).encode()))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        with path.open("w", newline="") as file:
            rows = csv.DictWriter(file, list(records[0]))
            rows.writeheader()
            rows.writerows(records)
    return str(path)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.parquet", "x.csv"])
def test_formats_have_the_same_records(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, RECORDS)
    assert [record for _, record in records_of(path)] == RECORDS
    examples = [example for _, example in read_examples(path)]
    assert [example.turns[0].context for example in examples] == ["", "x\ty"]


def test_places_of_records(tmp_path: Path) -> None:
    places = {".jsonl": "line 2", ".json": "record 2", ".parquet": "row 2", ".csv": "line 4"}
    for ending, place in places.items():
        path = write(tmp_path / f"x{ending}", RECORDS)
        assert [where for where, _ in records_of(path)][1] == f"{path}, {place}"


def test_tabs(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text('\ufeffquestion\tanswer\tid\nSay "a\t"a\t1\n\n')
    expected = [{"question": 'Say "a', "answer": '"a', "id": "1"}]
    assert [record for _, record in records_of(str(path))] == expected


@pytest.mark.parametrize(
    "rows, compression", [(32, "none"), pytest.param(4, "zstd", marks=pytest.mark.proof)]
)
def test_parquet_whose_rows_share_a_long_text(rows: int, compression: str, tmp_path: Path) -> None:
    """A small file must not stand for more than the memory has."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = "hello " * (600_000 if compression == "none" else 12_000_000)
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), [text])
    path = str(tmp_path / "x.parquet")
    parquet.write_table(
        pyarrow.table({"prompt": column}), path, compression=compression, store_schema=False
    )
    with pytest.raises(ValueError, match=r"x\.parquet, row group 1 has [\d,]+ bytes that are"):
        list(records_of(path))


def test_parquet_adds_no_keys(tmp_path: Path) -> None:
    """A column of objects gives each of them the keys of all."""
    ((_, chat),) = read_examples(write(tmp_path / "x.parquet", [CHAT]))
    assert chat.turns[0].fields == ()
    calls = dict(chat.turns[1].fields)["tool_calls"]
    assert calls == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert chat.turns[1].content == ""
    assert chat.variables == (("tools", [{"name": "f"}]),)


BAD = [
    ("x.csv", b"instruction,output\na\n", r"x\.csv, line 2: 1 values for 2 columns"),
    ("x.csv", b"output,output\na,b\n", r"x\.csv, line 1: two columns have the same name"),
    ("x.csv", b"instruction,output\n\xff,b\n", r"x\.csv, line .: not a row of a table"),
    ("x.csv", b'instruction,output\na,"b\nc,d\n', r"x\.csv, line 3: not a row of a table"),
    ("x.csv", b"frage,antwort\na,b\n",
     r'x\.csv, line 2: unknown layout \(its keys: "frage", "antwort"\).*--prompt-column'),
    ("x.csv", b"instruction,output,passage\na,b,c\n", r'x\.csv, line 2: the key "passage"'),
    ("x.parquet", b"PAR1", r"x\.parquet is damaged or not a Parquet file"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), BAD)
def test_malformed_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_examples(str(tmp_path / name)))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", RECORDS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"x\.parquet is a Parquet file: .*pip install pyarrow"):
        list(records_of(path))


def hub(folder: Path, *names: str) -> str:
    for name in names:
        write(folder / name, RECORDS[:1])
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "README.md").write_text("# A data set")
    (folder / ".cache").mkdir(exist_ok=True)
    write(folder / ".cache" / "train.json", RECORDS)
    return str(folder)


def files(path: str) -> list[str]:
    return [Path(file.path).name for file in example_files(path)]


def test_folder_of_the_hub(tmp_path: Path) -> None:
    shards = [f"train-0000{n}-of-00002.parquet" for n in range(2)]
    test = "test-00000-of-00001.parquet"
    path = hub(tmp_path / "two", *(f"data/{name}" for name in (*shards, test)))
    assert files(split_of(path, TRAIN)) == shards
    assert files(split_of(path, HELD_OUT)) == [test]
    with pytest.raises(ValueError, match=r"two has several splits: name .*/train-\*\.parquet"):
        example_files(path)
    one = hub(tmp_path / "one", "data/train-00000-of-00001.parquet")
    assert files(one) == files(split_of(one, TRAIN)) == ["train-00000-of-00001.parquet"]
    with pytest.raises(ValueError, match="one has no split validation or"):
        split_of(one, HELD_OUT)


def test_splits_by_the_name_of_a_file(tmp_path: Path) -> None:
    path = hub(tmp_path / "a", "train.jsonl", "test.jsonl", "validation.jsonl")
    assert files(split_of(path, TRAIN)) == ["train.jsonl"]
    assert files(split_of(path, HELD_OUT)) == ["validation.jsonl"]
    names = ("train_sft", "train_prefs", "test_sft")
    several = hub(tmp_path / "b", *(f"data/{name}-00000-of-00001.parquet" for name in names))
    with pytest.raises(ValueError, match="several splits of the kind train: .*train_prefs-"):
        split_of(several, TRAIN)
    folders = hub(tmp_path / "d", *(f"default/{name}/0000.parquet" for name in ("train", "test")))
    for kinds, name in ((TRAIN, "train"), (HELD_OUT, "test")):
        (file,) = example_files(split_of(folders, kinds))
        assert Path(file.path).parent.name == name
    configs = [f"{name}/train-00000-of-00001.parquet" for name in ("main", "other")]
    with pytest.raises(ValueError, match="several splits: .*main/train-.*other/train-"):
        example_files(hub(tmp_path / "c", *configs))


def test_ordinary_folders_are_read_whole(tmp_path: Path) -> None:
    for name in ("train_a.jsonl", "train_b.jsonl", "more.jsonl"):
        write(tmp_path / name, RECORDS)
    assert files(str(tmp_path)) == ["more.jsonl", "train_a.jsonl", "train_b.jsonl"]
    assert split_of(str(tmp_path), TRAIN) == str(tmp_path)
    assert split_of("0.7", TRAIN) == "0.7"


def test_messages_in_a_table(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = '[{"role": "king", "age": 1}]'
    records = [{"prompt": json.dumps(messages[:1]), "completion": json.dumps(messages[1:])},
               {"prompt": "a", "completion": answer}]  # fmt: skip
    (_, chat), (_, pair) = read_examples(write(tmp_path / "x.csv", records))
    assert [(turn.role, turn.content) for turn in chat.turns] == [("user", "a"), ("assistant", "b")]
    assert [turn.content for turn in pair.turns] == ["a", answer]


@pytest.mark.parametrize("name", ["x.json", "x.jsonl", "x.csv"])
def test_compressed_files(name: str, tmp_path: Path) -> None:
    content = Path(write(tmp_path / name, RECORDS)).read_bytes()
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(content))
    assert [record for _, record in records_of(str(path))] == RECORDS
    for damaged in (gzip.compress(content)[:-9], content, b"\x1f\x8b\x08" + b"\xff" * 30):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}\.gz is damaged or not a gzip file"):
            list(records_of(str(path)))


def test_files_about_a_data_set_are_not_read(tmp_path: Path) -> None:
    path = hub(tmp_path / "a", "databricks-dolly-15k.jsonl", "more.jsonl.gz")
    assert files(path) == ["databricks-dolly-15k.jsonl", "more.jsonl.gz"]
    saved = hub(tmp_path / "b", "train/state.json", "test/dataset_info.json")
    with pytest.raises(ValueError, match="b has no file of records.*save_to_disk.*to_parquet"):
        example_files(split_of(saved, TRAIN))


def test_splits_of_several_formats(tmp_path: Path) -> None:
    path = hub(tmp_path / "a", "train.jsonl.gz", "test.jsonl.gz")
    assert files(split_of(path, TRAIN)) == ["train.jsonl.gz"]
    path = hub(tmp_path / "a", "train.csv")
    with pytest.raises(ValueError, match=r"several splits of the kind train: .*train\.csv, .*\.gz"):
        split_of(path, TRAIN)
    path = hub(tmp_path / "b", "data/train.parquet", "data/train-00000-of-00001.parquet")
    with pytest.raises(ValueError, match=r"has several splits.*train-\*.parquet, .*train\.parquet"):
        example_files(path)
