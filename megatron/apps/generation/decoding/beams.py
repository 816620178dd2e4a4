"""Beam search: choose which beams to extend after each step, and rank the results.

Shapes: W running beams (one before the first step), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron.apps.generation.decoding.sampling import token_score
from megatron.apps.generation.decoding.text_stream import continuation_text
from megatron.apps.generation.request import BeamResult, Beams, StopRules, TokenScore
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Beam:
    """A partial sequence, stored as its last token and a link to the beam it extends. ``total`` is
    the float32 sum of the log-probabilities of its tokens."""

    total: np.float32
    before: _Beam | None = None
    token: int = -1
    length: int = 0
    score: TokenScore | None = None

    def tokens(self, last: int | None = None) -> tuple[int, ...]:
        """Return the tokens of this beam, or only its final ``last`` tokens if given."""
        return tuple(beam.token for beam in self._path(last))

    def scores(self) -> tuple[TokenScore, ...]:
        return tuple(beam.score for beam in self._path() if beam.score is not None)

    def _path(self, last: int | None = None) -> list[_Beam]:
        path: list[_Beam] = []
        beam = self
        while beam.before is not None and (last is None or len(path) < last):
            path.append(beam)
            beam = beam.before
        return path[::-1]


class BeamSearch:
    """Beam search for one prompt, as in `transformers` with ``num_beams`` and ``length_penalty``.

    Each step considers the 2 x width best continuations of all beams, or (1 + stops) x width with
    several stop tokens. A continuation that ends becomes a result if it ranks among the first
    ``width``, and is dropped otherwise. The best ``width`` unfinished continuations become the
    running beams. Results are ranked by their sum of log-probabilities / length ^
    ``length_penalty``, including the last token. The search is ``done`` once there are ``width``
    results and the best running beam, at its current length, does not score higher than the worst
    of the results. (Megatron compares the best continuation even if it has just ended, so it may
    take more steps.)
    """

    def __init__(
        self,
        beams: Beams,
        stopping: StopRules,
        tokenizer: Tokenizer | None = None,
        prompt: Sequence[int] = (),
        logprobs: int | None = None,
    ) -> None:
        """``tokenizer`` and ``prompt`` are only needed for stop texts. Raises ValueError if
        ``max_new_tokens`` is less than 1, or if there are stop texts but no tokenizer."""
        if stopping.max_new_tokens < 1:
            raise ValueError("a beam search needs max_new_tokens of 1 or more")
        if stopping.texts and tokenizer is None:
            raise ValueError("stop texts need a tokenizer")
        self.done = False
        self._beams, self._stopping, self._logprobs = beams, stopping, logprobs
        self._tokenizer, self._prompt = tokenizer, prompt
        self._running = [_Beam(np.float32(0))]
        self._finished: list[tuple[np.float32, _Beam]] = []
        # A character may take up to four tokens.
        self._visible = 4 * max(map(len, stopping.texts), default=0) + 8

    def step(self, logits_WV: Tensor) -> list[tuple[int, int]]:
        """Extend each beam by one token, given the raw logits after its last token (float32, on the
        CPU). Return (row in ``logits_WV``, token) for each beam that continues, best first, or an
        empty list once the search is done. Raises ValueError if a logit is NaN or infinite."""
        assert not self.done and len(logits_WV) == len(self._running)
        width = self._beams.width
        going: list[tuple[int, _Beam]] = []
        for rank, (row, beam) in enumerate(self._candidates(logits_WV)):
            if not self._ends(beam):
                going.append((row, self._with_score(beam, logits_WV[row])))
            elif rank < width:
                beam = self._with_score(beam, logits_WV[row])
                self._finished.append((self._score(beam), beam))
            if len(going) == width:
                break
        # The sort is stable: among equal scores the earlier result stays first.
        self._finished.sort(key=lambda pair: -pair[0])
        del self._finished[width:]
        self._running = [beam for _, beam in going]
        self.done = not going or not self._may_improve()
        return [] if self.done else [(row, beam.token) for row, beam in going]

    def results(self) -> tuple[BeamResult, ...]:
        """Return the finished beams as results, best first."""
        return tuple(
            BeamResult(beam.tokens(), float(score), beam.scores()) for score, beam in self._finished
        )

    def _candidates(self, logits_WV: Tensor) -> list[tuple[int, _Beam]]:
        """Return the best continuations, best first, each with the row of its parent beam."""
        totals_W = torch.tensor(np.array([beam.total for beam in self._running]))
        if not torch.isfinite(logits_WV.amax(-1)).all():
            raise ValueError("the model's logits contain NaN or infinity")
        totals_WV = logits_WV.log_softmax(-1) + totals_W[:, None]
        ways = max(2, 1 + len(self._stopping.tokens))
        count = min(ways * self._beams.width, totals_WV.numel())
        totals, places = totals_WV.flatten().topk(count)
        candidates = []
        for total, place in zip(totals.numpy(), places.tolist(), strict=True):
            row, token = divmod(place, logits_WV.shape[1])
            before = self._running[row]
            candidates.append((row, _Beam(total, before, token, before.length + 1)))
        return candidates

    def _with_score(self, beam: _Beam, logits_V: Tensor) -> _Beam:
        if self._logprobs is None:
            return beam
        return replace(beam, score=token_score(logits_V, beam.token, self._logprobs))

    def _ends(self, beam: _Beam) -> bool:
        stopping = self._stopping
        if beam.length >= stopping.max_new_tokens or beam.token in stopping.tokens:
            return True
        if not stopping.texts:
            return False
        assert self._tokenizer is not None
        # A stop text that was complete before the last token would already have ended this beam, so
        # only the text of the most recent tokens is searched.
        seen = beam.tokens(2 * self._visible)
        context = [*self._prompt[-self._visible :], *seen[: -self._visible]]
        text = continuation_text(self._tokenizer, context, seen[-self._visible :])
        return any(stop in text for stop in stopping.texts)

    def _score(self, beam: _Beam) -> np.float32:
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            norm = np.float64(beam.length) ** self._beams.length_penalty
            return beam.total / np.float32(norm)

    def _may_improve(self) -> bool:
        if len(self._finished) < self._beams.width:
            return True
        worst, _ = self._finished[-1]
        return bool(self._score(self._running[0]) > worst)
