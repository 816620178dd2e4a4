"""Convert tokens to text for a client, with the character offsets of the tokens."""

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
    """Token with its character offset in a text. All tokens of one character have the same
    offset. ``name`` is the token's text in this context if it differs from its usual text: the
    first word of a text has no leading space, and tokens that the tokenizer adds around every
    text are empty."""

    token: int
    offset: int
    score: TokenScore | None
    name: str | None = None


@dataclass(frozen=True)
class TextPiece:
    """Piece of a text that later tokens cannot change."""

    text: str
    tokens: tuple[PlacedToken, ...]
    finish: Finish | None


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a token. A token that is part of a character is written as bytes, as
    OpenAI does, so that two tokens never have the same name."""
    text = bytes_of_token(tokenizer, token)
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def name_there(tokenizer: Tokenizer, placed: PlacedToken) -> str:
    """Return the name of a token in the context of its text."""
    return token_name(tokenizer, placed.token) if placed.name is None else placed.name


class TokenPlaces:
    """Character offsets of tokens, computed from the text that each token adds
    (:class:`TextStream`)."""

    def __init__(self, tokenizer: Tokenizer, offset: int, prompt: Sequence[int] = ()) -> None:
        """``offset`` is the character offset of the text that follows ``prompt``."""
        self._tokenizer, self._next = tokenizer, offset
        tail = b"".join(bytes_of_token(tokenizer, i) for i in prompt[-4:])
        self._begun = _unfinished(tail) if tokenizer.joins_bytes else b""
        self._run: list[tuple[int, TokenScore | None]] = []

    def add(self, token: int, score: TokenScore | None, text: str) -> list[PlacedToken]:
        """Add a token and the text that it adds. Return the tokens whose offsets are now known. The
        offsets in a run of byte tokens are known only once the run has ended."""
        start, self._next = self._next, self._next + len(text)
        token_bytes = bytes_of_token(self._tokenizer, token)
        if self._tokenizer.joins_bytes:
            # Bytes that do not continue a character start after the U+FFFD for its beginning.
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
        """Return the remaining tokens, given the final text of the stream."""
        return self._placed_run(self._next, len(text))

    def _placed_run(self, start: int, length: int) -> list[PlacedToken]:
        run, self._run = self._run, []
        pieces = [bytes_of_token(self._tokenizer, token) for token, _ in run]
        places = _places(pieces, length)
        return [PlacedToken(t, start + at, s) for (t, s), at in zip(run, places, strict=True)]


def _places(pieces: Sequence[bytes], length: int) -> list[int]:
    """Return, for each byte token, the index of the character that it begins or continues.
    ``length`` is the number of characters of the decoded text."""
    places, count, begun = list[int](), 0, b""
    for piece in pieces:
        fits = _continues(begun, piece)
        count += not fits
        places.append(count)
        begun = begun + piece if fits else piece
        if begun and not _unfinished(begun):
            count, begun = count + 1, b""
    if count + bool(begun) != length == len(pieces):
        return list(range(length))  # the tokenizer decoded each byte of an invalid run as U+FFFD
    return [min(place, max(0, length - 1)) for place in places]


def _unfinished(text: bytes) -> bytes:
    """Return the bytes of an incomplete character at the end."""
    utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
    utf8.decode(text)
    return utf8.getstate()[0]


def _continues(begun: bytes, more: bytes) -> bool:
    """Return whether ``more`` continues the incomplete character ``begun``."""
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
    """Return the tokens of a prompt with their offsets in its text ``shown``. The tokenizer's
    special tokens around the prompt are not part of ``shown`` and have an empty name."""
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
    # Special tokens that the tokenizer adds after a text come last.
    return [p if p.offset < end or not shown else replace(p, offset=end, name="") for p in moved]


def _lead(text: str, shown: str) -> int | None:
    """Return how many more leading spaces the decoded prompt ``text`` has than ``shown``, because
    some tokenizers add or drop spaces. Return None if ``text`` does not begin with ``shown`` even
    without leading spaces."""
    bare, theirs = text.lstrip(" "), shown.lstrip(" ")
    if text.startswith(shown):
        return 0
    return len(text) - len(bare) - len(shown) + len(theirs) if bare.startswith(theirs) else None


def _moved(tokenizer: Tokenizer, placed: PlacedToken, lead: int) -> PlacedToken:
    """Shift the offset of a token to a text with ``lead`` fewer leading spaces."""
    absent, there = max(0, lead - placed.offset), name_there(tokenizer, placed)
    # a token within a character is also kept whole
    whole = not absent or there.startswith("bytes:")
    name = placed.name if whole else there[absent:]
    return replace(placed, offset=max(0, placed.offset - lead), name=name)


class ChoiceText:
    """Text of new tokens, returned as soon as it is final: complete characters that cannot begin a
    stop text. Stop texts and the tokens ``ends`` are not part of it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stops: Sequence[str],
        ends: frozenset[int],
        offset: int = 0,
    ) -> None:
        """``offset`` is the text's character offset, to which token offsets are added."""
        self._stream, self._before = TextStream(tokenizer, prompt), TextBeforeStop(stops)
        self._ends, self._places = ends, TokenPlaces(tokenizer, offset, prompt)
        self._sent = offset  # end offset of the text that has been returned
        self._tokens: deque[PlacedToken] = deque()

    def add(self, gain: Update | Completion) -> TextPiece:
        """Add new tokens, and return the text that is now final."""
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
        """Remove and return the next tokens that begin before the character ``end``."""
        placed = []
        while self._tokens and self._tokens[0].offset < end:
            placed.append(self._tokens.popleft())
        return tuple(placed)
