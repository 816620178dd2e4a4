"""Runners without a cache, for the tests of whatever asks one: they remember the token ids of every
page, so that a page that was given away too early, or never filled, changes what they compute.

Shapes: R parts that want logits, T targets, V vocabulary, L length of a sequence.
"""

import time
from abc import ABC, abstractmethod

import numpy as np
import torch
from gpt_forward import forward
from torch import Tensor

from megatron.apps.generation.request import SequencePart, StepInput, StepOutput, TargetScores
from megatron.model.layer_list import LayerStack

NOTHING = -1
"""In memory: no token was ever here."""
_ROWS = 4093
_LONG = 2**32


class RememberingRunner(ABC):
    """Keeps what the pages contain as token ids, and checks that steps are well formed.

    Attributes:
        steps: all that ran.
        fail_at: the number of the step, from 0, that raises a RuntimeError.
        delay: seconds that a step takes at least.
    """

    def __init__(
        self,
        vocab_size: int,
        pages: int = 256,
        page_size: int = 16,
        max_positions: int = 1024,
        max_prompt: int | None = None,
        start_token: int | None = None,
        long_after: int | None = None,
        fail_at: int | None = None,
        delay: float = 0.0,
        adapters: tuple[str, ...] = (),
        slots: int | None = None,
        piece: int = 1,
    ) -> None:
        self.vocab_size, self.pages, self.page_size = vocab_size, pages, page_size
        self.max_positions, self.max_prompt = max_positions, max_prompt
        self.start_token, self.long_after = start_token, long_after
        self.fail_at, self.delay, self.adapters = fail_at, delay, adapters
        self.slots, self.piece = slots, piece
        self.steps: list[StepInput] = []
        self.closed = False
        self.drafts = 0
        self.encoded: dict[int, tuple[int, ...]] = {}
        self._memory = np.full((pages, page_size), NOTHING, np.int64)
        self._states: dict[int, tuple[int, ...]] = {}

    def run(self, step: StepInput) -> StepOutput:
        assert not self.closed
        self.steps.append(step)
        if self.fail_at is not None and len(self.steps) > self.fail_at:
            raise RuntimeError(f"step {self.fail_at} fails, as it was told to")
        if self.delay:
            time.sleep(self.delay)
        for source, target in step.copies:
            self._memory[target] = self._memory[source]
        for source, target in step.state_copies:
            self._states[target] = self._states[source]
        for number, tokens in step.encode:
            assert number not in self.encoded and tokens and self.max_prompt is not None
            assert len(tokens) <= self.max_prompt
            self.encoded[number] = tokens
        for number in step.forget:
            del self.encoded[number]
        self._write(step.parts)
        rows, scores = [], []
        for part in step.parts:
            sequence_L = self._sequence(part)
            self._recur(part, sequence_L)
            if part.targets:
                scores.append(self._scores(part, sequence_L))
            if part.logits:
                first = part.start + 1 if part.decoding else len(sequence_L)
                rows += [
                    self.logits_after(sequence_L[:length], self._encoding(part))
                    for length in range(first, len(sequence_L) + 1)
                ]
        none_0V = torch.empty(0, self.vocab_size)
        return StepOutput(torch.stack(rows) if rows else none_0V, tuple(scores))

    def close(self) -> None:
        self.closed = True

    @abstractmethod
    def logits_after(self, sequence_L: tuple[int, ...], encoded: tuple[int, ...] | None) -> Tensor:
        """Logits float32 [V] of the token that follows a sequence."""

    def _write(self, parts: tuple[SequencePart, ...]) -> None:
        written: set[int] = set()
        for part in parts:
            first, end = part.start, part.start + len(part.tokens)
            assert part.tokens and first >= 0 and end <= self.max_positions
            assert len(part.targets) <= len(part.tokens)
            assert len(part.pages) == -(-end // self.page_size), "a page too many or too few"
            assert len(set(part.pages)) == len(part.pages)
            for place, token in zip(range(first, end), part.tokens, strict=True):
                where = part.pages[place // self.page_size], place % self.page_size
                self._memory[where] = token + (_LONG if part.long else 0)
            own = set(part.pages[first // self.page_size :])
            assert not own & written, "two parts write a page"
            written |= own
        slots = [part.slot for part in parts if part.slot is not None]
        assert len(set(slots)) == len(slots), "two parts have a slot"
        for part in parts:
            before = set(part.pages[: part.start // self.page_size])
            assert not before & written, "a part reads a page that another one writes"

    def _sequence(self, part: SequencePart) -> tuple[int, ...]:
        end = part.start + len(part.tokens)
        assert part.long or self.long_after is None or end <= self.long_after
        stored_L = self._memory[list(part.pages)].reshape(-1)[:end]
        assert ((stored_L >= _LONG) == part.long).all(), "long and short ones are mixed"
        sequence_L = tuple((stored_L % _LONG if part.long else stored_L).tolist())
        assert NOTHING not in sequence_L, "a position is read that was never written"
        return sequence_L

    def _recur(self, part: SequencePart, sequence_L: tuple[int, ...]) -> None:
        """Keep what a state has read: it must be the whole sequence, cut at multiples of a
        piece."""
        assert (part.slot is None) == (self.slots is None)
        if part.slot is None:
            return
        assert part.slot < self.slots
        assert part.decoding or part.start % self.piece == 0, "cut within a piece"
        before = self._states[part.slot] if part.start else ()
        assert before == sequence_L[: part.start], "a state of another text"
        self._states[part.slot] = sequence_L

    def _encoding(self, part: SequencePart) -> tuple[int, ...] | None:
        assert (part.encoded is None) == (self.max_prompt is None)
        return None if part.encoded is None else self.encoded[part.encoded]

    def _scores(self, part: SequencePart, sequence_L: tuple[int, ...]) -> TargetScores:
        encoded = self._encoding(part)
        logits_TV = torch.stack(
            [
                self.logits_after(sequence_L[: part.start + place + 1], encoded)
                for place in range(len(part.targets))
            ]
        )
        log_probs_TV = logits_TV.double().log_softmax(-1).float()
        top = log_probs_TV.topk(part.top, -1)
        targets_T1 = torch.tensor(part.targets).unsqueeze(1)
        return TargetScores(log_probs_TV.gather(1, targets_T1)[:, 0], top.indices, top.values)


class FakeRunner(RememberingRunner):
    """Logits are a fixed function of the last tokens of a sequence and of an encoded prompt, of any
    vocabulary, without a model.

    Attributes:
        reach: how many of the last tokens count; None for all.
    """

    def __init__(self, vocab_size: int = 61, reach: int | None = 4, **settings) -> None:
        super().__init__(vocab_size, **settings)
        self.reach = reach
        random = torch.Generator().manual_seed(1)
        self._near, self._far = torch.randn(2, vocab_size + _ROWS, generator=random) * 2

    def logits_after(self, sequence_L: tuple[int, ...], encoded: tuple[int, ...] | None) -> Tensor:
        value = hash((sequence_L[-self.reach :] if self.reach else sequence_L, encoded or ()))
        near, far = value % _ROWS, value // _ROWS % _ROWS
        return self._near[near : near + self.vocab_size] + self._far[far : far + self.vocab_size]


class NaiveRunner(RememberingRunner):
    """A GPT on one process, which computes whole sequences again for each of their tokens: its
    logits are a function of the sequence to the last bit."""

    def __init__(self, model: LayerStack, vocab_size: int, **settings) -> None:
        super().__init__(vocab_size, **settings)
        self.model = model
        self._known: dict[tuple[int, ...], Tensor] = {}

    @torch.inference_mode()
    def logits_after(self, sequence_L: tuple[int, ...], encoded: tuple[int, ...] | None) -> Tensor:
        if sequence_L not in self._known:
            logits_1LV = forward(self.model, torch.tensor([sequence_L]))
            self._known[sequence_L] = logits_1LV[0, -1, : self.vocab_size].float()
        return self._known[sequence_L]
