"""Continuations as text, whole or as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.tokenizer import Tokenizer

_UNDECODABLE = "\N{REPLACEMENT CHARACTER}"


def continuation_text(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Text of the new tokens as it reads after the prompt.

    Decoding them alone would lose the space that some tokenizers leave out at the start of a text.
    """
    return tokenizer.detokenize([*prompt, *new])[len(tokenizer.detokenize(prompt)) :]


class TextStream:
    """Writes text while its tokens come; a character is written when all its bytes are there.

    Args:
        tokenizer: turns ids into text.
        prompt: ids before the first new one.
        write: takes the next piece of text.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], write: Callable[[str], None]
    ) -> None:
        self.tokenizer, self.prompt, self.write = tokenizer, prompt, write
        self.tokens: list[int] = []
        self.written = 0

    def add(self, token: int) -> None:
        """Takes the next token."""
        self.tokens.append(token)
        text = continuation_text(self.tokenizer, self.prompt, self.tokens)
        self._write(text.rstrip(_UNDECODABLE))

    def close(self) -> None:
        """Writes what is left: bytes that became no character."""
        self._write(continuation_text(self.tokenizer, self.prompt, self.tokens))

    def _write(self, text: str) -> None:
        if len(text) > self.written:
            self.write(text[self.written :])
            self.written = len(text)
