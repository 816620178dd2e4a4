"""Every collection tool, killed by SIGKILL while it writes and started again: the files that it
leaves are those of a run that was not killed, byte for byte, and nothing else."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from samples import sampled

ROOT = Path(__file__).parents[4]

KILLING = """
import os, runpy, signal, sys
from megatron.apps.corpus.collection.json_files import OutputFile
at, tool, *words = sys.argv[1:]
write, calls = OutputFile.write, 0
def dying(self, data):
    global calls
    calls += 1
    write(self, data[: len(data) // 2])
    if calls == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, data[len(data) // 2 :])
OutputFile.write = dying
sys.argv = [tool, *words]
runpy.run_path(tool, run_name="__main__")
"""

EVERY = "--checkpoint-interval 0.1"
OWT = "openwebtext/"
TOOLS = {
    "presplit": f"presplit_sentences_json.py a.jsonl OUT/sentences.jsonl --workers 2 {EVERY}",
    "split": f"split_json.py --input a.jsonl b.jsonl.gz --output-dir OUT --pack gz {EVERY}",
    "split-exact": f"split_json.py --input a.jsonl --output-dir OUT --method exact {EVERY}",
    "wikipedia": f"wikiextractor_json.py extracted OUT/wiki.jsonl {EVERY}",
    "urls": f"{OWT}blacklist_urls.py urls OUT/urls.txt --rejected OUT/no.txt",
    "cleanup": f"{OWT}cleanup_dataset.py b.jsonl.gz OUT/clean.jsonl.zst --dropped OUT/no.jsonl "
    f"--min-tokens 30 --workers 2 {EVERY}",
    "fix": f"{OWT}cleanup_fix_dataset.py --input-files a.jsonl b.jsonl.gz --output-path OUT "
    f"--tasks remove_512 general_cleaning {EVERY}",
    "find": f"{OWT}find_duplicates.py --inputs a.jsonl url b.jsonl.gz url --output OUT/d.json "
    f"{EVERY}",
    "group": f"{OWT}group_duplicate_url.py pairs.json OUT/groups.json",
    "remove": f"{OWT}remove_group_duplicates.py groups.json a.jsonl OUT/unique.jsonl {EVERY}",
    "ngrams": f"{OWT}filter_ngrams.py --task-file task.txt --dedup-dataset a.jsonl text "
    f"--output OUT/clean.jsonl --save-dictionary OUT/dictionary.json --key-threshold 0 {EVERY}",
    "ids": f"{OWT}add_id.py --input-file a.jsonl b.jsonl.gz --output-file OUT/i.jsonl.gz "
    "--id-prefix x",
    "merge": f"{OWT}merge_jsons.py --json-path . --output-file OUT/merged.jsonl {EVERY}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two files of 1,300 documents with duplicates, and what else the tools read."""
    import gzip

    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = "the of and to in is was for on that with as it by at from his an were are".split()
    nouns = [f"{a}{b}" for a in ("riv", "bridg", "tow", "hous") for b in ("er", "es", "n", "ing")]
    documents = []
    for number in range(2600):
        sentence = (f"The {' '.join(rng.choices(words + nouns, k=9))}." for _ in range(6))
        text = (
            " ".join(sentence) if number % 50 else documents[number // 2]["text"] if number else ""
        )
        documents.append({"url": f"http://example.com/{number}", "text": text})
    lines = [json.dumps(d).encode() + b"\n" for d in documents]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:1300]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1300:])))
    (folder / "extracted" / "AA").mkdir(parents=True)
    for file in range(2):
        articles = [
            f'<doc id="{i}" url="u" title="T{i}">\nT{i}\n\n{documents[i]["text"]}\n</doc>\n'
            for i in range(file * 1200, file * 1200 + 1200)
        ]
        (folder / "extracted" / "AA" / f"wiki_{file:02d}").write_text("".join(articles))
    (folder / "urls").mkdir()
    (folder / "urls" / "a.txt").write_text("".join(d["url"] + "\n" for d in documents) * 2)
    (folder / "pairs.json").write_text('{"a": [{"b": 0.9}]}\n')
    (folder / "groups.json").write_text(
        json.dumps({"0": [d["url"] for d in documents[::7]]}) + "\n"
    )
    (folder / "task.txt").write_text("".join(d["text"] + "\n" for d in documents[3:1300:200]))
    return folder


def run(folder: Path, output: Path, command: str, killed_at: int = 0) -> int:
    tool, *words = command.replace("OUT", str(output)).split()
    start = [sys.executable, "-c", KILLING, str(killed_at)] if killed_at else [sys.executable]
    done = subprocess.run(
        [*start, str(ROOT / "tools" / tool), *words], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((2,), id="once"),
        pytest.param((1, 3, 2), id="three-times", marks=pytest.mark.proof),
        pytest.param((4, 5), id="later", marks=pytest.mark.proof),
        pytest.param((7, 9, 11), id="late", marks=pytest.mark.proof),
    ],
)
@pytest.mark.parametrize("name", sampled(TOOLS, lambda name: list(TOOLS).index(name) % 6 == 1))
def test_killed_and_started_again(name, kills, folder, tmp_path):
    assert run(folder, tmp_path / "whole", TOOLS[name]) == 0
    expected = contents(tmp_path / "whole")
    assert any(expected.values())
    output = tmp_path / "killed"
    for killed_at in kills:
        code = run(folder, output, TOOLS[name], killed_at)
        if name != "group" and killed_at <= 2:
            assert code == -signal.SIGKILL
        if code == 0:  # it was through before
            break
        assert not expected.keys() & contents(output).keys() - {"dictionary.json"}
    assert run(folder, output, TOOLS[name]) == 0
    assert contents(output) == expected
