"""Text of any origin: the inputs of preprocessing and of collection."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import zstandard
from fuzz.fuzzer import Fuzzer

from megatron.apps.corpus.collection.cleaning import CleanupConfig, FixConfig, cleanup, fix
from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.apps.corpus.collection.urls import UrlConfig, choose_urls
from megatron.apps.corpus.collection.wikipedia import WikipediaConfig, read_wikipedia
from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import TokenizerConfig

BYTES = TokenizerConfig(tokenizer_type="ByteLevelTokenizer")
TEXTS = ("One text.", "Two\nlines, é\u2028漢字 e\u0301", '"quoted\\"', "Words and  words. " * 20)
SKIPPING = LineJobConfig(on_bad_line="skip")


def lines() -> bytes:
    return b"".join(json.dumps({"n": n, "text": t}).encode() + b"\n" for n, t in enumerate(TEXTS))


def write_lines(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines())
    (folder / "b.json").write_bytes(json.dumps([{"text": text} for text in TEXTS]).encode())
    (folder / "c.txt").write_text("\n\n".join(TEXTS))


def write_packed(folder: Path) -> None:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines()))


def write_parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": list(TEXTS)}), folder / "a.parquet")


def preprocessed(folder: Path) -> None:
    """Each file alone, with and without bad lines left out."""
    for path in sorted(folder.glob("*.*")):
        for number, mode in enumerate(("skip", "error")):
            prefix = folder / f"out-{path.name}-{number}"
            config = PreprocessConfig(
                input=(str(path),), output_prefix=str(prefix), workers=1, on_bad_line=mode,
                max_line_bytes=1 << 20,
            )  # fmt: skip
            preprocess(config, BYTES)


def collected(folder: Path) -> None:
    """Cleaned, repaired and filtered."""
    given, out = (str(folder / "a.jsonl"),), folder / "out"
    out.mkdir()
    config = CleanupConfig(given, str(out / "clean.jsonl"), min_tokens=2, lang=("any",))
    cleanup(config, TokenizerConfig(), SKIPPING)
    fix(FixConfig(given, ("ftfy_fix_text", "general_cleaning"), str(out)), SKIPPING)


def write_wikipedia(folder: Path) -> None:
    article = (
        '<doc id="{0}" url="http://x/?curid={0}" title="T &amp; {0}">\nT\n\nText {0}.\n</doc>\n'
    )
    (folder / "wiki_00").write_text("".join(article.format(n) for n in range(3)))
    rows = ({"id": n, "url": "u", "title": "T", "text": "T\n\nText."} for n in range(3))
    (folder / "wiki_01").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_articles(folder: Path) -> None:
    config = WikipediaConfig((str(folder),), str(folder / "out.jsonl"))
    read_wikipedia(config, LineJobConfig())


def write_urls(folder: Path) -> None:
    urls = ("http://a.example.co.uk/b?c=d#e", "https://user:pw@[::1]:80/x.html", "www.x.de/%C3%A4")
    (folder / "a.txt").write_text("\n".join(urls) + "\n")
    (folder / "domains").write_text("example.com\nexample\n")


def read_urls(folder: Path) -> None:
    config = UrlConfig(
        (str(folder / "a.txt"),), str(folder / "out.txt"), domains=str(folder / "domains")
    )
    choose_urls(config, LineJobConfig())


# fork is how workers start; os.kill is how they are ended.
WORKERS = frozenset(("os.fork", "os.kill"))

FUZZERS = (
    Fuzzer("preprocessing-text", write_lines, preprocessed, may=WORKERS, seconds=15.0),
    Fuzzer("preprocessing-packed", write_packed, preprocessed, may=WORKERS, seconds=15.0),
    Fuzzer("preprocessing-parquet", write_parquet, preprocessed, may=WORKERS, seconds=15.0),
    Fuzzer("collection", write_lines, collected, heavy=True),
    Fuzzer("wikipedia", write_wikipedia, read_articles),
    Fuzzer("urls", write_urls, read_urls, heavy=True),
)
