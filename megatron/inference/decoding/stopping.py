"""When a text ends, and the text before what ended it."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.inference.decoding.text_stream import TextStream
from megatron.inference.request import Finish, StopRules
from megatron.tokenizer import Tokenizer


class StopWatch:
    """Sees the new tokens of one sequence, and says when they end it.

    A stop text ends it with the token that completes it, whatever the tokens it is made of; the
    same token may bring text after it.
    """

    def __init__(
        self, stopping: StopRules, tokenizer: Tokenizer | None = None, prompt: Sequence[int] = ()
    ) -> None:
        """``tokenizer`` is needed for stop texts only. Raises ValueError if they are given
        without."""
        self._stopping = stopping
        self._count = 0
        self._texts = _StopTexts(stopping.texts)
        self._stream: TextStream | None = None
        if stopping.texts:
            if tokenizer is None:
                raise ValueError("stop texts need a tokenizer")
            self._stream = TextStream(tokenizer, prompt)
        self._tail = self._texts.undecided(stopping.before)

    def add(self, token: int) -> Finish | None:
        """Why the sequence ends with this token; None if it continues."""
        self._count += 1
        if token in self._stopping.tokens:
            return "stop"
        if self._stream is not None and self._found(self._stream, token):
            return "stop"
        return "length" if self._count >= self._stopping.max_new_tokens else None

    def _found(self, stream: TextStream, token: int) -> bool:
        # What was seen before cannot contain a whole stop text, only the beginning of one.
        seen = self._tail + stream.add(token)
        self._tail = self._texts.undecided(seen)
        # A token adds no more than its last character to what is held.
        return self._texts.find(seen) is not None or self._texts.end(seen, stream.held)


class TextBeforeStop:
    """Passes on the text before the first stop text, as soon as it cannot belong to one.

    Attributes:
        stopped: whether a stop text was found; nothing more is passed on then.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = _StopTexts(texts)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What is certain not to be, or follow, a stop text."""
        if self.stopped:
            return ""
        self._held += text
        start = self._texts.find(self._held)
        if start is not None:
            self.stopped = True
            return self._passed(start, rest="")
        kept = self._texts.undecided(self._held)
        return self._passed(len(self._held) - len(kept), rest=kept)

    def close(self) -> str:
        """The rest, which only began as a stop text does."""
        return self._passed(len(self._held), rest="")

    def _passed(self, count: int, rest: str) -> str:
        text, self._held = self._held[:count], rest
        return text


class _StopTexts:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts
        self.longest = max(map(len, texts), default=0)

    def find(self, text: str) -> int | None:
        """Where the one begins that is complete first; of several, the longest."""
        found = [
            (start + len(stop), start) for stop in self._texts if (start := text.find(stop)) >= 0
        ]
        return min(found)[1] if found else None

    def end(self, text: str, held: str) -> bool:
        """Whether one ends at the end of ``held``, after ``text``."""
        seen = held[-self.longest :]
        if len(seen) < self.longest:
            seen = text + seen
        return bool(held) and seen.endswith(tuple(self._texts))

    def undecided(self, text: str) -> str:
        """The longest end of the text with which a stop text may begin."""
        for length in range(min(len(text), self.longest - 1), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._texts):
                return end
        return ""
