"""Questions as rows of tokens: [CLS] question [SEP] a window of the text [SEP].

A text that does not fit into a row is read in windows that overlap.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.fine_tuning.squad.questions import Question
from megatron.config import ConfigError
from megatron.data.labelled_text import LabelledText
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import Offsets, TokenIds

Places = npt.NDArray[np.int64]

CLS_PLACE = 0
"""Where a row begins, and the answer "none"."""


@dataclass(frozen=True)
class Passage:
    """The tokens of a text, [T], and the characters that each stands for, [T, 2]."""

    text: str
    tokens_T: TokenIds
    offsets_T2: Offsets

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Passage:
        tokens_T, offsets_T2 = tokenizer.tokenize_with_offsets(text)
        return cls(text, tokens_T, _with_marks(text, offsets_T2))

    def answer(self, first: int, last: int) -> str:
        """The text of the tokens from ``first`` to ``last``, both included."""
        return self.text[self.offsets_T2[first, 0] : self.offsets_T2[last, 1]]

    def tokens_of(self, start: int, end: int) -> tuple[int, int] | None:
        """The first and last token of the characters [start, end); None if no token has any."""
        overlap = (self.offsets_T2[:, 0] < end) & (self.offsets_T2[:, 1] > start)
        places = np.flatnonzero(overlap)
        return (int(places[0]), int(places[-1])) if len(places) else None


@dataclass(frozen=True)
class Window:
    """One row about a question.

    Attributes:
        head: [CLS] question [SEP].
        first: number of the window's first token in the passage; the others follow it.
        best_N: whether no other window shows more text around a token, for the N text tokens;
            answers begin in the window that shows most around them.
        span: places in the row of the first and last token of the answer; both `CLS_PLACE` if the
            window does not contain it.
    """

    passage: Passage
    head: TokenIds
    first: int
    best_N: npt.NDArray[np.bool_]
    span: tuple[int, int]

    @property
    def text(self) -> int:
        """Place of the first text token in the row."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Tokens of the row."""
        return len(self.head) + len(self.best_N) + 1

    def row(self) -> LabelledText:
        """Tokens, and types: 0 up to the first [SEP], then 1."""
        tokens = self.passage.tokens_T[self.first : self.first + len(self.best_N)]
        row = np.concatenate((self.head, tokens, self.head[-1:])).astype(np.int64)
        types = (np.arange(len(row)) >= self.text).astype(np.int64)
        return LabelledText((row,), (types,), self.span)


@dataclass(frozen=True)
class WindowMaker:
    """Makes the rows of questions.

    Attributes:
        seq_length: most tokens of a row.
        doc_stride: text tokens from the beginning of a window to that of the next.
        max_query_length: tokens of a question that are read.
    """

    tokenizer: Tokenizer
    seq_length: int
    doc_stride: int
    max_query_length: int

    def windows(self, questions: Sequence[Question]) -> list[list[Window]]:
        """The windows of each question; questions about one text share its tokens. Raises
        ConfigError if windows would leave out text, and ValueError if a text or an answer has no
        tokens, both naming file and question."""
        passages: dict[str, Passage] = {}
        found = []
        for question in questions:
            if question.context not in passages:
                passages[question.context] = Passage.of(question.context, self.tokenizer)
            try:
                found.append(self._windows(question, passages[question.context]))
            except ValueError as error:
                where = f"{question.file}: question {question.identity}"
                raise type(error)(f"{where}: {error}") from None
        return found

    def _windows(self, question: Question, passage: Passage) -> list[Window]:
        tokenizer = self.tokenizer
        query = tokenizer.tokenize_sentences([question.question])[0][: self.max_query_length]
        head = np.concatenate(([tokenizer.cls], query, [tokenizer.sep])).astype(np.int32)
        count = len(passage.tokens_T)
        if not count:
            raise ValueError("its context has no tokens; remove it, or correct the text")
        answer = self._answer(question, passage)
        windows = []
        starts, lengths = self._cut(count, self.seq_length - len(head) - 1)
        for place, (first, length) in enumerate(
            zip(starts.tolist(), lengths.tolist(), strict=True)
        ):
            span = (CLS_PLACE, CLS_PLACE)
            if answer is not None and first <= answer[0] and answer[1] < first + length:
                span = (answer[0] - first + len(head), answer[1] - first + len(head))
            best_N = _most_context(starts, lengths, first, length) == place
            windows.append(Window(passage, head, first, best_N, span))
        return windows

    def _answer(self, question: Question, passage: Passage) -> tuple[int, int] | None:
        """Tokens of the first answer, which is the one to learn."""
        if not question.answers:
            return None
        answer = question.answers[0]
        found = passage.tokens_of(answer.start, answer.start + len(answer.text))
        if found is None:
            raise ValueError(f"its answer {answer.text!r} has no tokens; remove the question")
        return found

    def _cut(self, count: int, room: int) -> tuple[Places, Places]:
        """Begin and length of each window of a text of ``count`` tokens."""
        if room < 1 or (count > room and self.doc_stride > room):
            raise ConfigError(
                f"--seq-length {self.seq_length} leaves {max(room, 0)} tokens of text beside the "
                f"question, which windows {self.doc_stride} tokens apart (--doc-stride) do not "
                f"cover; use a smaller --doc-stride or --max-query-length ({self.max_query_length})"
                ", or a model of longer sequences"
            )
        more = max(0, -(-(count - room) // self.doc_stride))
        starts = np.arange(1 + more) * self.doc_stride
        return starts, np.minimum(count - starts, room)


def _most_context(starts: np.ndarray, lengths: np.ndarray, first: int, length: int) -> np.ndarray:
    """The window that shows most around each token of [first, first + length), [N]: the larger the
    smaller side, the better, and then the longer the window; the first of equal ones."""
    near = np.flatnonzero((starts < first + length) & (starts + lengths > first))
    starts, lengths = starts[near], lengths[near]
    tokens_1N = np.arange(first, first + length)[None]
    left_WN = tokens_1N - starts[:, None]
    right_WN = (starts + lengths - 1)[:, None] - tokens_1N
    shown_WN = np.minimum(left_WN, right_WN)
    score_WN = shown_WN + 0.01 * lengths[:, None]
    return near[np.where(shown_WN >= 0, score_WN, -np.inf).argmax(0)]


def _with_marks(text: str, offsets_T2: Offsets) -> Offsets:
    """Offsets in which accents that the tokenizer removed belong to the letter before them, where
    the text has them as characters of their own."""
    if text.isascii():
        return offsets_T2
    letters = [place for place, char in enumerate(text) if unicodedata.category(char) != "Mn"]
    letters_L = np.array([*letters, len(text)], offsets_T2.dtype)
    ends_T = letters_L[np.searchsorted(letters_L, offsets_T2[:, 1])]
    return np.stack((offsets_T2[:, 0], ends_T), axis=1)
