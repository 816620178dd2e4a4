"""Tokens as the text that a client gets."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from megatron.inference.request import Finish, TokenScore
from megatron.inference.stopping import TextBeforeStop
from megatron.inference.text_stream import TextStream, bytes_of_token
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


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them, so that two
    tokens have two names."""
    found = bytes_of_token(tokenizer, token)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


class ChoiceText:
    """The text of new tokens as it becomes certain: characters once they have all their bytes, what
    may be the beginning of a stop text once it is not. Neither that text nor a token that ends it
    (``ends``) is part of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        ends: frozenset[int],
        offset: int = 0,
    ) -> None:
        """``offset``: where the text begins, for the places of its tokens."""
        self._stream, self._before = TextStream(tokenizer, prompt), TextBeforeStop(stops)
        self._ends = ends
        # Where the next token begins, and the text that the client has ends.
        self._next = self._sent = offset
        self._tokens: deque[PlacedToken] = deque()

    def add(self, gain: Gain) -> Piece:
        """What has become certain with new tokens."""
        text = ""
        for token, score in zip_longest(gain.tokens, gain.scores):
            if self._before.stopped:
                break
            if token not in self._ends:
                self._tokens.append(PlacedToken(token, self._next, score))
                text += self._passed(self._stream.add(token))
        if gain.finish is not None and not self._before.stopped:
            text += self._passed(self._stream.close())
            if not self._before.stopped:
                text += self._before.close()
                return Piece(text, self._placed(math.inf), gain.finish)
        self._sent += len(text)
        return Piece(text, self._placed(self._sent), gain.finish)

    def _passed(self, text: str) -> str:
        self._next += len(text)
        return self._before.add(text)

    def _placed(self, end: float) -> tuple[PlacedToken, ...]:
        """The tokens that begin before a character, and were not given yet."""
        found = []
        while self._tokens and self._tokens[0].offset < end:
            found.append(self._tokens.popleft())
        return tuple(found)
