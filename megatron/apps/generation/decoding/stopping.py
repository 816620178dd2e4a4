"""When a text ends, and the text before what ended it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from functools import lru_cache

from megatron.apps.generation.decoding.text_stream import TextStream
from megatron.apps.generation.request import Finish, StopRules
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
        self._stream: TextStream | None = None
        if stopping.texts:
            if tokenizer is None:
                raise ValueError("stop texts need a tokenizer")
            self._stream = TextStream(tokenizer, prompt)
        self._written = _StopFinder(stopping.texts)
        self._written.find(stopping.before)
        self._held, self._ahead = "", self._written
        """Text that the stream holds back, and the finder after it."""

    def add(self, token: int) -> Finish | None:
        """Why the sequence ends with this token; None if it continues."""
        self._count += 1
        if token in self._stopping.tokens:
            return "stop"
        if self._stream is not None and self._found(self._stream, token):
            return "stop"
        return "length" if self._count >= self._stopping.max_new_tokens else None

    def _found(self, stream: TextStream, token: int) -> bool:
        text, held = stream.add(token), stream.held
        if self._written.find(text) is not None:
            return True
        if not held:
            self._held = ""
            return False
        if text or not self._held or not held.startswith(self._held):
            self._held, self._ahead = "", self._written.copy()
        new, self._held = held[len(self._held) :], held
        return self._ahead.find(new) is not None


class TextBeforeStop:
    """Passes on the text before the first stop text, as soon as it cannot belong to one.

    Attributes:
        stopped: whether a stop text was found; nothing more is passed on then.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._finder = _StopFinder(texts)
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """What is certain not to be, or follow, a stop text."""
        if self.stopped:
            return ""
        before = len(self._held)
        self._held += text
        match = self._finder.find(text)
        if match is not None:
            self.stopped = True
            end, length = match
            return self._passed(before + end - length, rest="")
        kept = self._finder.begun
        count = len(self._held) - kept
        return self._passed(count, rest=self._held[count:])

    def close(self) -> str:
        """The rest, which only began as a stop text does."""
        return self._passed(len(self._held), rest="")

    def _passed(self, count: int, rest: str) -> str:
        text, self._held = self._held[:count], rest
        return text


class _StopFinder:
    """Searches a text, which comes in pieces, for the stop texts, in time linear in both."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._stops = [_StopText(text) for text in texts]

    def copy(self) -> _StopFinder:
        """Another one that has seen the same."""
        other = _StopFinder(())
        other._stops = [copy(stop) for stop in self._stops]
        return other

    @property
    def begun(self) -> int:
        """The length of the longest end of what was seen with which a stop text may begin."""
        return max((stop.matched for stop in self._stops), default=0)

    def find(self, piece: str) -> tuple[int, int] | None:
        """The end, in this piece, and the length of the stop text that is complete first; of
        several, the longest. Nothing can be searched after it."""
        ends = [(end, -len(stop.text)) for stop in self._stops if (end := stop.end_in(piece))]
        if not ends:
            return None
        end, length = min(ends)
        return end, -length


class _StopText:
    """The algorithm of Knuth, Morris and Pratt: ``matched`` characters of ``text`` are the end of
    what was seen."""

    def __init__(self, text: str) -> None:
        self.text, self.matched, self._borders = text, 0, _borders(text)

    def end_in(self, piece: str) -> int:
        """Where the text ends in what follows; 0 if it does not."""
        text, rest = self.text, piece
        if not self.matched and text[0] not in piece:
            return 0
        if len(piece) >= len(text):  # which str.find searches faster
            start = (text[: self.matched] + piece).find(text)
            if start >= 0:
                return start + len(text) - self.matched
            self.matched, rest = 0, piece[len(piece) - len(text) + 1 :]
        matched, borders = self.matched, self._borders
        for end, character in enumerate(rest, 1):
            while matched and text[matched] != character:
                matched = borders[matched - 1]
            matched += text[matched] == character
            if matched == len(text):
                return end
        self.matched = matched
        return 0


@lru_cache(maxsize=256)
def _borders(text: str) -> array[int]:
    """For each beginning of a text, the length of the longest shorter one that it ends with."""
    found = array("q", [0])
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = found[length - 1]
        length += text[length] == character
        found.append(length)
    return found
