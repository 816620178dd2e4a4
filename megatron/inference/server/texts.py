"""Tokens as the text that a client gets."""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.inference.request import Finish, TokenScore
from megatron.tokenizer import Tokenizer


class Gain(Protocol):
    """New tokens of a text, their scores or none, and why it ended if it did."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def scores(self) -> tuple[TokenScore, ...]: ...

    @property
    def finish(self) -> Finish | None: ...


@dataclass(frozen=True)
class PlacedToken:
    """A token of a text, and the character at which what it stands for begins."""

    token: int
    offset: int
    score: TokenScore | None


@dataclass(frozen=True)
class Piece:
    """What a text has got: never again changed, whatever comes after it."""

    text: str
    tokens: tuple[PlacedToken, ...]
    finish: Finish | None


def token_texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """The text of each token alone; what is not a character is U+FFFD."""
    return [tokenizer.token_bytes[token].decode("utf-8", "replace") for token in tokens]


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them, so that two
    tokens have two names."""
    found = tokenizer.token_bytes[token]
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class ChoiceText:
    """The text of new tokens as it becomes certain: characters once they have all their bytes, what
    may be the beginning of a text that ends it (``stops``) once it is not. Neither that text nor a
    token that ends it (``ends``) is part of it."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], ends: frozenset[int], offset: int = 0
    ) -> None:
        """``offset``: where the text begins, for the places of its tokens."""
        self._bytes, self._stops, self._ends = tokenizer.token_bytes, stops, ends
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._sent, self._offset = "", 0, offset
        self._longest = max(map(len, stops), default=0)
        self._tokens: deque[PlacedToken] = deque()
        self._ended = False

    def add(self, gain: Gain) -> Piece:
        """What has become certain with new tokens."""
        if self._ended:
            return Piece("", (), gain.finish)
        for token, score in itertools.zip_longest(gain.tokens, gain.scores):
            if token not in self._ends:
                self._tokens.append(PlacedToken(token, self._offset + len(self._text), score))
                self._text += self._decoder.decode(self._bytes[token])
        if gain.finish is not None:
            self._text += self._decoder.decode(b"", final=True)
        end = self._certain(gain.finish is not None)
        text, self._sent = self._text[self._sent : end], end
        placed = []
        complete = gain.finish is not None and not self._ended
        while self._tokens and (complete or self._tokens[0].offset < self._offset + end):
            placed.append(self._tokens.popleft())
        return Piece(text, tuple(placed), gain.finish)

    def _certain(self, finished: bool) -> int:
        """How many characters are certain."""
        if not self._stops:
            return len(self._text)
        first = max(0, self._sent - self._longest + 1)
        found = [at for stop in self._stops if (at := self._text.find(stop, first)) >= 0]
        if found:
            self._ended = True
            return max(min(found), self._sent)
        if finished:
            return len(self._text)
        for start in range(max(self._sent, len(self._text) - self._longest + 1), len(self._text)):
            if any(stop.startswith(self._text[start:]) for stop in self._stops):
                return start
        return len(self._text)
