"""From the scores of start and end to answers: the best spans over a question's windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.tasks.fine_tuning.squad.windows import CLS_PLACE, Window

Logits = npt.NDArray[np.floating]


class Candidate(NamedTuple):
    """An answer with its scores; "" is "no answer"."""

    text: str
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class PredictedAnswer:
    """The answer to a question that a model predicts.

    Attributes:
        text: "" if it predicts that the question has none.
        n_best: the best answers, best first, with "no answer" among them where it is possible.
        null_odds: score of "no answer" minus that of the best answer.
    """

    text: str
    n_best: tuple[Candidate, ...]
    null_odds: float

    def n_best_entries(self) -> list[dict[str, str | float]]:
        """As in the file of n-best answers: with a probability among them."""
        scores = np.array([candidate.score for candidate in self.n_best])
        odds = np.exp(scores - scores.max())
        return [
            {"text": text, "probability": float(share), "start_logit": start, "end_logit": end}
            for (text, start, end), share in zip(self.n_best, odds / odds.sum(), strict=True)
        ]


@dataclass(frozen=True)
class AnswerSearch:
    """Chooses answers.

    Attributes:
        n_best_size: starts and ends of each window that are tried, and answers that are kept.
        max_answer_length: tokens of the longest answer.
        with_negative: whether a question may have no answer.
        null_score_diff_threshold: "no answer" is predicted if its score exceeds that of the best
            answer by more.
    """

    n_best_size: int = 20
    max_answer_length: int = 30
    with_negative: bool = False
    null_score_diff_threshold: float = 0.0

    def predict(self, windows: Sequence[Window], logits: Iterable[Logits]) -> PredictedAnswer:
        """The prediction for one question from the logits of its windows, [S, 2] (start, end) of at
        least the tokens of each; what follows them is padding, which is not looked at."""
        logits = list(logits)
        found = [
            (start + end, number, first, last, start, end)
            for number, (window, logits_S2) in enumerate(zip(windows, logits, strict=True))
            for first, last, start, end in self._spans(window, logits_S2[: window.length])
        ]
        null = self._null(logits)
        if self.with_negative:
            found.append((null.score, -1, 0, 0, null.start_logit, null.end_logit))
        found.sort(key=lambda candidate: candidate[0], reverse=True)
        best: dict[str, Candidate] = {}
        for _, number, first, last, start, end in found:
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
        """Spans of the best starts and ends of a window: tokens of the passage, and logits."""
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

    @staticmethod
    def _null(logits: Sequence[Logits]) -> Candidate:
        """ "No answer" in the window that denies it most."""
        scores = [logits_S2[CLS_PLACE].astype(np.float64) for logits_S2 in logits]
        start, end = min(scores, key=lambda pair: float(pair[0] + pair[1]))
        return Candidate("", float(start), float(end))
