"""Decontamination: n-grams, cuts and pieces against a slow reference, and planted overlaps."""

import json
import random
import re

import pytest

from megatron.apps.corpus.collection.decontamination import (
    FilterConfig,
    Matcher,
    cuts,
    filter_ngrams,
    ngrams_of_task,
    pieces,
    task_texts,
)
from megatron.apps.corpus.collection.line_job import LineJobConfig
from megatron.config import ConfigError

QUESTION = (
    "when the old captain finally opened the heavy iron door he saw nothing but dust and silence"
)


def sentences(count: int, seed: int) -> str:
    """Sentences of 50 characters that share nothing with other seeds."""
    rng = random.Random(seed)
    words = (f"{rng.randrange(36**4):05x}w" for _ in range(10 * count))
    text = ""
    for _ in range(count):
        sentence = " ".join(next(words) for _ in range(7))
        text += sentence[:49].ljust(49, "z") + ". "
    return text.strip()


def slow_matches(text: str, ngrams: set[str]) -> list[tuple[int, int]]:
    located = [(m[0].lower(), m.start(), m.end()) for m in re.finditer(r"\w+", text)]
    return [
        (located[i][1], located[j][2])
        for i in range(len(located))
        for j in range(i, len(located))
        if " ".join(w for w, _, _ in located[i : j + 1]) in ngrams
    ]


def slow_cut(text: str, spans, margin: int, shortest: int) -> tuple[int, list[str]]:
    """One character at a time: marks what goes, and reads off the rest."""
    gone = [False] * len(text)
    for start, end in spans:
        left = max(start - margin, 0)
        while left > 0 and text[left - 1] not in ".!?":
            left -= 1
        right = min(end + margin, len(text))
        while right < len(text) and text[right] not in ".!?":
            right += 1
        for i in range(left, min(right + 1, len(text))):
            gone[i] = True
    marks = "".join("x" if g else "." for g in gone)
    left = [text[m.start() : m.end()].strip() for m in re.finditer(r"\.+", marks)]
    return len(re.findall("x+", marks)), [p for p in left if len(p) >= max(shortest, 1)]


def test_ngrams_of_a_task():
    words = [f"w{i}" for i in range(15)]
    assert list(ngrams_of_task(" ".join(words).upper(), 8, 13)) == [
        " ".join(words[i : i + 13]) for i in range(3)
    ]
    assert list(ngrams_of_task("A, b! c d e f-g h", 8, 13)) == ["a b c d e f g h"]
    assert list(ngrams_of_task("a b c d e f g", 8, 13)) == []
    assert list(ngrams_of_task(" ".join(words[:13]), 8, 13)) == [" ".join(words[:13])]


@pytest.mark.parametrize("seed", range(60))
def test_against_slow_reference(seed):
    rng = random.Random(seed)
    text = ""
    for _ in range(rng.randrange(120)):
        text += rng.choice("abcd") + rng.choice([" ", " ", ", ", ". ", "! ", "\n", "İ "])
    ngrams = {
        " ".join(rng.choice("abcd") for _ in range(rng.randrange(2, 6)))
        for _ in range(rng.randrange(1, 6))
    }
    found = Matcher(ngrams)(text)
    assert sorted(span for _, span in found) == sorted(slow_matches(text, ngrams))
    margin, shortest = rng.randrange(8), rng.randrange(6)
    removed = cuts(text, (span for _, span in found), margin)
    expected = slow_cut(text, [span for _, span in found], margin, shortest)
    assert (len(removed), pieces(text, removed, shortest)) == expected


def test_capitals_that_change_length():
    text = "İİİ One, TWO three."
    ((ngram, (start, end)),) = Matcher({"one two three"})(text)
    assert (ngram, text[start:end]) == ("one two three", "One, TWO three")


def run_filter(files, texts, task=QUESTION, running=None, **flags):
    task_file = files.lines("task.jsonl", [{"q": task}])
    corpus = files.lines("corpus.jsonl", [{"n": n, "text": t} for n, t in enumerate(texts)])
    config = FilterConfig(
        task_file=(f"{task_file}:q",),
        dedup_dataset=(corpus, "text"),
        output=files / "out.jsonl",
        **flags,
    )
    return filter_ngrams(config, running or LineJobConfig())


@pytest.mark.parametrize("workers", [1, 2])
def test_planted_contamination(files, workers):
    before, after = sentences(10, 1), sentences(10, 2)  # 509 characters each
    planted = f"{before} {QUESTION.upper()}. {after}"
    clean = sentences(12, 3)
    twelve = " ".join(QUESTION.split()[:12])
    texts = [
        clean,
        planted,
        f"{clean} {twelve}. {clean}",
        f"{sentences(3, 4)} {QUESTION}. {after}",
        QUESTION,
    ]
    report = run_filter(files, texts, running=LineJobConfig(workers=workers))
    found = files.records("out.jsonl")
    # 200 characters are four sentences of 51 less 4: the cut goes to the end of the one before
    kept_before, kept_after = before[: 6 * 51].strip(), after[4 * 51 :].strip()
    assert [(r["n"], r["text"], r.get("split_id")) for r in found] == [
        (0, clean, None),
        (1, kept_before, "task-0000000002-0000"),
        (1, kept_after, "task-0000000002-0001"),
        (2, texts[2], None),
        (3, kept_after, "task-0000000004-0000"),
    ]
    assert (report.ngrams, report.found, report.common) == (5, 5, 0)
    assert report.filtered is not None and report.filtered.counts == {
        "documents unchanged": 2,
        "documents split": 1,
        "documents trimmed": 1,
        "documents left out: no piece is long enough": 1,
        "n-grams found": 15,
        "pieces written": 3,
    }
    assert files.names() == {"task.jsonl", "corpus.jsonl", "out.jsonl"}


@pytest.mark.parametrize("places, stays", [(10, True), (11, False)])
def test_documents_cut_in_many_places_go(files, places, stays):
    text = (
        " ".join(f"{sentences(12, i)} {QUESTION}." for i in range(places)) + " " + sentences(12, 99)
    )
    report = run_filter(files, [text], key_threshold=0)
    assert len(files.records("out.jsonl")) == (places + 1 if stays else 0)
    assert report.filtered is not None
    gone = report.filtered.counts["documents left out: cut in more than 10 places"]
    assert gone == (not stays)


def test_common_phrases_stay(files):
    text = f"{sentences(12, 1)} {QUESTION}. {sentences(12, 2)}"
    assert run_filter(files, [text] * 9).found == 5
    report = run_filter(files, [text] * 10)
    assert (report.found, report.common) == (0, 5)
    assert [r["text"] for r in files.records("out.jsonl")] == [text] * 10


def test_dictionary_saved_and_loaded(files):
    text = f"{sentences(12, 1)} {QUESTION}. {sentences(12, 2)}"
    run_filter(files, [text, sentences(12, 3)], save_dictionary=files / "dictionary.json")
    saved = json.loads(files.read("dictionary.json"))["ngrams"]
    assert saved == dict.fromkeys(ngrams_of_task(QUESTION, 8, 13), 1)
    first = files.records("out.jsonl")
    filter_ngrams(
        FilterConfig(
            dedup_dataset=(files / "corpus.jsonl", "text"),
            load_dictionary=files / "dictionary.json",
            output=files / "out2.jsonl",
        ),
        LineJobConfig(),
    )
    assert [r["text"] for r in files.records("out2.jsonl")] == [r["text"] for r in first]
    (files.folder / "other.json").write_text('{"ngrams": {"one": 1}}')
    with pytest.raises(ValueError, match="other.json is not a file that --save-dictionary wrote"):
        filter_ngrams(
            FilterConfig(
                dedup_dataset=(files / "corpus.jsonl", "text"),
                load_dictionary=files / "other.json",
                output=files / "out2.jsonl",
            ),
            LineJobConfig(),
        )


def test_counting_is_not_repeated_after_a_kill(files, monkeypatch, capsys):
    from megatron.apps.corpus.collection import decontamination

    class Killed(BaseException):
        pass

    def dying(*_args):
        raise Killed

    text = f"{sentences(12, 1)} {QUESTION}. {sentences(12, 2)}"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(decontamination, "_cut", dying)
        run_filter(files, [text])
    assert (files.folder / "out.jsonl.counts").exists()
    corpus = (files.folder / "corpus.jsonl").stat()

    def refuse(*_args):
        raise AssertionError("counted again")

    with monkeypatch.context() as patch:
        patch.setattr(decontamination, "_count_step", refuse)
        config = FilterConfig(
            task_file=(f"{files / 'task.jsonl'}:q",),
            dedup_dataset=(files / "corpus.jsonl", "text"),
            output=files / "out.jsonl",
        )
        filter_ngrams(config, LineJobConfig())
    assert (files.folder / "corpus.jsonl").stat() == corpus
    assert len(files.records("out.jsonl")) == 2
    assert files.names() == {"task.jsonl", "corpus.jsonl", "out.jsonl"}


def test_text_files_as_tasks(files):
    files.lines("task.txt", [f"short line\n{QUESTION}\n".encode()])
    corpus = files.lines("corpus.jsonl", [{"text": f"{sentences(12, 1)} {QUESTION}."}])
    config = FilterConfig(
        task_file=(files / "task.txt",), dedup_dataset=(corpus, "text"), output=files / "out.jsonl"
    )
    assert filter_ngrams(config, LineJobConfig()).found == 5


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"tasks": ("squad",)}, "--task-file FILE:KEY"),
        ({"tasks": ("lambada",)}, "--lambada-path"),
        ({}, "one of the two"),
        ({"task_file": ("a:b",), "dedup_dataset": ("a",)}, "must be a file and the key"),
        ({"task_file": ("a:b",), "min_ngram_size": 14}, "--min-ngram-size 14"),
        ({"task_file": ("a:b",), "output": None}, "--output is missing"),
    ],
)
def test_refused_flags(flags, message):
    config = FilterConfig(**{"dedup_dataset": ("a", "text"), "output": "b", **flags})
    with pytest.raises(ConfigError, match=message):
        config.check()


def test_refused_tasks(files):
    corpus = files.lines("corpus.jsonl", [{"text": "x"}])
    for name, line, message in (
        ("a.jsonl", b"nonsense\n", "a.jsonl, line 1: not JSON"),
        ("b.jsonl", b'{"q": "short"}\n', "has no text of 8 words"),
    ):
        task = files.lines(name, [line])
        config = FilterConfig(
            task_file=(f"{task}:q",), dedup_dataset=(corpus, "text"), output=files / "out.jsonl"
        )
        with pytest.raises(ValueError, match=message):
            filter_ngrams(config, LineJobConfig())


@pytest.mark.proof
@pytest.mark.realdata
def test_lambada_and_wikitext_planted_in_real_text(files, realdata):
    """Passages of both, planted in OpenWebText: they go, and nothing else does."""
    source = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"
    documents = [json.loads(line)["text"] for line in source.open()][:300]
    lambada = realdata / "lambada" / "lambada_test_first1000.jsonl"
    wikitext = realdata / "wikitext2" / "wiki.valid.raw"
    passages = [json.loads(line)["text"] for line in lambada.open()][:1000:100]
    passages += [line.strip() for line in wikitext.open() if len(line) > 300][:1000:100]
    texts = [
        document + "\n\n" + passages[i // 10] + "\n\n" + document if i % 10 == 0 else document
        for i, document in enumerate(documents)
        if i // 10 < len(passages) or i % 10
    ]
    corpus = files.lines("corpus.jsonl", [{"n": n, "text": t} for n, t in enumerate(texts)])
    config = FilterConfig(
        tasks=("lambada",),
        lambada_path=str(lambada),
        task_file=(str(wikitext),),
        dedup_dataset=(corpus, "text"),
        output=files / "out.jsonl",
    )
    report = filter_ngrams(config, LineJobConfig())
    assert report.filtered is not None
    touched = len(texts) - report.filtered.counts["documents unchanged"]
    assert touched == len(passages)
    left = "\n".join(r["text"] for r in files.records("out.jsonl")).lower()
    for passage in passages:
        words = re.findall(r"\w+", passage.lower())
        assert " ".join(words[5:18]) not in " ".join(re.findall(r"\w+", left))


RACE = {
    "article": f"{sentences(4, 50)} {QUESTION}.",
    "questions": [f"why was it that {QUESTION} ?", "who?"],
    "options": [["dust", "silence"], [f"because {QUESTION}", "no"]],
    "answers": ["A"],
}


def test_the_layouts_of_race_glue_and_wikitext(files):
    """Each has one text with the planted question, next to one that the corpus does not have."""
    other = sentences(3, 60)
    files.lines("race/1.txt", [RACE])
    files.lines("race/2.txt", [RACE | {"article": other, "questions": [other], "options": [["x"]]}])
    table = f"index\tsentence1\tsentence2\n0\t{QUESTION}\tshort\n1\t{other}\t{QUESTION} now\n"
    files.lines("dev.tsv", [table.encode()])
    files.lines("cola.tsv", [f"gj04\t1\t\t{QUESTION}\nbc01\t1\t\t{other}\n".encode()])
    files.lines("wiki.tokens", [f" = Title = \n \n {QUESTION} , and <unk> .\n {other} \n".encode()])
    corpus = files.lines(
        "corpus.jsonl", [{"text": f"{sentences(12, 1)} {QUESTION}."}, {"text": sentences(12, 2)}]
    )
    names = {
        f"{files / 'race'}:article": (1, 2),
        f"{files / 'race'}:questions": (1, 2),
        f"{files / 'dev.tsv'}:sentence1": (1, 2),
        f"{files / 'dev.tsv'}:sentence2": (1, 1),
        f"{files / 'cola.tsv'}:3": (1, 2),
        files / "wiki.tokens": (1, 2),
    }
    config = FilterConfig(
        task_file=tuple(names), dedup_dataset=(corpus, "text"), output=files / "out.jsonl"
    )
    report = filter_ngrams(config, LineJobConfig())
    assert dict(report.sets) == names
    assert f"{files / 'race'}:article: 1 of 2 texts share n-grams" in str(report)
    assert report.filtered is not None and report.filtered.counts["documents unchanged"] == 1
    assert list(task_texts(f"{files / 'race'}:options"))[:2] == ["dust", "silence"]


@pytest.mark.parametrize(
    "name, line, key, message",
    [
        ("race/1.txt", RACE, "passage", r'1.txt, line 1: no key "passage"; its keys: article, q'),
        ("race/1.txt", RACE, "", "is a folder: give FOLDER:KEY"),
        ("race/1.md", RACE, "article", "has no .txt or .json file"),
        ("a.jsonl", {"q": 7}, "q", 'line 1: "q" has no text'),
        ("a.tsv", b"one\ttwo\n", "three", "line 1: no column 'three'; its columns: one, two"),
        ("a.tsv", b"one\ttwo\n1\n", "two", "a.tsv, line 2: 1 columns, none is two"),
        ("a.tsv", b"1\n", "7", "a.tsv, line 1: 1 columns, none is 7"),
    ],
)
def test_what_evaluation_sets_lack(files, name, line, key, message):
    files.lines(name, [line])
    path = files / name.partition("/")[0]
    with pytest.raises(ValueError, match=message):
        list(task_texts(f"{path}:{key}" if key else path))


@pytest.mark.proof
@pytest.mark.realdata
def test_real_evaluation_sets_planted_in_200_documents(files, realdata):
    """Rows of LAMBADA, RACE, MNLI and WikiText, each in a document of its own: those documents are
    found and cut, and of 200 others none is."""
    source = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"
    documents = [json.loads(line)["text"] for line in source.open()][:280]
    sets = {
        f"{realdata / 'lambada' / 'lambada_test_first1000.jsonl'}:text": 40,
        f"{realdata / 'race' / 'dev' / 'middle'}:article": 20,
        f"{realdata / 'glue' / 'MNLI' / 'dev_matched.tsv'}:sentence1": 15,
        str(realdata / "wikitext2" / "wiki.valid.raw"): 5,
    }
    texts, rows, planted = documents[:200], documents[200:], {}
    for file, count in sets.items():
        long = [text for text in task_texts(file) if len(text.split()) > 20]
        chosen = [long[n * len(long) // count] for n in range(count)]
        texts += [f"{rows.pop()}\n\n{text}\n\n{sentences(9, 1)}" for text in chosen]
        planted[file] = sum(text in chosen for text in task_texts(file))  # MNLI repeats premises
    corpus = files.lines("corpus.jsonl", [{"n": n, "text": t} for n, t in enumerate(texts)])
    config = FilterConfig(
        task_file=tuple(sets), dedup_dataset=(corpus, "text"), output=files / "out.jsonl"
    )
    report = filter_ngrams(config, LineJobConfig())
    assert {file: found for file, (found, _) in report.sets.items()} == planted
    kept = {r["n"]: r["text"] for r in files.records("out.jsonl") if "split_id" not in r}
    assert sorted(kept) == list(range(200)) and all(kept[n] == texts[n] for n in kept)
