"""Conversion of texts into token sequences, one per document or sentence."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.config import ConfigError, TokenizerConfig
from megatron.data.indexed import best_dtype
from megatron.tokenizer import Tokenizer, build_tokenizer
from megatron.tokenizer.registry import with_files
from megatron.util.digests import digest_of_parts

Span = tuple[int, int]
SpanFinder = Callable[[str], Iterable[Span]]
"""Function that yields the (start, end) character offsets of each sentence in a text. Only white
space may be between sentences."""

_ABBREVIATIONS = {
    "english": "mr mrs ms dr prof rev gen col capt lt sgt sen rep gov hon st jr sr vs etc inc ltd "
    "co corp dept est approx no vol fig eq sec ch pp ed eds al cf e.g i.e a.m p.m u.s u.k u.n "
    "ph.d b.c a.d jan feb mar apr jun jul aug sep sept oct nov dec mt ft ave blvd",
    "german": "dr prof hr fr nr bzw z.b d.h u.a usw ca evtl ggf inkl str vgl bd abs jh st",
    "french": "m mm mme mlle dr pr st ste av bd etc cf p.ex env vol no art",
    "spanish": "sr sra srta dr dra prof ud uds etc p.ej av núm pág vol ee.uu",
}
_END = re.compile(
    r"""(?<![.!?…])[.!?…]+["'”’»)\]]*(?=\s)  # a full stop and closing quotes, before white space
      | [。！？]+[」』”’）]*                  # in Chinese and Japanese no white space follows
      | (?<=\S)(?=\s*\n\s*\n)                # an empty line, full stop or not
    """,
    re.VERBOSE,
)
_LAST_WORD = re.compile(r"[^\s\"'“‘«(\[]*$")
_NEXT_START = re.compile(r"\s*[\"'“‘«(\[¿¡]*(.?)", re.DOTALL)


class SentenceSplitter:
    """Callable that splits a text into sentences, without the white space between them. With
    `keep_newlines`, line breaks after a sentence remain at its end."""

    def __init__(self, find_spans: SpanFinder, keep_newlines: bool = False) -> None:
        self._find_spans = find_spans
        self._keep_newlines = keep_newlines

    def __call__(self, text: str) -> list[str]:
        spans = list(self._find_spans(text))
        sentences = [text[start:end] for start, end in spans]
        if self._keep_newlines:
            for i, ((_, end), (following, _)) in enumerate(pairwise(spans)):
                sentences[i] += "\n" * text.count("\n", end, following)
        return sentences


def build_splitter(kind: str, lang: str, keep_newlines: bool) -> SentenceSplitter:
    """Return the splitter for a language and a `kind` of --sentence-splitter ("rules" or "punkt").
    Raises ConfigError if `kind` is punkt and NLTK or its data for the language is missing."""
    if kind == "rules":
        abbreviations = frozenset(_ABBREVIATIONS.get(lang, "").split())
        return SentenceSplitter(lambda text: rule_spans(text, abbreviations), keep_newlines)
    find_spans = _punkt(lang)
    if find_spans is None:
        raise ConfigError(
            f"--sentence-splitter punkt needs the package nltk and its punkt_tab data for --lang "
            f"{lang}, and downloads neither: run `python -m nltk.downloader punkt_tab` "
            "where there is a network, or use --sentence-splitter rules"
        )
    return SentenceSplitter(find_spans, keep_newlines)


def available_splitter(lang: str) -> str:
    """Return the kind of splitter that --sentence-splitter auto selects on this machine: punkt if
    its data is installed, otherwise rules."""
    return "rules" if _punkt(lang) is None else "punkt"


def rule_spans(text: str, abbreviations: frozenset[str] = frozenset()) -> Iterator[Span]:
    """Yield the (start, end) offsets of sentences, found by rules. A sentence ends at . ! ? …
    before white space, at 。！？, and at an empty line. It does not end at the full stop of an
    abbreviation or an initial ("J. S. Bach"), or before a lower-case letter."""
    start = _skip_space(text, 0)
    for match in _END.finditer(text):
        end = match.end()
        if end > start and _ends_sentence(text, start, match, abbreviations):
            yield start, end
            start = _skip_space(text, end)
    end = len(text.rstrip())
    if end > start:
        yield start, end


def _ends_sentence(
    text: str, start: int, match: re.Match[str], abbreviations: frozenset[str]
) -> bool:
    mark = match.group()
    if not mark or mark[0] in "。！？":
        return True
    following = _NEXT_START.match(text, match.end())
    assert following is not None
    if following.group(1).islower():
        return False
    if mark != ".":
        return True
    last = _LAST_WORD.search(text, max(start, match.start() - 40), match.start())
    word = last.group() if last else ""
    is_initial = len(word) == 1 and word.isupper() and word != "I"
    return not is_initial and word.lower() not in abbreviations


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _punkt(lang: str) -> SpanFinder | None:
    try:
        from nltk.tokenize.punkt import PunktTokenizer

        return PunktTokenizer(lang).span_tokenize
    # NLTK, its data, or its data for this language is missing
    except (ImportError, LookupError, ValueError):
        return None


Item = TypeVar("Item")


@dataclass(frozen=True)
class TextSettings:
    """Settings that determine a text's tokens and how they are divided into sequences."""

    tokenizer: TokenizerConfig
    append_eod: bool = False
    """True if each document ends with the tokenizer's end-of-document token."""
    presplit_sentences: bool = False
    """True if a text contains one sentence per line."""
    splitter: str | None = None
    """Sentence splitter ("rules" or "punkt") for texts that are not presplit. None makes each
    document one sequence."""
    lang: str = "english"
    keep_newlines: bool = False


class TextEncoder:
    """Encoder that converts texts to token sequences. The tokenizer is loaded on first use, once in
    every process; only the settings are pickled."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer | None = None) -> None:
        """Create an encoder. `tokenizer` is the settings' tokenizer, if it is already loaded."""
        self.settings = settings
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def __reduce__(self) -> tuple[type[TextEncoder], tuple[TextSettings]]:
        return type(self), (self.settings,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer defined by the settings. Raises the errors of `build_tokenizer`."""
        return build_tokenizer(self.settings.tokenizer)

    @cached_property
    def dtype(self) -> np.dtype:
        """Dtype for storing tokens: the smallest one that fits the vocabulary."""
        return best_dtype(self.tokenizer.vocab_size)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines a text's tokens, as JSON values, for use in a cache key. Files
        are represented by a digest of their content."""
        values = dataclasses.asdict(self.settings)
        values["tokenizer"] = tokenizer_identity(self.settings.tokenizer)
        return values

    @cached_property
    def eod(self) -> npt.NDArray[np.int32] | None:
        """End-of-document token, int32[1], or None if it is not appended. Raises ValueError if the
        tokenizer has no such token."""
        if not self.settings.append_eod:
            return None
        try:
            return np.array([self.tokenizer.eod], np.int32)
        except ValueError as error:
            raise ValueError(
                f"--append-eod: {error}; leave it out, or give --no-append-eod for raw text"
            ) from error

    @cached_property
    def split(self) -> SentenceSplitter | None:
        """Sentence splitter; None if texts are not split by one. Raises the errors of
        `build_splitter`."""
        if self.settings.splitter is None:
            return None
        settings = self.settings
        return build_splitter(self.settings.splitter, settings.lang, settings.keep_newlines)

    def __call__(self, texts: Sequence[str]) -> list[list[npt.NDArray[np.int32]]]:
        """Return each text's sequences: its sentences, or the whole document as one sequence. Empty
        sequences are dropped, so a text without tokens gives an empty list. Raises ValueError if a
        text cannot be tokenized, or if the end-of-document token does not exist."""
        sentences = [self._sentences(text) for text in texts]
        flat = [sentence for of_text in sentences for sentence in of_text]
        if self.settings.presplit_sentences or self.split is not None:
            ids = iter(self.tokenizer.tokenize_sentences(flat))
        else:
            ids = iter(self.tokenizer.tokenize_batch(flat))
        documents = []
        for of_text in sentences:
            document = [sequence for sequence in islice(ids, len(of_text)) if len(sequence)]
            if document and self.eod is not None:
                document[-1] = np.concatenate((document[-1], self.eod))
            documents.append(document)
        return documents

    def _sentences(self, text: str) -> list[str]:
        if self.settings.presplit_sentences:
            return [line for line in text.split("\n") if line and not line.isspace()]
        return [text] if self.split is None else self.split(text)


def refused(
    encode: Callable[[list[Item]], object], items: Sequence[Item]
) -> Iterator[tuple[int, ValueError]]:
    """Encode each item separately, and yield (index, error) for those that raise ValueError."""
    for number, item in enumerate(items):
        try:
            encode([item])
        except ValueError as error:
            yield number, error


def tokenizer_identity(config: TokenizerConfig) -> dict[str, Any]:
    """Return a tokenizer's settings as JSON values, for use in a cache key. Paths to files or
    folders are replaced by a digest of their content."""
    values = dataclasses.asdict(with_files(config))
    for name in ("cache_dir", "bpe_library"):  # neither affects the token ids
        del values[name]
    return {
        name: _with_content(value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def _with_content(text: str) -> str:
    try:
        exists = Path(text).exists()
    except OSError:  # the value is not a path, for example because it is too long
        exists = False
    return digest_of_parts(_contents(Path(text))) if exists else text


def _contents(path: Path) -> Iterator[bytes]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        content = file.read_bytes()
        name = "" if file == path else str(file.relative_to(path))
        yield f"{name}\0{len(content)}\0".encode() + content
