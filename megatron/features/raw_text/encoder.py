"""Texts to the token sequences of their documents, or of their sentences: for preprocessing and for
raw text alike."""

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
"""Text to the (start, end) of each sentence; what is between two of them is white space."""

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
    """Text to its sentences, without the white space between them. With `keep_newlines`, the line
    breaks after a sentence stay at its end."""

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
    """The splitter of --sentence-splitter `kind` ("rules" or "punkt") for a language. Raises
    ConfigError if `kind` is punkt, and NLTK or its data for the language is missing."""
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
    """Return the splitter that --sentence-splitter auto means on this machine."""
    return "rules" if _punkt(lang) is None else "punkt"


def rule_spans(text: str, abbreviations: frozenset[str] = frozenset()) -> Iterator[Span]:
    """Sentences by rules. One ends at . ! ? … before white space and at 。！？, unless the full
    stop belongs to an abbreviation or an initial ("J. S. Bach"), or a small letter follows; and at
    an empty line."""
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
    except (ImportError, LookupError, ValueError):  # no nltk, no data, no such language
        return None


Item = TypeVar("Item")


@dataclass(frozen=True)
class TextSettings:
    """Everything that decides which tokens a text becomes."""

    tokenizer: TokenizerConfig
    append_eod: bool = False
    """End each document with the tokenizer's end-of-document token."""
    presplit_sentences: bool = False
    """A text contains one sentence per line."""
    splitter: str | None = None
    """Else what finds sentences ("rules" or "punkt"); None: a document is one sequence."""
    lang: str = "english"
    keep_newlines: bool = False


class TextEncoder:
    """Encodes texts; loads its tokenizer on first use, once in every process. Pickles as its
    settings."""

    def __init__(self, settings: TextSettings, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer`: the settings' tokenizer, if it is already loaded."""
        self.settings = settings
        if tokenizer is not None:
            self.tokenizer = tokenizer

    def __reduce__(self) -> tuple[type[TextEncoder], tuple[TextSettings]]:
        return type(self), (self.settings,)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises as `build_tokenizer`."""
        return build_tokenizer(self.settings.tokenizer)

    @cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the tokens in files and samples; the smallest that the vocabulary fits."""
        return best_dtype(self.tokenizer.vocab_size)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that the tokens of a text depend on, as JSON values; files by content."""
        values = dataclasses.asdict(self.settings)
        values["tokenizer"] = tokenizer_identity(self.settings.tokenizer)
        return values

    @cached_property
    def eod(self) -> npt.NDArray[np.int32] | None:
        """Ends a document; int32[1]. Raises ValueError if the tokenizer has no such token."""
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
        """Raises as `build_splitter`."""
        if self.settings.splitter is None:
            return None
        settings = self.settings
        return build_splitter(self.settings.splitter, settings.lang, settings.keep_newlines)

    def __call__(self, texts: Sequence[str]) -> list[list[npt.NDArray[np.int32]]]:
        """The sequences of each text's document; an empty list for a text without a token. Raises
        ValueError if a text cannot be tokenized, or there is no end-of-document token."""
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
    """Numbers of the items that cannot be encoded, each tried alone, with their errors."""
    for number, item in enumerate(items):
        try:
            encode([item])
        except ValueError as error:
            yield number, error


def tokenizer_identity(config: TokenizerConfig) -> dict[str, Any]:
    """The settings of a tokenizer as JSON values; a path of a file or folder is replaced by a
    digest of its content."""
    values = dataclasses.asdict(with_files(config))
    for name in ("cache_dir", "bpe_library"):  # neither changes the ids
        del values[name]
    return {
        name: _with_content(value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def _with_content(text: str) -> str:
    try:
        exists = Path(text).exists()
    except OSError:  # too long for a path, for example
        exists = False
    return digest_of_parts(_contents(Path(text))) if exists else text


def _contents(path: Path) -> Iterator[bytes]:
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for file in files:
        content = file.read_bytes()
        name = "" if file == path else str(file.relative_to(path))
        yield f"{name}\0{len(content)}\0".encode() + content
