"""The text of tokens as they arrive.

A character is written once it has all its bytes, so that nothing that was written changes. What is
written in the end is the text of all tokens, however they were split; the work is linear in their
number.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from megatron.tokenizer import Tokenizer

_LONGEST_WINDOW, _KEPT = 64, 8


class TextStream:
    """The text after a prompt, piece by piece. An id outside the tokenizer's vocabulary, which a
    model with a larger one may give, has no text."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        joined = tokenizer.joins_bytes
        self._decoder: _Bytes | _Windows = (_Bytes if joined else _Windows)(tokenizer, prompt)
        self._begun = False

    def add(self, token: int) -> str:
        """The text that is certain with this token and was not before."""
        self._begun = True
        return self._decoder.add(token)

    def close(self) -> str:
        """The rest: bytes that are not a character become U+FFFD."""
        return self._decoder.close() if self._begun else ""

    @property
    def held(self) -> str:
        """Whole characters that are held back only because a later token could complete bytes with
        them that are not valid."""
        return self._decoder.held


def continuation_text(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the new tokens after the prompt; decoded alone they would lose the space that some
    tokenizers omit at the start of a text. It begins with the character that they complete, if the
    prompt ends inside of one."""
    if not new:
        return ""
    start = len(_decided(tokenizer, prompt))
    return tokenizer.detokenize(_known(tokenizer, [*prompt, *new]))[start:]


def token_texts(
    tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()
) -> list[str]:
    """The text that each token adds after a prompt; joined, their text. A character of several
    tokens belongs to that which completes it."""
    stream = TextStream(tokenizer, prompt)
    texts = [stream.add(token) for token in tokens]
    if texts:
        texts[-1] += stream.close()
    return texts


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token adds to a text, in UTF-8, possibly a part of a character."""
    return tokenizer.token_bytes[token] if token < tokenizer.vocab_size else b""


class _Bytes:
    """For tokenizers that join the bytes of their tokens."""

    held = ""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # The start of an incomplete character at the prompt's end is in its last bytes.
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
    """For all others. A token's text is what it adds to that of the tokens before it, of which a
    few suffice: those from the last one that has a visible text. A run of byte pieces is decoded
    once it has ended, since some tokenizers give U+FFFD for all of them if one does not fit."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        known = _known(tokenizer, prompt)
        visible = (n for n in range(len(known) - 1, 0, -1) if self._is_visible(known[n]))
        self._window = known[next(visible, 0) :]
        self._text = _decided(tokenizer, self._window)
        """Text of the window that is written already."""
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
    """Consecutive byte pieces; ``text`` are their characters, as long as all of them are whole or
    may become so."""

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
    """The text of a prompt without the incomplete character at its end."""
    known = _known(tokenizer, prompt)
    if tokenizer.joins_bytes:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return utf8.decode(b"".join(bytes_of_token(tokenizer, i) for i in known))
    run = _byte_run(tokenizer, known)
    if not _Run(tokenizer.token_bytes[i] for i in run).whole:
        known = known[: len(known) - len(run)]
    return tokenizer.detokenize(known)


def _byte_run(tokenizer: Tokenizer, tokens: Sequence[int]) -> Sequence[int]:
    """The byte pieces at the end."""
    start = len(tokens)
    while start and tokens[start - 1] in tokenizer.byte_pieces:
        start -= 1
    return tokens[start:]


def _known(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token < tokenizer.vocab_size]
