"""A megabyte of what each reader of text likes least is read in about a second."""

import functools
import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from samples import sampled

from megatron.apps.corpus.collection import cleaning, decontamination, json_files, urls, wikipedia
from megatron.apps.corpus.normalization import LONGEST_RUN, normalized
from megatron.apps.corpus.preprocessing.inputs import LineBatch
from megatron.apps.tasks.fine_tuning import squad, squad_files
from megatron.apps.tasks.fine_tuning.examples import clean_text
from megatron.apps.tasks.zeroshot.texts import detokenizer_of
from megatron.features.instruction.conversations import read_examples
from megatron.features.raw_text.encoder import build_splitter
from megatron.features.raw_text.records import ArrayReader, texts_of_line

SIZE = 1_000_000
"""Bytes of UTF-8, about."""
FIRST = 50_000
"""Bytes that are tried before, so that a reader that is slow is found in seconds."""
LIMIT = 100
"""Passes of Python over as many characters in which a text is read: a second or two, on a processor
that others use as well."""
MARKS = "\u0315\u0300\u0323"
NGRAM = " ".join(["a"] * 13)


def of(text: str, size: int) -> str:
    """A text again and again, in so many bytes."""
    return text * (size // len(text.encode()))


JSON = {
    "unclosed string of quotes": lambda size: '{"text":"' + "[" * 1100 + of('\\"', size),
    "unclosed string of backslashes": lambda size: "[" * 1100 + '"' + of("\\", size),
    "brackets and quotes": lambda size: "[" * 1100 + of('"', size),
    "brackets": lambda size: of("[", size),
    "objects": lambda size: of('{"a":', size),
    "pairs of brackets": lambda size: '{"text":"a","b":[NaN,' + of("[],", size) + "0]}",
    "a number": lambda size: '{"text":"a","b":NaN,"c":' + of("9", size) + "}",
    "a fraction": lambda size: '{"text":"a","b":NaN,"c":0.' + of("9", size) + "}",
    "an exponent": lambda size: '{"text":"a","b":NaN,"c":1e' + of("9", size) + "}",
    "one key": lambda size: '{"text":"a","b":NaN,' + of('"c":1,', size) + '"d":1}',
    "surrogates": lambda size: '{"text":"' + of("\\ud83d", size) + '"}',
    "no value": lambda size: '{"text":' + of(" ", size),
}
TEXTS = {
    name: functools.partial(of, text)
    for name, text in {
        "letters": "a", "digits": "1", "words": "a ", "blanks": " ", "lines": "\n",
        "blank lines": " \n", "full stops": ".", "ends": '." ', "initials": "A. ", "stops": "。",
        "quotes": '"', "apostrophes": "'", "open (": "(", "open [": "[", "open {": "{",
        "open and blank": "( ", "closed": " )", "equals": "= ", "&": "&", "<": "<",
        "escapes": "\x1b[", "marks": MARKS, "letters with marks": "a" + MARKS * 20,
        "ligatures": "\ufdfa", "mojibake": "Ã¢â‚¬â„¢",
    }.items()  # fmt: skip
} | {
    "a bracket and blanks": lambda size: "(" + of(" ", size),
    "a number of HTML": lambda size: "&#" + of("1", size) + ";",
    "marks of mojibake": lambda size: of("Ì€", size),
}  # fmt: skip


def batch(content: str) -> LineBatch:
    return LineBatch(Path("file"), 1, content.encode().splitlines(keepends=True), 0)


language = cleaning.language_finder


def array(content: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"item \d+ of the array"):
        list(ArrayReader(io.BufferedReader(io.BytesIO(content.encode()))))


def records(content: str, tmp_path: Path) -> None:
    assert len(list(json_files.records_of(batch(content), ["text"]))) == 1


def examples(content: str, tmp_path: Path) -> None:
    (tmp_path / "examples.jsonl").write_text(content)
    with pytest.raises(ValueError, match="examples"):
        list(read_examples(str(tmp_path / "examples.jsonl")))


def markup(before: str, after: str) -> Callable[[str, Path], None]:
    """Reads the text in a place of an article."""

    def read(content: str, tmp_path: Path) -> None:
        step = wikipedia._wikipedia_step(wikipedia.WikipediaConfig())
        (tmp_path / "wiki_00").write_text(before + content + after)
        for each in wikipedia.article_batches([tmp_path / "wiki_00"]):
            step(each)

    return read


def address(content: str, tmp_path: Path) -> None:
    fault = urls.fault_finder(urls.UrlConfig())
    for url in (content, f"http://{content}.com/", f"http://a.com/{content}?{content}"):
        if fault(url) is None:
            urls.same_page(url)


def decontaminated(content: str, tmp_path: Path) -> None:
    """Half a megabyte: there are n-grams at every word of it."""
    text = of(f"{NGRAM} ", len(content) // 4) + content[: len(content) // 4]
    matches = decontamination.Matcher([NGRAM])(text)
    removed = decontamination.cuts(text, (span for _, span in matches), 200)
    decontamination.pieces(text, removed, 200)


def marked(content: str, tmp_path: Path) -> None:
    places = np.arange(len(content))
    squad._with_marks(content, np.stack((places, places + 1), axis=1))


OF_JSON = {
    "texts_of_line": lambda content, _: texts_of_line(content.encode(), 1, ["text"]),
    "array": array,
    "records": records,
    "examples": examples,
}
OF_TEXT = {
    "repaired": lambda text, _: cleaning.repaired(text),
    "tidied": lambda text, _: cleaning.tidied(text),
    "language": lambda text, _: language()(text),
    "short": lambda text, _: cleaning.short_finder(1 << 40, None)(text),
    "sentences": lambda text, _: build_splitter("rules", "english", True)(text),
    "WikiText": lambda text, _: detokenizer_of("wiki")[1](text),
    "PTB": lambda text, _: detokenizer_of("ptb")[1](text),
    "NFKC": lambda text, _: normalized("NFKC", text),
    "clean_text": lambda text, _: clean_text(text),
    "SQuAD": lambda text, _: squad_files.f1_score(text, text),
    "marks of SQuAD": marked,
    "no end of <doc": markup("<doc ", "\n"),
    "attributes": markup("<doc ", ">\nA\nb\n</doc>\n"),
    "title": markup('<doc id="1" url="" title="', '">\nA\nb\n</doc>\n'),
    "article": markup('<doc id="1" url="" title="A">\nA\n', "\n</doc>\n"),
    "address": address,
    "n-grams": decontaminated,
}
SAMPLED = {
    ("texts_of_line", "unclosed string of quotes"),
    ("repaired", "marks of mojibake"),
    ("attributes", "letters"),
    ("article", "a number of HTML"),
    ("WikiText", "a bracket and blanks"),
    ("marks of SQuAD", "marks"),
}
"""Once slow, and run by default."""


def seconds(function: Callable[[], object]) -> float:
    """Seconds of the processor that a call takes."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


@pytest.mark.parametrize(
    ("reader", "worst"),
    sampled(
        [
            *((reader, worst) for reader in OF_JSON for worst in JSON),
            *((reader, worst) for reader in OF_TEXT for worst in TEXTS),
        ],
        lambda case: case in SAMPLED,
    ),
)
def test_a_megabyte_takes_less_than_a_second(reader, worst, tmp_path):
    read, make = (OF_JSON | OF_TEXT)[reader], (JSON | TEXTS)[worst]
    for size in (FIRST, SIZE):
        text = make(size)
        limit = LIMIT * seconds(lambda: sum(map(ord, "a" * SIZE)))
        assert seconds(functools.partial(read, text, tmp_path)) < limit


def test_normalisation_leaves_only_long_runs_as_they_are():
    run = "\u0300" * LONGEST_RUN
    assert normalized("NFC", f"e\u0301 a{run}") == f"é à{run[1:]}"
    assert normalized("NFC", f"e\u0301 a{run}\u0300e\u0301") == f"é a{run}\u0300é"
