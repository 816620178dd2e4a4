"""What a path stands for."""

from pathlib import Path

import pytest

from megatron.data.corpora import expand

ENDINGS = (".json", ".jsonl")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        *("b.jsonl", "a/c.json", "a/readme.txt", "index-cache/gpt-train-1/description.json"),
        *("out.preprocessing/part-0-of-2/journal.json", "d.json.partial-77", ".e.partial-1.jsonl"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_a_folder_without_what_this_project_keeps_there(folder: Path) -> None:
    assert expand(str(folder), ENDINGS) == [folder / "a/c.json", folder / "b.jsonl"]


def test_a_file_and_a_glob(folder: Path) -> None:
    assert expand(str(folder / "a/readme.txt"), ENDINGS) == [folder / "a/readme.txt"]
    assert expand(f"{folder}/*/*.json", ENDINGS) == [folder / "a/c.json"]


@pytest.mark.parametrize(
    ("pattern", "error", "message"),
    [
        ("nothing", FileNotFoundError, "nothing does not exist"),
        ("*.csv", FileNotFoundError, r"\*\.csv matches no file"),
        ("a/../out.preprocessing", FileNotFoundError, "is a folder without files"),
        (
            "s3://b/x.jsonl",
            ValueError,
            r"s3://b/x.jsonl is a URL; only .bin/.idx files",
        ),
    ],
)
def test_paths_without_files(
    folder: Path, pattern: str, error: type[Exception], message: str, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "out.preprocessing/part-0-of-2/journal.json").unlink()
    with pytest.raises(error, match=message):
        expand(pattern, ENDINGS)
