"""Numbers of an engine for those who watch it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineSums:
    """What an engine has done since it was made.

    Attributes:
        prompt_tokens: of the requests that were started.
        prefix_hit_tokens: those of them that were found computed.
        new_tokens: that were generated; of a beam search those of its best text.
        finished: requests that ended, cancelled and failed ones too.
        failed: requests that ended by an error of their own.
        steps: passes through the model.
        step_seconds: how long they took, with the choice of tokens.
    """

    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    new_tokens: int = 0
    finished: int = 0
    failed: int = 0
    steps: int = 0
    step_seconds: float = 0.0


@dataclass(kw_only=True)
class EngineStats(EngineSums):
    """What an engine does now, and what it has done.

    Attributes:
        running: requests.
        waiting: requests.
        pages: of the model's memory.
        pages_used: by running requests.
        pages_cached: that no running request uses, with prompts that may come again.
        pages_free: the others.
    """

    running: int
    waiting: int
    pages: int
    pages_used: int
    pages_cached: int
    pages_free: int
