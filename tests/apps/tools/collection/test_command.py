"""The command lines: Megatron's habits, errors in one line, and help."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.apps.corpus.collection.line_job import with_flags
from megatron.config import ConfigError

ROOT = Path(__file__).parents[4]
TOOLS = sorted(
    [
        *(ROOT / "tools" / "openwebtext").glob("*.py"),
        *(ROOT / "tools" / f"{n}.py" for n in ("presplit_sentences_json", "split_json")),
        ROOT / "tools" / "wikiextractor_json.py",
    ]
)


def main(path: Path, *words: str) -> None:
    runpy.run_path(str(path))["main"](list(words))


def test_the_names_of_megatrons_scripts_are_there():
    names = {path.stem for path in (ROOT / "tools" / "openwebtext").glob("*.py")}
    assert names == set(
        "add_id blacklist_urls cleanup_dataset cleanup_fix_dataset filter_ngrams find_duplicates "
        "group_duplicate_url merge_jsons remove_group_duplicates".split()
    )


@pytest.mark.parametrize("path", TOOLS, ids=lambda path: path.stem)
def test_help_and_missing_flags(path, capsys):
    with pytest.raises(SystemExit) as found:
        main(path, "--help")
    assert found.value.code == 0 and "--on-bad-line" in capsys.readouterr().out
    if path.stem != "merge_jsons":  # which has a default for all
        with pytest.raises(SystemExit, match=rf"{path.name}: error: .*--\S+ is missing"):
            main(path)
    with pytest.raises(SystemExit) as found:
        main(path, "--no-such-flag")
    assert found.value.code == 2
    assert f"{path.name}: error: unknown flag --no-such-flag" in capsys.readouterr().err


def test_words_without_flags():
    assert with_flags(["a", "b", "--x"], ["--in", "--out"]) == ["--in", "a", "--out", "b", "--x"]
    assert with_flags(["a"], ["--in", "--out"]) == ["--in", "a"]
    assert with_flags(["--in", "a"], ["--in"]) == ["--in", "a"]
    with pytest.raises(ConfigError, match="'c' is one word too many"):
        with_flags(["a", "b", "c"], ["--in", "--out"])


def test_errors_are_one_line(tmp_path):
    tool = ROOT / "tools" / "openwebtext" / "cleanup_dataset.py"
    done = subprocess.run(
        [sys.executable, str(tool), "nothing.jsonl", "out.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "cleanup_dataset.py: error: --input nothing.jsonl does not exist\n"


def test_groups_by_position(tmp_path):
    (tmp_path / "d.json").write_text('{"a": [{"b": 0.75}, {"c": 0.95}]}\n')
    tool = ROOT / "tools" / "openwebtext" / "group_duplicate_url.py"
    main(tool, str(tmp_path / "d.json"), str(tmp_path / "g.json"), "0.9")
    assert (tmp_path / "g.json").read_text() == '{"0": ["a", "c"]}\n'
    main(tool, str(tmp_path / "d.json"), str(tmp_path / "g.json"))
    assert (tmp_path / "g.json").read_text() == '{"0": ["a", "b", "c"]}\n'


def test_duplicates_as_in_2019(tmp_path, capsys):
    """Files without flags, in the folder's name of then; ids are under the key url."""
    folder = ROOT / "openwebtext"
    text = "the same words in the same order, more than enough of them to make shingles of " * 3
    pages = [{"url": name, "text": text} for name in "ab"] + [{"url": "c", "text": "other " * 50}]
    names = ("pages", "pairs", "groups", "kept")
    pages_file, pairs, groups, kept = (str(tmp_path / f"{name}.json") for name in names)
    Path(pages_file).write_text("".join(json.dumps(page) + "\n" for page in pages))
    main(folder / "find_duplicates.py", pages_file, pairs)
    main(folder / "group_duplicate_url.py", pairs, groups)
    main(folder / "remove_group_duplicates.py", groups, pages_file, kept)
    lines = Path(kept).read_text().splitlines()
    assert [json.loads(line)["url"] for line in lines] in (["a", "c"], ["b", "c"])
