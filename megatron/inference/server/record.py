"""What is known of the request that is being answered, for its line in the log."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Record:
    """Tokens of a request."""

    prompt_tokens: int = 0
    new_tokens: int = 0


current_record: ContextVar[Record] = ContextVar("record")
"""Of the request that this task answers."""
