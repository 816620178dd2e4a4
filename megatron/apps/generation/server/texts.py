"""The text of tokens for a client, and the places of the tokens in it."""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from megatron.apps.generation.decoding.text_stream import (
    TextBeforeStop,
    TextStream,
    bytes_of_token,
    token_texts,
)
from megatron.apps.generation.request import Completion, Finish, TokenScore, Update
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class PlacedToken:
    """A token, and the character at which it begins, or of which it is a part. ``name`` is its text
    there, if different: the first word of a text has no space, and a token that the tokenizer puts
    around a text has none."""

    token: int
    offset: int
    score: TokenScore | None
    name: str | None = None


@dataclass(frozen=True)
class TextPiece:
    """A piece of a text that later tokens do not change."""

    text: str
    tokens: tuple[PlacedToken, ...]
    finish: Finish | None


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token; of a part of a character its bytes, as OpenAI writes them, so that two
    tokens have two names."""
    text = bytes_of_token(tokenizer, token)
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def name_there(tokenizer: Tokenizer, placed: PlacedToken) -> str:
    """The name of a token in the text in which it is."""
    return token_name(tokenizer, placed.token) if placed.name is None else placed.name


class TokenPlaces:
    """Places tokens in a text, from what each adds to it (:class:`TextStream`)."""

    def __init__(self, tokenizer: Tokenizer, offset: int, prompt: Sequence[int] = ()) -> None:
        """``offset``: where the text of the tokens after ``prompt`` begins."""
        self._tokenizer, self._next = tokenizer, offset
        tail = b"".join(bytes_of_token(tokenizer, i) for i in prompt[-4:])
        self._begun = _unfinished(tail) if tokenizer.joins_bytes else b""
        self._run: list[tuple[int, TokenScore | None]] = []

    def add(self, token: int, score: TokenScore | None, text: str) -> list[PlacedToken]:
        """The tokens whose places are known once a token has added a text. Those of a run of byte
        pieces are known at its end."""
        start, self._next = self._next, self._next + len(text)
        token_bytes = bytes_of_token(self._tokenizer, token)
        if self._tokenizer.joins_bytes:
            # Bytes that do not continue a character come after the U+FFFD that it becomes.
            fits = _continues(self._begun, token_bytes)
            self._begun = _unfinished(self._begun + token_bytes if fits else token_bytes)
            return [PlacedToken(token, start + (not fits), score)]
        if token in self._tokenizer.byte_pieces:
            self._run.append((token, score))
            return []
        name = token_bytes.decode(errors="replace")
        before = len(text) - len(name) if text.endswith(name) else 0
        ended = self._placed_run(start, before)
        other = text if not ended and text != name and name.endswith(text) else None
        return [*ended, PlacedToken(token, start + before, score, other)]

    def close(self, text: str) -> list[PlacedToken]:
        """The tokens that remain, given the rest of the text."""
        return self._placed_run(self._next, len(text))

    def _placed_run(self, start: int, length: int) -> list[PlacedToken]:
        run, self._run = self._run, []
        pieces = [bytes_of_token(self._tokenizer, token) for token, _ in run]
        places = _places(pieces, length)
        return [PlacedToken(t, start + at, s) for (t, s), at in zip(run, places, strict=True)]


def _places(pieces: Sequence[bytes], length: int) -> list[int]:
    """The character, in a text of that length, in which each of some bytes is, or begins."""
    places, count, begun = list[int](), 0, b""
    for piece in pieces:
        fits = _continues(begun, piece)
        count += not fits
        places.append(count)
        begun = begun + piece if fits else piece
        if begun and not _unfinished(begun):
            count, begun = count + 1, b""
    if count + bool(begun) != length == len(pieces):
        return list(range(length))  # the tokenizer writes U+FFFD for each byte of such a run
    return [min(place, max(0, length - 1)) for place in places]


def _unfinished(text: bytes) -> bytes:
    """The bytes at the end that may begin a character."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    utf8.decode(text)
    return utf8.getstate()[0]


def _continues(begun: bytes, more: bytes) -> bool:
    """True if bytes continue a character that has begun."""
    for count in range(1, min(4, len(more)) + 1 if begun else 0):
        try:
            (begun + more[:count]).decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                continue
            return False
        return True
    return True


def placed_prompt(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    scores: Sequence[TokenScore | None],
    shown: str,
) -> list[PlacedToken]:
    """Return the tokens of a prompt in its text ``shown``, which lacks the tokens that the
    tokenizer adds around every text."""
    special = tokenizer.special_tokens
    around = next((n for n, token in enumerate(prompt) if token not in special), len(prompt))
    cuts = ((cut, "".join(token_texts(tokenizer, prompt[cut:]))) for cut in range(around + 1))
    fitting = ((cut, lead) for cut, text in cuts if (lead := _lead(text, shown)) is not None)
    cut, lead = next(fitting, (0, 0))
    placed = [PlacedToken(prompt[n], 0, scores[n], "") for n in range(cut)]
    places, stream = TokenPlaces(tokenizer, 0), TextStream(tokenizer)
    for token, score in zip(prompt[cut:], scores[cut:], strict=True):
        placed += places.add(token, score, stream.add(token))
    placed += places.close(stream.close())
    end, moved = len(shown), (_moved(tokenizer, p, lead) if lead else p for p in placed)
    # The tokenizer puts the last ones after every text.
    return [p if p.offset < end or not shown else replace(p, offset=end, name="") for p in moved]


def _lead(text: str, shown: str) -> int | None:
    """Return how many more leading spaces the decoded prompt has than the prompt, since tokenizers
    add or drop some; None if the two differ otherwise."""
    bare, theirs = text.lstrip(" "), shown.lstrip(" ")
    if text.startswith(shown):
        return 0
    return len(text) - len(bare) - len(shown) + len(theirs) if bare.startswith(theirs) else None


def _moved(tokenizer: Tokenizer, placed: PlacedToken, lead: int) -> PlacedToken:
    """A token whose place was in a text with ``lead`` more spaces at its beginning."""
    absent, there = max(0, lead - placed.offset), name_there(tokenizer, placed)
    whole = not absent or there.startswith("bytes:")  # or a part of a character
    name = placed.name if whole else there[absent:]
    return replace(placed, offset=max(0, placed.offset - lead), name=name)


class ChoiceText:
    """The text of new tokens as it becomes final: whole characters that cannot begin a stop text.
    Neither a stop text nor a token that ends it (``ends``) is part of it."""

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
        self._ends, self._places = ends, TokenPlaces(tokenizer, offset, prompt)
        self._sent = offset  # where the text that the client has ends
        self._tokens: deque[PlacedToken] = deque()

    def add(self, gain: Update | Completion) -> TextPiece:
        """The text that becomes certain with new tokens."""
        text = ""
        for token, score in zip_longest(gain.tokens, gain.scores):
            if self._before.stopped:
                break
            if token not in self._ends:
                added = self._stream.add(token)
                self._tokens += self._places.add(token, score, added)
                text += self._before.add(added)
        if gain.finish is not None and not self._before.stopped:
            rest = self._stream.close()
            self._tokens += self._places.close(rest)
            text += self._before.add(rest)
            if not self._before.stopped:
                text += self._before.close()
                return TextPiece(text, self._placed(math.inf), gain.finish)
        self._sent += len(text)
        return TextPiece(text, self._placed(self._sent), gain.finish)

    def _placed(self, end: float) -> tuple[PlacedToken, ...]:
        """The next tokens that begin before a character."""
        placed = []
        while self._tokens and self._tokens[0].offset < end:
            placed.append(self._tokens.popleft())
        return tuple(placed)
