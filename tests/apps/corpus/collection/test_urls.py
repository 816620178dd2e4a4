"""Choice of addresses: planted ones, with the reason of each."""

import pytest
import requests

from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.apps.corpus.collection.urls import UrlConfig, choose_urls, host_of, same_page

KEPT = [
    "http://example.com/news/a.html",
    "https://www.bbc.co.uk/story?id=5&page=2",
    "http://192.168.10.2/page",
    "https://sub.example.org:8443/x",
    "https://münchen.de/artikel",
    "https://example.com/archive.tar/page",
    "https://notyoutube.com/watch",
    "https://example.com/News/A.html",
]
REJECTED = [
    ("too short", "http://a"),
    ("malformed", "ftp://example.com/file"),
    ("malformed", "http://no_such_host/page"),
    ("malformed", "http://example.com:99999/"),
    ("malformed", "http://-bad.example.com/"),
    ("malformed", "http://exa mple.com/page"),
    ("malformed", "http://host.notatld/page"),
    ("malformed", "example.com/without/scheme"),
    ("malformed", "http://[::1/page"),
    ("malformed", "http://u[::1]@example.com/page"),
    ("domain", "https://www.youtube.com/watch?v=1"),
    ("domain", "http://m.youtube.co.uk/x"),
    ("domain", "https://i.imgur.com/abc"),
    ("domain", "https://en.wikipedia.org/wiki/A"),
    ("extension", "http://example.com/picture.JPG"),
    ("extension", "http://example.com/paper.pdf?download=1"),
    ("extension", "http://example.com/x.7z"),
    ("duplicate", "https://example.com/news/a.html#top"),
    ("duplicate", "http://www.example.com/news/a.html"),
    ("duplicate", "HTTPS://Example.COM:443/news/a.html?utm_source=feed"),
    ("duplicate", "https://bbc.co.uk/story?page=2&id=5"),
]


def choose(files, lines, **flags):
    files.lines("urls/a.txt", [("\n".join(lines) + "\n").encode()])
    config = UrlConfig(
        input=(files / "urls",), output=files / "clean.txt", rejected=files / "no.txt", **flags
    )
    report = choose_urls(config, LineJobConfig())
    return files.read("clean.txt").decode().split("\n")[:-1], report


def test_every_reason(files):
    kept, report = choose(files, [*KEPT, "", *(url for _, url in REJECTED)])
    assert kept == KEPT
    rejected = [tuple(line.split("\t")) for line in files.read("no.txt").decode().splitlines()]
    assert rejected == REJECTED
    assert report.documents == len(KEPT) + len(REJECTED)
    assert report.counts["left out: domain"] == 4 and report.counts["addresses kept"] == len(KEPT)


def test_several_files_and_packing(files):
    files.lines("urls/b.txt.gz", [b"http://example.com/b\nhttp://example.com/c\n"])
    kept, _ = choose(files, ["http://example.com/a", "http://example.com/b/"])
    assert kept == ["http://example.com/a", "http://example.com/b/", "http://example.com/c"]


def test_own_lists(files):
    (files.folder / "domains.txt").write_text("example.net\nfoo\nbad.example.org\n")
    lines = [
        "http://example.net/a",
        "http://www.foo.com/a",
        "http://bad.example.org/a",
        "http://example.org/a",
        "http://example.org/a.php",
        "http://youtube.com/a",
    ]
    flags = {"domains": files / "domains.txt", "extensions": (".PHP",)}
    assert choose(files, lines, **flags)[0] == ["http://example.org/a"]
    kept, _ = choose(files, lines, only_listed=True, **flags)
    assert kept == ["http://example.org/a", "http://youtube.com/a"]


def test_only_the_kept_ones_are_written(files):
    files.lines("urls/a.txt", [b"http://example.com/a\nhttp://x\n"])
    choose_urls(UrlConfig((files / "urls",), files / "clean.txt"), LineJobConfig())
    assert files.names() == {"urls/a.txt", "clean.txt"}


@pytest.mark.parametrize(
    "one, other",
    [
        ("http://a.com", "https://a.com/"),
        ("http://a.com/%7Eb", "http://a.com/~b"),
        ("http://a.com/é", "http://a.com/%C3%A9"),
        ("http://a.com/?b=1&a=2", "http://a.com/?a=2&b=1&fbclid=x"),
    ],
)
def test_same_page(one, other):
    assert same_page(one) == same_page(other)


@pytest.mark.parametrize(
    "one, other",
    [
        ("http://a.com/x", "http://a.com/X"),
        ("http://a.com/x", "http://b.a.com/x"),
        ("http://a.com/x?a=1", "http://a.com/x?a=2"),
        ("http://a.com:8080/x", "http://a.com/x"),
    ],
)
def test_other_page(one, other):
    assert same_page(one) != same_page(other)


def test_host_of():
    assert host_of("https://Bücher.example.COM./x") == "xn--bcher-kva.example.com"
    assert host_of("http://" + "a" * 64 + ".com/") is None


def test_nothing_is_fetched(files, monkeypatch):
    fetched = []

    def refuse(_self, request, **_kwargs):
        fetched.append(request.url)
        raise requests.ConnectionError

    monkeypatch.setattr(requests.Session, "send", refuse)
    kept, _ = choose(files, ["http://example.co.uk/a"])
    assert kept == ["http://example.co.uk/a"] and not fetched
