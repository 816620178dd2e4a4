"""Repair, language and length, on planted documents; counts by reason."""

import json

import pytest

from megatron.apps.corpus.collection.cleaning import (
    CleanupConfig,
    FixConfig,
    cleanup,
    fix,
    short_finder,
    tidied,
)
from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import build_tokenizer

ENGLISH = "The committee met on Tuesday to talk about the new bridge over the river. "
OTHERS = {
    "de": "Der Ausschuss traf sich am Dienstag, um über die neue Brücke zu sprechen. ",
    "fr": "Le comité s'est réuni mardi pour parler du nouveau pont sur la rivière. ",
    "es": "El comité se reunió el martes para hablar del nuevo puente sobre el río. ",
    "ru": "Комитет собрался во вторник, чтобы поговорить о новом мосте через реку. ",
    "zh": "委员会星期二开会讨论了河上的新桥。人们对这座桥有很多不同的看法。",
}


def run_cleanup(files, texts, tokenizer=None, workers=1, **flags):
    path = files.lines("a.jsonl", [{"n": n, "text": text} for n, text in enumerate(texts)])
    config = CleanupConfig((path,), files / "b.jsonl", dropped=files / "dropped.jsonl", **flags)
    return cleanup(config, tokenizer or TokenizerConfig(), LineJobConfig(workers=workers))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_reason(files, workers):
    broken = "The caf\u00c3\u00a9 isn\u2019t open. "  # as UTF-8 read as Latin-1 looks
    texts = [ENGLISH * 20, broken * 40, ENGLISH, "", *(text * 20 for text in OTHERS.values())]
    report = run_cleanup(files, texts, workers=workers)
    assert files.records("b.jsonl") == [
        {"n": 0, "text": ENGLISH * 20},
        {"n": 1, "text": "The caf\u00e9 isn't open. " * 40},
    ]
    dropped = files.records("dropped.jsonl")
    assert [r["dropped"] for r in dropped] == [
        "short",
        "empty",
        *(f"language {lang}" for lang in OTHERS),
    ]
    assert [r["n"] for r in dropped] == list(range(2, 9))
    assert report.documents == 9
    assert report.counts["documents written"] == 2 and report.counts["texts repaired"] == 1
    assert report.counts["left out: short"] == report.counts["left out: language de"] == 1
    assert report.counts["characters left out: short"] == len(ENGLISH)


def test_languages_to_keep(files):
    texts = [ENGLISH * 20, OTHERS["de"] * 20, OTHERS["fr"] * 20]
    run_cleanup(files, texts, lang=("de", "fr"))
    assert [r["n"] for r in files.records("b.jsonl")] == [1, 2]
    run_cleanup(files, texts, lang=("any",))
    assert [r["n"] for r in files.records("b.jsonl")] == [0, 1, 2]
    with pytest.raises(ConfigError, match="--lang english is not known"):
        run_cleanup(files, texts, lang=("english",))


def test_without_repair(files):
    text = "The caf\u00c3\u00a9 is open. " * 40
    run_cleanup(files, [text], no_ftfy=True)
    assert files.records("b.jsonl") == [{"n": 0, "text": text}]


def test_against_ftfy(files):
    import ftfy

    texts = ["schÃ¶n", "&lt;b&gt; &amp;", "ﬁne “quotes”…", "l\u2019\u00e9t\u00e9", "a\x00b\x07"]
    run_cleanup(files, texts, min_tokens=0, lang=("any",))
    assert [r["text"] for r in files.records("b.jsonl")] == [ftfy.fix_text(t) for t in texts]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> TokenizerConfig:
    folder = tmp_path_factory.mktemp("vocabulary")
    train_byte_level_bpe([ENGLISH * 3], 300, 2).save_pretrained(folder)
    return TokenizerConfig(
        vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
    )


def test_length_in_tokens(files, gpt2):
    count = len(
        build_tokenizer(
            TokenizerConfig("GPT2BPETokenizer", gpt2.vocab_file, gpt2.merge_file)
        ).tokenize(ENGLISH)
    )
    run_cleanup(files, [ENGLISH], gpt2, min_tokens=count)
    assert len(files.records("b.jsonl")) == 1
    run_cleanup(files, [ENGLISH], gpt2, min_tokens=count + 1)
    assert len(files.records("b.jsonl")) == 0


@pytest.mark.parametrize("text", [ENGLISH * 9, "ab" * 4000, " " * 5000 + ENGLISH, "\u4e2d" * 99])
def test_short_is_what_the_tokenizer_counts(gpt2, text):
    config = TokenizerConfig("GPT2BPETokenizer", gpt2.vocab_file, gpt2.merge_file)
    count = len(build_tokenizer(config).tokenize(text))
    for limit in (count - 1, count, count + 1):
        assert short_finder(limit, config)(text) == (count < limit)
    assert not short_finder(7, None)("one two, three: four.") and short_finder(8, None)("one, two")


@pytest.mark.proof
@pytest.mark.realdata
def test_real_web_text_is_english(files, realdata):
    """Of 1,000 documents of OpenWebText one is not English (it is Croatian)."""
    source = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"
    config = CleanupConfig((str(source),), files / "b.jsonl", dropped=files / "dropped.jsonl")
    report = cleanup(config, TokenizerConfig(), LineJobConfig())
    others = {k: n for k, n in report.counts.items() if k.startswith("left out: language")}
    assert sum(others.values()) <= 2
    assert "Istraživanja" in json.dumps(files.records("dropped.jsonl"), ensure_ascii=False)


def test_tasks(files):
    long, short = ENGLISH * 8, ENGLISH * 2
    assert len(long) > 512 > len(short) > 0
    texts = [
        long,
        short,
        "Please turn on JavaScript to see this page.",
        OTHERS["de"] * 2,
        "a  b\nc\nd.\ne   f\n\n g" + long,
        "schÃ¶n  " + long,
    ]
    path = files.lines("a.jsonl.gz", [{"n": n, "text": text} for n, text in enumerate(texts)])

    def run_fix(*tasks):
        config = FixConfig((path,), tasks, files / "out")
        report = fix(config, LineJobConfig())
        found = [files.records(f"out/a_{kind}.jsonl.gz") for kind in ("cleaned", "filtered")]
        return [r["n"] for r in found[0]], [r["n"] for r in found[1]], found[0], report.counts

    kept, filtered, _, counts = run_fix("remove_512")
    assert (kept, filtered) == ([0, 4, 5], [1, 2, 3]) and counts["left out: remove_512"] == 3
    kept, filtered, _, _ = run_fix("remove_256_javascript")
    assert (kept, filtered) == ([0, 1, 3, 4, 5], [2])
    kept, filtered, _, _ = run_fix("remove_512_non_english")
    assert (kept, filtered) == ([0, 1, 2, 4, 5], [3])
    _, filtered, records, counts = run_fix("general_cleaning", "ftfy_fix_text")
    assert filtered == [] and records[0]["text"] == long
    assert records[4]["text"] == "a b c d.\ne f g" + long
    assert records[5]["text"] == "schön " + long
    assert counts["texts changed: ftfy_fix_text"] == 1
    with pytest.raises(ConfigError, match="--tasks remove_1 is unknown"):
        run_fix("remove_1")


def test_two_inputs_of_one_name(files):
    paths = tuple(files.lines(f"{folder}/a.jsonl", [{"text": "x"}]) for folder in "xy")
    with pytest.raises(ConfigError, match="two outputs have the name"):
        fix(FixConfig(paths, ("remove_512",), files / "out"), LineJobConfig())


def test_tidied():
    assert tidied("a\n\n b  c.\n\nd") == "a b c.\n\nd"
