"""Both formats of WikiExtractor, planted articles, exact outcomes."""

import json

import pytest

from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.apps.corpus.collection.wikipedia import (
    WikipediaConfig,
    article_batches,
    extracted_files,
    read_wikipedia,
)

MARKUP = """<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="Anarchism &amp; Co">
Anarchism &amp; Co

A &lt;b&gt; is here.

Second paragraph.
</doc>

<doc id="13" url="https://en.wikipedia.org/wiki?curid=13" title="Empty">
Empty


</doc>
<doc id="14" url="https://en.wikipedia.org/wiki?curid=14" title="Old">
Old

#REDIRECT New name
</doc>
<doc id="15" url="u" title="No title line">
Text at once.
</doc>
"""
EXPECTED = [
    {
        "id": "12",
        "url": "https://en.wikipedia.org/wiki?curid=12",
        "title": "Anarchism & Co",
        "text": "A <b> is here.\n\nSecond paragraph.",
    },
    {"id": "15", "url": "u", "title": "No title line", "text": "Text at once."},
]


def read(files, *inputs, on_bad_line="error", **flags):
    config = WikipediaConfig(tuple(inputs), files / "wiki.jsonl", **flags)
    return read_wikipedia(config, LineJobConfig(on_bad_line=on_bad_line))


def test_markup(files):
    folder = files.folder / "extracted"
    files.lines("extracted/AA/wiki_00", [MARKUP.encode()])
    files.lines(
        "extracted/AB/wiki_00.gz",
        [b'<doc id="1" url="" title="B">\r\nB\r\n\r\nText.\r\n</doc>\r\n'],
    )
    files.lines("extracted/notes.txt", [b"not an article"])
    report = read(files, str(folder))
    last = {"id": "1", "url": "", "title": "B", "text": "Text."}
    assert files.records("wiki.jsonl") == [*EXPECTED, last]
    assert report.documents == 5
    assert report.counts == {
        "articles written": 3,
        "empty articles left out": 1,
        "redirects left out": 1,
    }


def test_json(files):
    articles = [
        {"id": "12", "revid": "9", "url": "u", "title": "T", "text": "T\n\nBody & <b>.\n"},
        {"id": "13", "url": "u", "title": "Empty", "text": ""},
        {"id": "14", "url": "u", "title": "Old", "text": "#redirect [[New]]"},
        {"id": "15", "url": "v", "title": "T2", "text": "Body of T2."},
    ]
    path = files.lines("wiki_00", articles)
    report = read(files, path)
    assert files.records("wiki.jsonl") == [
        {"id": "12", "url": "u", "title": "T", "text": "Body & <b>."},
        {"id": "15", "url": "v", "title": "T2", "text": "Body of T2."},
    ]
    assert (report.documents, report.counts["articles written"]) == (4, 2)


def test_title_in_text_and_min_length(files):
    path = files.lines("wiki_00", [MARKUP.encode()])
    read(files, path, title_in_text=True, min_length=20)
    (article,) = files.records("wiki.jsonl")
    assert article["text"] == "Anarchism & Co\n\nA <b> is here.\n\nSecond paragraph."


def test_articles_are_not_cut_by_batches(files):
    body = "".join(f"Line {i} of the text.\n" for i in range(700))
    markup = "".join(
        f'<doc id="{i}" url="u" title="T{i}">\nT{i}\n\n{body}</doc>\n' for i in range(9)
    )
    path = files.lines("wiki_00", [markup.encode()])
    lines = [line for batch in article_batches(extracted_files([path])) for line in batch.lines]
    assert b"".join(lines) == markup.encode()
    assert len(list(article_batches(extracted_files([path])))) > 2
    read(files, path)
    found = files.records("wiki.jsonl")
    assert [(a["id"], a["text"]) for a in found] == [(str(i), body.strip()) for i in range(9)]


@pytest.mark.parametrize(
    "markup, line, reason",
    [
        ('<doc id="1" title="A">\nx\n<doc id="2" title="B">\nB\ny\n</doc>\n', 1, "without </doc>"),
        ('<doc id="2" title="B">\ny\n</doc>\n<doc id="1" title="A">\nx\n', 4, "without </doc>"),
        ('</doc>\n<doc id="2" title="B">\ny\n</doc>\n', 1, "</doc> without"),
        ('<doc id="2" title="B">\ny\n</doc>\nlost text\n', 4, "outside of"),
        (b'<doc id="2" title="B">\ny\n\xff\n</doc>\n', 3, "not UTF-8"),
    ],
)
def test_damaged_markup(files, markup, line, reason):
    path = files.lines("wiki_00", [markup if isinstance(markup, bytes) else markup.encode()])
    with pytest.raises(ValueError, match=f"{path}, line {line}: .*{reason}"):
        read(files, path)
    report = read(files, path, on_bad_line="skip")
    assert report.bad.total() == 1
    assert [a["text"] for a in files.records("wiki.jsonl")] == ["y"]


def test_what_is_no_input(files):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read(files, files / "nothing")
    with pytest.raises(FileNotFoundError, match="has no files wiki_"):
        read(files, str(files.folder))
    files.lines("AA/wiki_00.bz2", [b""])
    with pytest.raises(ValueError, match="bunzip2"):
        read(files, str(files.folder))


def test_json_title_of_another_type(files):
    path = files.lines("wiki_00", [{"id": 1, "title": 5, "text": "x"}])
    with pytest.raises(ValueError, match='line 1: "title" is not a string'):
        read(files, path)
    assert json.loads(json.dumps(read(files, path, on_bad_line="skip").bad))
