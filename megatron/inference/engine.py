"""Generates text for many requests at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.inference.request import Completion, GenerationRequest, Update
from megatron.inference.step import Runner
from megatron.tokenizer import Tokenizer


class QueueFull(RuntimeError):
    """As many requests wait as may; a later attempt may succeed."""


@dataclass(frozen=True)
class EngineLimits:
    """How much is done at once.

    Attributes:
        running: sequences; each beam is one.
        step_tokens: of one pass through the model: those that were generated, and as many of
            prompts as remain.
        waiting: requests that are not running yet; one more is refused.
    """

    running: int = 64
    step_tokens: int = 512
    waiting: int = 1024


@dataclass(frozen=True)
class EngineStats:
    """Numbers of an engine: what is so now, and sums since it was made.

    Attributes:
        running: requests.
        waiting: requests.
        pages_used: by running requests.
        pages_cached: that no running request uses, of prompts that may come again.
        pages_free: the others.
        prompt_tokens: of the requests that were started.
        prefix_hit_tokens: those of them that were found computed.
        new_tokens: that were generated.
        finished: requests that ended, cancelled and failed ones too.
        failed: requests that ended by an error of their own.
        steps: passes through the model.
        step_seconds: how long they took, with the choice of tokens.
    """

    running: int
    waiting: int
    pages_used: int
    pages_cached: int
    pages_free: int
    prompt_tokens: int
    prefix_hit_tokens: int
    new_tokens: int
    finished: int
    failed: int
    steps: int
    step_seconds: float


class GenerationEngine:
    """Continues the texts of many requests together, which come and go at every step. What one of
    them gets does not depend on the others. Not thread-safe; see
    :class:`~megatron.inference.engine_thread.EngineThread`."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, limits: EngineLimits | None = None
    ) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self.limits = limits or EngineLimits()

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError if a request can never run: its prompt is empty, has an unknown token
        or, with the new tokens, needs more positions or pages than there are. Thread-safe."""
        raise NotImplementedError

    def submit(self, request: GenerationRequest) -> int:
        """Puts a request in the queue; returns the number that its updates have. Raises ValueError
        if it can never run, QueueFull if too many wait."""
        raise NotImplementedError

    def cancel(self, number: int) -> None:
        """Ends a request, if it has not ended; the next step says so."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do."""
        raise NotImplementedError

    def step(self) -> list[Update]:
        """Gives every running request its next token, or computes more of its prompt."""
        raise NotImplementedError

    def complete(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """What each request gets, in their order. Any number may be given. Raises ValueError if one
        can never run, or what made one fail."""
        raise NotImplementedError

    @property
    def stats(self) -> EngineStats:
        """Numbers for those who watch."""
        raise NotImplementedError
