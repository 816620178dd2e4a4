"""The commands of tools/README.md, run one after the other on a small planted sample."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zstandard

from megatron.data.indexed import IndexedDataset

ROOT = Path(__file__).parents[4]
README = ROOT / "tools" / "README.md"

QUESTION = (
    "Which of the two bridges over the great river was finished before the winter of that year?"
)


def prose(seed: int, count: int) -> str:
    rng = random.Random(seed)
    nouns = (
        "bridge river town house winter garden school market mountain forest letter road".split()
    )
    verbs = "crossed watched built painted remembered visited measured described".split()
    sentences = []
    for _ in range(count):
        a, b, c = rng.sample(nouns, 3)
        year = rng.randrange(1000, 10000)
        sentences.append(f"In {year} they {rng.choice(verbs)} the {a} near the {b}, by the {c}.")
    return " ".join(sentences)


def commands() -> list[str]:
    blocks = re.findall(r"^ *```bash\n(.*?)^ *```$", README.read_text(), re.DOTALL | re.MULTILINE)
    return [line.strip() for block in blocks for line in block.replace("\\\n", "").splitlines()]


def read(path: Path) -> list[dict]:
    with path.open("rb") as file:
        data = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    return [json.loads(line) for line in data.splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """A folder after all commands."""
    folder = tmp_path_factory.mktemp("collection")
    for name in ("AA", "AB"):
        (folder / "extracted" / name).mkdir(parents=True)
    articles = [
        {"id": str(i), "url": f"https://e/{i}", "title": f"T{i}", "text": prose(i, 30)}
        for i in range(60)
    ]
    articles[7]["text"] = "#REDIRECT [[T8]]"
    for name, part in (("AA", articles[:40]), ("AB", articles[40:])):
        lines = "".join(json.dumps(article) + "\n" for article in part)
        (folder / "extracted" / name / "wiki_00").write_text(lines)
    (folder / "urls").mkdir()
    (folder / "urls" / "a.txt").write_text(
        "http://example.com/a\nhttps://www.example.com/a\nhttps://youtube.com/b\n"
    )
    pages = [prose(100 + i, 30) for i in range(30)]
    pages += [
        pages[3].replace("In ", "In ", 1) + " Edited.",  # a near-duplicate
        "Too short.",
        "Das ist ein Text auf Deutsch, der nicht bleiben soll. " * 40,
        f"{prose(300, 12)} {QUESTION} {prose(301, 12)}",
    ]
    (folder / "pages").mkdir()
    for half in range(2):
        lines = (
            json.dumps({"url": f"http://e/{i}", "text": text}) + "\n"
            for i, text in enumerate(pages)
            if i % 2 == half
        )
        (folder / "pages" / f"{half}.json").write_text("".join(lines))
    (folder / "squad.jsonl").write_text(json.dumps({"question": QUESTION}) + "\n")
    environment = {
        **os.environ,
        "TOOLS": str(ROOT / "tools"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for command in commands():
        # The page's own blocks, which are written for a shell.
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    return folder


def test_every_collection_tool_is_in_it():
    text = "\n".join(commands())
    tools = [path.name for path in (ROOT / "tools" / "openwebtext").glob("*.py")]
    for name in (*tools, "wikiextractor_json.py", "split_json.py", "presplit_sentences_json.py"):
        assert f"/{name} " in text, name


def test_chances_of_near_duplicates():
    rows = re.findall(r"^\| (\d+), (\d+)[^|]*\|([ \d.|]+)\|$", README.read_text(), re.MULTILINE)
    assert len(rows) == 3
    for seeds, bands, chances in rows:
        width = int(seeds) // int(bands)
        for value, written in zip((0.3, 0.5, 0.6, 0.7, 0.8, 0.9), chances.split("|"), strict=True):
            assert float(written) == round(1 - (1 - value**width) ** int(bands), 3)


@pytest.mark.proof
def test_wikipedia(corpus):
    articles = read(corpus / "wikipedia.jsonl.zst")
    assert [a["id"] for a in articles] == [str(i) for i in range(60) if i != 7]
    parts = [read(corpus / "wiki" / f"{part}.jsonl.zst") for part in ("train", "valid", "test")]
    assert sum(map(len, parts)) == 59
    documents = IndexedDataset(str(corpus / "wiki" / "train_text_document"))
    assert len(documents) == len(parts[0])
    sentences = IndexedDataset(str(corpus / "wiki" / "bert_text_sentence"))
    presplit = read(corpus / "wiki" / "train_sentences.jsonl.zst")
    assert len(sentences) == sum(len(a["text"].split("\n")) for a in presplit) == 30 * len(parts[0])


@pytest.mark.proof
def test_web_pages(corpus):
    assert (corpus / "clean_urls.txt").read_text() == "http://example.com/a\n"
    assert (corpus / "rejected_urls.txt").read_text().split() == [
        *("duplicate", "https://www.example.com/a"),
        *("domain", "https://youtube.com/b"),
    ]
    dropped = {r["url"]: r["dropped"] for r in read(corpus / "dropped.jsonl.zst")}
    assert dropped["http://e/32"] == "language de" and len(dropped) == 2
    unique = {r["url"] for r in read(corpus / "unique.jsonl.zst")}
    assert {"http://e/3", "http://e/30"} & unique and not {"http://e/3", "http://e/30"} <= unique
    assert len(unique) == 31
    final = read(corpus / "decontaminated.jsonl.zst")
    assert len(final) == 32 and len([r for r in final if r["url"] == "http://e/33"]) == 2
    assert not any(QUESTION in r["text"] for r in final)
    train = (corpus / "owt" / "train.jsonl").read_text().splitlines()
    assert len(IndexedDataset(str(corpus / "owt" / "train_text_document"))) == len(train)
