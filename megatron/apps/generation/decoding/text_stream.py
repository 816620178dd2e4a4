"""Detokenize a stream of tokens, and find stop texts in it.

A character is emitted once all its bytes have arrived, so emitted text never changes. The total
emitted text is that of all tokens, however they were split into calls. The time is linear.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from functools import lru_cache

from megatron.apps.generation.request import Finish, StopRules
from megatron.tokenizer import Tokenizer

_LONGEST_WINDOW, _KEPT = 64, 8


class TextStream:
    """Incremental detokenizer for the text after a prompt. Ids beyond the tokenizer's vocabulary,
    which occur if the model's vocabulary is larger, produce no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        joined = tokenizer.joins_bytes
        self._decoder: _Bytes | _Windows = (_Bytes if joined else _Windows)(tokenizer, prompt)
        self._begun = False

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now final."""
        self._begun = True
        return self._decoder.add(token)

    def close(self) -> str:
        """Return the remaining text. Bytes of incomplete characters become U+FFFD."""
        return self._decoder.close() if self._begun else ""

    @property
    def held(self) -> str:
        """Complete characters that are held back only because later bytes may make them invalid."""
        return self._decoder.held


def continuation_text(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of the new tokens after a prompt, starting with any character that the prompt
    leaves incomplete. Some tokenizers would drop the leading space if the new tokens were decoded
    alone."""
    if not new:
        return ""
    start = len(_decided(tokenizer, prompt))
    return tokenizer.detokenize(_known(tokenizer, [*prompt, *new]))[start:]


def token_texts(
    tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()
) -> list[str]:
    """Return the text that each token adds after a prompt. The text of a character that spans
    several tokens belongs to the last of them."""
    stream = TextStream(tokenizer, prompt)
    texts = [stream.add(token) for token in tokens]
    if texts:
        texts[-1] += stream.close()
    return texts


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the UTF-8 bytes that a token adds to a text. They may end within a character."""
    return tokenizer.token_bytes[token] if token < tokenizer.vocab_size else b""


class _Bytes:
    """Decoder for tokenizers whose text is the concatenated bytes of the tokens."""

    held = ""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # If the prompt ends with an incomplete character, its first bytes are among the last four.
        tail = b""
        for token in reversed(prompt):
            if len(tail) >= 4:
                break
            tail = bytes_of_token(tokenizer, token) + tail
        self._utf8.decode(tail)

    def add(self, token: int) -> str:
        return self._utf8.decode(bytes_of_token(self._tokenizer, token))

    def close(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Windows:
    """Decoder for all other tokenizers. It detokenizes a window that starts at the last token with
    visible text; a new token's text is what it adds to the window's text. A run of byte tokens is
    decoded only once it has ended, because some tokenizers decode the whole run as U+FFFD if a
    single byte is invalid."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        known = _known(tokenizer, prompt)
        visible = (n for n in range(len(known) - 1, 0, -1) if self._is_visible(known[n]))
        self._window = known[next(visible, 0) :]
        # Text of the window that has already been emitted.
        self._text = _decided(tokenizer, self._window)
        self._run = _Run(tokenizer.token_bytes[i] for i in _byte_run(tokenizer, self._window))
        self._run_written = len(self._run.text)

    @property
    def held(self) -> str:
        return self._run.text[self._run_written :]

    def add(self, token: int) -> str:
        if token >= self._tokenizer.vocab_size:
            return ""
        self._window.append(token)
        if token in self._tokenizer.byte_pieces:
            self._run.add(self._tokenizer.token_bytes[token])
            return ""
        new = self._written()
        if self._is_visible(token):
            self._window = [token]
            self._text = self._tokenizer.detokenize(self._window)
        elif len(self._window) > _LONGEST_WINDOW:
            self._window = [self._window[0], *self._window[-_KEPT:]]
            self._text = self._tokenizer.detokenize(self._window)
        return new

    def close(self) -> str:
        return self._written()

    def _written(self) -> str:
        self._run, self._run_written = _Run(), 0
        text = self._tokenizer.detokenize(self._window)
        new, self._text = text[len(self._text) :], text
        return new

    def _is_visible(self, token: int) -> bool:
        tokenizer = self._tokenizer
        return token not in tokenizer.byte_pieces and bool(tokenizer.token_bytes[token].strip())


class _Run:
    """Run of consecutive byte tokens. ``text`` contains the characters decoded so far, or is empty
    if the bytes are not valid UTF-8."""

    def __init__(self, pieces: Iterable[bytes] = ()) -> None:
        self.text = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._broken = False
        for piece in pieces:
            self.add(piece)

    @property
    def whole(self) -> bool:
        return not self._broken and not self._utf8.getstate()[0]

    def add(self, piece: bytes) -> None:
        if self._broken:
            return
        try:
            self.text += self._utf8.decode(piece)
        except UnicodeDecodeError:
            self._broken, self.text = True, ""


def _decided(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    """Return the text of a prompt, without any incomplete character at its end."""
    known = _known(tokenizer, prompt)
    if tokenizer.joins_bytes:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return utf8.decode(b"".join(bytes_of_token(tokenizer, i) for i in known))
    run = _byte_run(tokenizer, known)
    if not _Run(tokenizer.token_bytes[i] for i in run).whole:
        known = known[: len(known) - len(run)]
    return tokenizer.detokenize(known)


def _byte_run(tokenizer: Tokenizer, tokens: Sequence[int]) -> Sequence[int]:
    """Return the run of byte tokens at the end, which may be empty."""
    start = len(tokens)
    while start and tokens[start - 1] in tokenizer.byte_pieces:
        start -= 1
    return tokens[start:]


def _known(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token < tokenizer.vocab_size]


class StopWatch:
    """Stop detector for one sequence, which is given each new token. A stop text ends the sequence
    at the token that completes it, even if that token adds text after the stop text."""

    def __init__(
        self, stopping: StopRules, tokenizer: Tokenizer | None = None, prompt: Sequence[int] = ()
    ) -> None:
        """Create a stop detector. Raises ValueError if there are stop texts but ``tokenizer`` is
        None."""
        self._stopping = stopping
        self._count = 0
        self._stream: TextStream | None = None
        if stopping.texts:
            if tokenizer is None:
                raise ValueError("stop texts need a tokenizer")
            self._stream = TextStream(tokenizer, prompt)
        self._written = [_StopText(text) for text in stopping.texts]
        _first_match(self._written, stopping.before)
        # Text that the stream still holds back, and the state of the search after that text.
        self._held, self._ahead = "", self._written

    def add(self, token: int) -> Finish | None:
        """Return the reason why the sequence ends with this token, or None if it continues."""
        self._count += 1
        if token in self._stopping.tokens:
            return "stop"
        if self._stream is not None and self._completes_stop(self._stream, token):
            return "stop"
        return "length" if self._count >= self._stopping.max_new_tokens else None

    def _completes_stop(self, stream: TextStream, token: int) -> bool:
        text, held = stream.add(token), stream.held
        if _first_match(self._written, text) is not None:
            return True
        if not held:
            self._held = ""
            return False
        if text or not self._held or not held.startswith(self._held):
            self._held, self._ahead = "", [copy(stop) for stop in self._written]
        new, self._held = held[len(self._held) :], held
        return _first_match(self._ahead, new) is not None


class TextBeforeStop:
    """Filter that passes on the text before the first stop text, as soon as it cannot be the
    beginning of one. Once a stop text has been found, ``stopped`` is set and all further text is
    dropped."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._stops = [_StopText(text) for text in texts]
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Add text, and return what is now certain to come before any stop text."""
        if self.stopped:
            return ""
        before = len(self._held)
        self._held += text
        match = _first_match(self._stops, text)
        if match is not None:
            self.stopped = True
            end, length = match
            return self._passed(before + end - length, rest="")
        begun = max((stop.matched for stop in self._stops), default=0)
        count = len(self._held) - begun
        return self._passed(count, rest=self._held[count:])

    def close(self) -> str:
        """Return the text that was held back as the possible beginning of a stop text."""
        return self._passed(len(self._held), rest="")

    def _passed(self, count: int, rest: str) -> str:
        text, self._held = self._held[:count], rest
        return text


class _StopText:
    """Incremental search for a stop text, in time linear in the lengths of both texts (Knuth,
    Morris and Pratt). The text so far ends with the first ``matched`` characters of the stop
    text."""

    def __init__(self, text: str) -> None:
        self.text, self.matched, self._borders = text, 0, _borders(text)

    def end_in(self, piece: str) -> int:
        """Search the next piece of text. Return the index within the piece just after the first
        match, or 0 if no match ends in it."""
        text, rest = self.text, piece
        if not self.matched and text[0] not in piece:
            return 0
        if len(piece) >= len(text):  # str.find is faster than the loop below
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


def _first_match(stops: Sequence[_StopText], piece: str) -> tuple[int, int] | None:
    """Return the first match that ends in this piece, as (end index, length of the stop text), or
    None. If several stop texts end at the same index, the longest wins. After a match the search
    cannot be continued."""
    ends = [(end, -len(stop.text)) for stop in stops if (end := stop.end_in(piece))]
    if not ends:
        return None
    end, length = min(ends)
    return end, -length


@lru_cache(maxsize=256)
def _borders(text: str) -> array[int]:
    """Return the length of the longest border (proper prefix and suffix) of each prefix."""
    borders = array("q", [0])
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length - 1]
        length += text[length] == character
        borders.append(length)
    return borders
