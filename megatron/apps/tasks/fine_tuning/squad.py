"""SQuAD as a fine-tuning task: an encoder predicts where answers start and end.

A question becomes one or more sequences: [CLS] question [SEP] window of the text [SEP]. A text that
does not fit into one sequence is split into overlapping windows. The best spans are chosen from the
start and end logits of all windows of a question.

Shape suffixes: S tokens of a sequence, T tokens of a text, N text tokens in a window.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.fine_tuning.encoder import collator
from megatron.apps.tasks.fine_tuning.scores import Prediction, Scores
from megatron.apps.tasks.fine_tuning.squad_files import (
    Question,
    read_questions,
    squad2_metrics,
    squad_metrics,
)
from megatron.apps.tasks.fine_tuning.task import (
    FineTuning,
    HeldOutSamples,
    Numbers,
    TrainingSamples,
)
from megatron.config import ConfigError, Setting, Settings
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.masked.heads import LabelledText, collate_labelled
from megatron.model.layer_list import LayerState
from megatron.model.spec import Measure
from megatron.run.run import Run
from megatron.tokenizer import Tokenizer
from megatron.tokenizer.base import Offsets, TokenIds
from megatron.util.files import write_whole

Places = npt.NDArray[np.int64]
Logits = npt.NDArray[np.floating]

CLS_PLACE = 0
"""Position of [CLS] in a sequence, which represents "no answer"."""


@dataclass(frozen=True)
class Passage:
    """Tokens of a text [T], and the character span [start, end) of each token [T, 2]."""

    text: str
    tokens_T: TokenIds
    offsets_T2: Offsets

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Passage:
        tokens_T, offsets_T2 = tokenizer.tokenize_with_offsets(text)
        return cls(text, tokens_T, _with_marks(text, offsets_T2))

    def answer(self, first: int, last: int) -> str:
        """Return the text of the tokens from ``first`` to ``last``, both included."""
        return self.text[self.offsets_T2[first, 0] : self.offsets_T2[last, 1]]

    def tokens_of(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the indices of the first and last token that overlap the characters [start, end),
        or None if no token does."""
        overlap = (self.offsets_T2[:, 0] < end) & (self.offsets_T2[:, 1] > start)
        places = np.flatnonzero(overlap)
        return (int(places[0]), int(places[-1])) if len(places) else None


def _with_marks(text: str, offsets_T2: Offsets) -> Offsets:
    """Extend the character spans over accents that the tokenizer removed, so that an accent encoded
    as a separate character belongs to the letter before it."""
    if text.isascii():
        return offsets_T2
    letters = [place for place, char in enumerate(text) if unicodedata.category(char) != "Mn"]
    letters_L = np.array([*letters, len(text)], offsets_T2.dtype)
    ends_T = letters_L[np.searchsorted(letters_L, offsets_T2[:, 1])]
    return np.stack((offsets_T2[:, 0], ends_T), axis=1)


@dataclass(frozen=True)
class Window:
    """One sequence for a question. ``head`` is [CLS] question [SEP], followed by the tokens of the
    passage from ``first``. ``best_N`` is true for the tokens for which no other window shows more
    context; answers may begin only at these. ``span`` contains the positions in the sequence of the
    answer's first and last token, both `CLS_PLACE` if the window does not contain the answer."""

    passage: Passage
    head: TokenIds
    first: int
    best_N: npt.NDArray[np.bool_]
    span: tuple[int, int]

    @property
    def text(self) -> int:
        """Position in the sequence of the first text token."""
        return len(self.head)

    @property
    def length(self) -> int:
        """Number of tokens in the sequence, including the final [SEP]."""
        return len(self.head) + len(self.best_N) + 1

    def row(self) -> LabelledText:
        """Return the window as a sample, with token ids and token types: 0 up to the first [SEP],
        then 1."""
        tokens = self.passage.tokens_T[self.first : self.first + len(self.best_N)]
        row = np.concatenate((self.head, tokens, self.head[-1:])).astype(np.int64)
        types = (np.arange(len(row)) >= self.text).astype(np.int64)
        return LabelledText((row,), (types,), self.span)


@dataclass(frozen=True)
class WindowMaker:
    """Splitter of questions into windows. A sequence has at most ``seq_length`` tokens, of which at
    most ``max_query_length`` belong to the question. Windows start ``doc_stride`` tokens apart."""

    tokenizer: Tokenizer
    seq_length: int
    doc_stride: int
    max_query_length: int

    def windows(self, questions: Sequence[Question]) -> list[list[Window]]:
        """Return the windows of each question. Questions about the same text share its tokens.
        Raises ConfigError if the windows would skip part of a text, and ValueError if a text or an
        answer has no tokens. The message contains the file and the question."""
        passages: dict[str, Passage] = {}
        windows_of_text = []
        for question in questions:
            if question.context not in passages:
                passages[question.context] = Passage.of(question.context, self.tokenizer)
            try:
                windows_of_text.append(self._windows(question, passages[question.context]))
            except ValueError as error:
                where = f"{question.file}: question {question.identity}"
                raise type(error)(f"{where}: {error}") from None
        return windows_of_text

    def _windows(self, question: Question, passage: Passage) -> list[Window]:
        tokenizer = self.tokenizer
        query = tokenizer.tokenize_sentences([question.question])[0][: self.max_query_length]
        head = np.concatenate(([tokenizer.cls], query, [tokenizer.sep])).astype(np.int32)
        count = len(passage.tokens_T)
        if not count:
            raise ValueError("its context has no tokens; remove it, or correct the text")
        answer = None
        if question.answers:  # Training uses only the first answer.
            text, start = question.answers[0].text, question.answers[0].start
            answer = passage.tokens_of(start, start + len(text))
            if answer is None:
                raise ValueError(f"its answer {text!r} has no tokens; remove the question")
        starts, lengths = self._cut(count, self.seq_length - len(head) - 1)
        pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
        windows = []
        for place, (first, length) in enumerate(pairs):
            span = (CLS_PLACE, CLS_PLACE)
            if answer is not None and first <= answer[0] and answer[1] < first + length:
                span = (answer[0] - first + len(head), answer[1] - first + len(head))
            best_N = _most_context(starts, lengths, first, length) == place
            windows.append(Window(passage, head, first, best_N, span))
        return windows

    def _cut(self, count: int, room: int) -> tuple[Places, Places]:
        """Return the start and length of each window of a text of ``count`` tokens. ``room`` is the
        number of text tokens that fit into a sequence."""
        if room < 1 or (count > room and self.doc_stride > room):
            raise ConfigError(
                f"--seq-length {self.seq_length} leaves {max(room, 0)} tokens of text next to the "
                f"question, which windows {self.doc_stride} tokens apart (--doc-stride) do not "
                f"cover; use a smaller --doc-stride or --max-query-length ({self.max_query_length})"
                ", or a model of longer sequences"
            )
        more = max(0, -(-(count - room) // self.doc_stride))
        starts = np.arange(1 + more) * self.doc_stride
        return starts, np.minimum(count - starts, room)


def _most_context(starts: np.ndarray, lengths: np.ndarray, first: int, length: int) -> np.ndarray:
    """Return, for each token of [first, first + length), the index [N] of the window that shows the
    most context around it. A window's score is the number of tokens on the token's shorter side
    plus 0.01 times the window's length. The first window wins a tie."""
    near = np.flatnonzero((starts < first + length) & (starts + lengths > first))
    starts, lengths = starts[near], lengths[near]
    tokens_1N = np.arange(first, first + length)[None]
    left_WN = tokens_1N - starts[:, None]
    right_WN = (starts + lengths - 1)[:, None] - tokens_1N
    shown_WN = np.minimum(left_WN, right_WN)
    score_WN = shown_WN + 0.01 * lengths[:, None]
    return near[np.where(shown_WN >= 0, score_WN, -np.inf).argmax(0)]


class Candidate(NamedTuple):
    """Candidate answer with its logits. An empty text means "no answer"."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class PredictedAnswer:
    """Predicted answer to a question, with an empty text for "no answer". ``n_best`` contains the
    best candidates, best first, including "no answer" if that is allowed. ``null_odds`` is the
    score of "no answer" minus the score of the best answer."""

    text: str
    n_best: tuple[Candidate, ...]
    null_odds: float

    def n_best_entries(self) -> list[dict[str, str | float]]:
        """Return the entries of a question in the n-best file. Probabilities are the softmax over
        ``n_best``."""
        scores = np.array([candidate.score for candidate in self.n_best])
        odds = np.exp(scores - scores.max())
        return [
            {"text": text, "probability": float(share), "start_logit": start, "end_logit": end}
            for (text, start, end), share in zip(self.n_best, odds / odds.sum(), strict=True)
        ]


@dataclass(frozen=True)
class AnswerSearch:
    """Selection of the best answer to a question. The fields have the values of the flags of the
    same names; ``with_negative`` allows "no answer"."""

    n_best_size: int = 20
    max_answer_length: int = 30
    with_negative: bool = False
    null_score_diff_threshold: float = 0.0

    def predict(self, windows: Sequence[Window], logits: Iterable[Logits]) -> PredictedAnswer:
        """Predict the answer to one question from the start and end logits [S, 2] of each of its
        windows. Logits after the window's tokens belong to padding and are ignored."""
        logits = list(logits)
        spans = [
            (start + end, number, first, last, start, end)
            for number, (window, logits_S2) in enumerate(zip(windows, logits, strict=True))
            for first, last, start, end in self._spans(window, logits_S2[: window.length])
        ]
        # The score of "no answer" is its lowest score over all windows.
        nulls = [Candidate("", *each[CLS_PLACE].astype(np.float64).tolist()) for each in logits]
        null = min(nulls, key=lambda candidate: candidate.score)
        if self.with_negative:
            spans.append((null.score, -1, 0, 0, null.start_logit, null.end_logit))
        spans.sort(key=lambda span: span[0], reverse=True)
        best: dict[str, Candidate] = {}
        for _, number, first, last, start, end in spans:
            if len(best) == self.n_best_size:
                break
            text = "" if number < 0 else windows[number].passage.answer(first, last)
            best.setdefault(text, Candidate(text, start, end))
        if self.with_negative or not best:
            best.setdefault("", null)
        answer = next((candidate for candidate in best.values() if candidate.text), None)
        odds = null.score - (answer.score if answer else 0.0)
        silent = self.with_negative and odds > self.null_score_diff_threshold
        text = answer.text if answer and not silent else ""
        return PredictedAnswer(text, tuple(best.values()), odds)

    def _spans(self, window: Window, logits_S2: Logits) -> Iterator[tuple[int, int, float, float]]:
        """Yield the spans that combine the best starts and ends of a window, as (first token, last
        token, start logit, end logit). Tokens are numbered within the passage."""
        logits_S2 = logits_S2.astype(np.float64)
        starts, ends = (
            np.argsort(-logits_S2[:, side], kind="stable")[: self.n_best_size] for side in (0, 1)
        )
        stop = window.text + len(window.best_N)
        starts = starts[(starts >= window.text) & (starts < stop)]
        starts = starts[window.best_N[starts - window.text]]
        ends = ends[(ends >= window.text) & (ends < stop)]
        lengths = ends[None] - starts[:, None] + 1
        shift = window.first - window.text
        for i, j in np.argwhere((lengths >= 1) & (lengths <= self.max_answer_length)):
            start, end = int(starts[i]), int(ends[j])
            scores = float(logits_S2[start, 0]), float(logits_S2[end, 1])
            yield start + shift, end + shift, *scores


def _logits(seq_length: int, state: LayerState, batch: Any) -> Mapping[str, Tensor]:
    """Return the start and end logits [B, S x 2], padded with zeros to S = --seq-length, so that
    all batches have the same shape."""
    logits_BS2 = state.hidden
    missing = seq_length - logits_BS2.shape[1]
    return {"logits": F.pad(logits_BS2, (0, 0, 0, missing)).flatten(1)}


@dataclass(frozen=True)
class Squad(FineTuning):
    """SQuAD 1.1, or 2.0, in which some questions have no answer."""

    task: TaskConfig

    name = "SQUAD"
    predictions_suffix = ".json"

    def settings(self) -> Settings:
        return {"head": Setting("span", f"task {self.name}")}

    def read(self, path: Path) -> list[Question]:
        return read_questions(path, self.task.version_2_with_negative)

    def training_samples(self, examples: Sequence[Question], run: Run) -> TrainingSamples:
        windows = [window for each in self._windows(examples, run) for window in each]
        return TrainingSamples(MadeSamples(windows, Window.row), collator(run))

    def held_out_samples(self, examples: Sequence[Question], run: Run) -> HeldOutSamples:
        windows, length = self._windows(examples, run), run.config.model.seq_length
        rows = [window for each in windows for window in each]
        samples = MadeSamples(rows, Window.row)

        def predictions(numbers: Numbers) -> list[Prediction]:
            logits_NS2 = numbers["logits"].reshape(len(rows), length, 2)
            return self._predictions(examples, windows, iter(logits_NS2))

        return HeldOutSamples(
            samples,
            [window.length for window in rows],
            partial(collate_labelled, pad=run.tokenizer.pad),
            Measure(("logits",), partial(_logits, length), ends="logits", per_sample=True),
            predictions,
            samples,
        )

    def scores(self, predictions: Sequence[Prediction]) -> Scores:
        golds = [each.label for each in predictions]
        predicted = [str(each.predicted) for each in predictions]
        if self.task.version_2_with_negative:
            odds = [each.details["null_odds"] for each in predictions]
            metrics = squad2_metrics(golds, predicted, odds)
        else:
            metrics = squad_metrics(golds, predicted)
        return Scores({"f1": metrics["f1"], **metrics}, f"{json.dumps(metrics)},")

    def write_predictions(self, path: Path, sets: Mapping[str, Sequence[Prediction]]) -> None:
        """Write the files that the official scripts read: a predicted text for each question id,
        the n-best answers in a file prefixed with ``nbest_``, and for version 2.0 the scores of "no
        answer" in a file prefixed with ``null_odds_``. With several sets, each one has separate
        files."""
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, predictions in sets.items():
            file = path.with_stem(f"{path.stem}_{name}") if len(sets) > 1 else path
            contents = {"": {each.identity: each.predicted for each in predictions}}
            contents["nbest_"] = {each.identity: each.details["n_best"] for each in predictions}
            if self.task.version_2_with_negative:
                odds = {each.identity: each.details["null_odds"] for each in predictions}
                contents["null_odds_"] = odds
            for prefix, content in contents.items():
                text = json.dumps(content, indent=4, ensure_ascii=False)
                write_whole(file.with_name(f"{prefix}{file.name}"), f"{text}\n".encode())

    def _windows(self, questions: Sequence[Question], run: Run) -> list[list[Window]]:
        task, length = self.task, run.config.model.seq_length
        maker = WindowMaker(run.tokenizer, length, task.doc_stride, task.max_query_length)
        return maker.windows(questions)

    def _predictions(
        self,
        questions: Sequence[Question],
        windows: Sequence[Sequence[Window]],
        logits: Iterator[npt.NDArray[np.float64]],
    ) -> list[Prediction]:
        task = self.task
        search = AnswerSearch(
            task.n_best_size,
            task.max_answer_length,
            task.version_2_with_negative,
            task.null_score_diff_threshold,
        )
        predictions = []
        for question, rows in zip(questions, windows, strict=True):
            said = search.predict(rows, islice(logits, len(rows)))
            golds = [answer.text for answer in question.answers]
            details = {"n_best": said.n_best_entries(), "null_odds": said.null_odds}
            predictions.append(Prediction(question.identity, said.text, golds, details=details))
        return predictions
